"""Who is asking: the user of the Django session, with CSRF. Never anything from the body."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from ninja import security
from ninja.errors import AuthenticationError
from ninja.utils import check_csrf

from agentruns.api.errors import URN, Problem


class SessionAuth(security.SessionAuth):
    """Django's session. Nobody signed in is 401, also without a CSRF token; a session without one is 403."""

    def __call__(self, request: HttpRequest) -> Any | None:
        user = self.authenticate(request, None)
        if user is not None and check_csrf(request):
            raise Problem(
                403,
                URN + "csrf",
                "The CSRF token is missing or wrong",
                "Send the CSRF cookie's value in the X-CSRFToken header.",
            )
        return user

    def authenticate(self, request: HttpRequest, key: str | None) -> Any | None:
        """Return the signed-in user, or None."""
        user = request.user
        return user if user.is_authenticated and user.is_active else None


def user_of(request: HttpRequest) -> Any:
    """Return the user who acts.

    A host that mounts the router with another `auth` has to set `request.user`: an actor of None would be
    the program itself, and an anonymous one would own what nobody owns.
    """
    user = request.user
    if not user.is_authenticated or not user.is_active:
        raise AuthenticationError
    return user
