"""Everybody who knocks at a door: people, tokens that act for them, and visitors who have no user."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from django.contrib.auth.models import Permission, User
from django.test import Client

from agentruns import Policy, session_token, start_run
from agentruns.models import ApiToken, Session
from agentruns.services.api_tokens import create_token

SIGNED = {"nobody", "owner", "viewer", "decider", "stranger", "superuser"}
NEEDS = {"viewer": ["view_run", "view_approval"], "decider": ["decide_approval"]}


class Token(NamedTuple):
    """Whose token it is, and its scopes."""

    whose: str
    scopes: list[str]


READ, WRITE, DECIDE = "runs:read", "runs:write", "approvals:decide"
ACTS, CONFIRMS, POOR, IDLE = "runs:act_for", "approvals:own", "every scope of nobody", "scopes of no use"
TOKENS = {
    **{scope: Token("superuser", [scope]) for scope in (READ, WRITE, DECIDE)},
    ACTS: Token("superuser", [WRITE, ACTS]),
    CONFIRMS: Token("owner", [CONFIRMS]),
    POOR: Token("nobody", list(ApiToken.Scope.values)),
    # Who owns none of the runs has none to confirm, and acting for others alone starts nothing.
    IDLE: Token("superuser", [CONFIRMS, ACTS]),
}
# A visitor of the session whose run waits, and one of another session, for whom the first is somebody else's.
VISITOR, OTHER = "visitor", "other visitor"
VISITED = {VISITOR: "s1", OTHER: "s0"}
BEARERS = [*TOKENS, *VISITED]
WHO = ["anonymous", *sorted(SIGNED), *BEARERS]


ABOUT_NO_USER = ("has_second_factor", "visitor_quota")  # of a request, and of a session


class Wary(Policy):
    """The default rules, which note about whom they are asked: never about anybody but an active user."""

    strangers: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or name in ABOUT_NO_USER or not callable(found):
            return found

        def asked(user: Any, *about: Any) -> Any:
            is_program = user is None and name == "scope"
            if not is_program and not (isinstance(user, User) and user.is_active):
                self.strangers.append(f"{name}({user!r})")
            return found(user, *about)

        return asked


class Tenants(Wary):
    """A user sees their own, whatever permissions they have."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(owner_id=user.pk)


def client_of(who: str, settings: Any) -> Client:
    """Return the client of somebody; the policy is theirs."""
    settings.AGENTRUNS_POLICY = f"{__name__}.{'Tenants' if who == 'stranger' else 'Wary'}"
    if who == "anonymous":
        return Client()
    if who in TOKENS:
        whose, scopes = TOKENS[who]
        return bearing(create_token(person(whose), scopes)[1])
    if who in VISITED:
        session = Session.objects.get(key=VISITED[who])
        return bearing(session_token(session, timedelta(minutes=5)))
    user = person(who)
    if who == "stranger":
        start_run("gated", "mine", "s3", actor=user)
    client = Client()
    client.force_login(user)
    return client


def bearing(token: str) -> Client:
    return Client(headers={"Authorization": f"Bearer {token}"})


def person(name: str) -> User:
    """Return a user with what they need: a stranger has every permission, and all but owners are staff."""
    if name == "superuser":
        return User.objects.get(username=name)
    user, _made = User.objects.get_or_create(username=name)
    ours = Permission.objects.filter(content_type__app_label="agentruns")
    user.user_permissions.set(ours if name == "stranger" else ours.filter(codename__in=NEEDS.get(name, [])))
    User.objects.filter(pk=user.pk).update(is_staff=name != "owner")
    return User.objects.get(pk=user.pk)
