"""Fresh passwords: a call with a high risk is approved by who has just proved who they are."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import authenticate, get_user_model

from agentruns.conf import settings
from agentruns.journal.policy import ask
from agentruns.models import Approval
from agentruns.utils import clock

KEY = "agentruns_password_at"  # in Django's session


def is_needed(request: Any, approval: Approval, *, has_session: bool = True) -> bool:
    """Tell whether a person has to give their password before they approve.

    `has_session` is False for a request with a token: the session that a cookie may name is then not its own.
    """
    seconds = settings.REAUTH_SECONDS
    if seconds is None or approval.risk != Approval.Risk.HIGH or ask("has_second_factor", False, request):
        return False
    given_at = request.session.get(KEY) if has_session else None
    return given_at is None or clock.now(settings.DATABASE).timestamp() - given_at > seconds


def confirm(request: Any, password: str) -> bool:
    """Remember that the password of the request's user was given now; return False if it is another."""
    name = {get_user_model().USERNAME_FIELD: request.user.get_username()}
    user = authenticate(request, password=password, **name)
    if user is None or user.pk != request.user.pk:
        return False
    request.session[KEY] = clock.now(settings.DATABASE).timestamp()
    return True
