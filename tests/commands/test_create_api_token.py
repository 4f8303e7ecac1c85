from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from agentruns.models import ApiToken
from agentruns.services.api_tokens import authenticate
from tests.commands.running import run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def ann() -> User:
    return User.objects.create_user("ann")


def test_the_last_line_is_the_token_alone(ann: User) -> None:
    outcome = run("create_api_token", "ann", "--scope", "runs:read", "approvals:decide", "--name=inbox")
    assert outcome.code == 0
    *lines, text = outcome.out.splitlines()
    token = authenticate(text)
    assert token is not None
    assert (token.owner, token.name, token.scopes) == (ann, "inbox", ["runs:read", "approvals:decide"])
    assert abs(token.expires_at - timezone.now() - timedelta(days=90)) < timedelta(minutes=1)
    begun = f"Token {token.prefix} acts as ann: runs:read, approvals:decide; expires 20"
    assert lines[0].startswith(begun)
    assert lines[0].endswith(" UTC, or when ann's password changes.")
    assert not any(text in line for line in lines)


def test_it_expires_after_the_days_asked_for() -> None:
    assert "; expires 20" in run("create_api_token", "ann", "--scope=runs:read", "--days=30").out
    ends = ApiToken.objects.get().expires_at
    assert abs(ends - timezone.now() - timedelta(days=30)) < timedelta(minutes=1)


def test_json_and_scopes_given_one_by_one() -> None:
    (made,) = run("create_api_token", "ann", "--scope=runs:read", "--scope=runs:write", "--json").lines
    assert made["scopes"] == ["runs:read", "runs:write"]
    assert authenticate(made["token"]) is not None


def hides(text: str) -> str:
    return "***"


def test_redaction_leaves_the_token_as_it_is(settings: object) -> None:
    settings.AGENTRUNS_REDACT = "tests.commands.test_create_api_token.hides"  # type: ignore[attr-defined]
    outcome = run("create_api_token", "ann", "--scope=runs:read")
    assert authenticate(outcome.out.splitlines()[-1]) is not None
    assert "ann" not in outcome.out


@pytest.mark.parametrize(
    "command",
    [
        ("nobody", "--scope=runs:read"), ("ben", "--scope=runs:read"),
        ("ann", "--scope=runs:read", "--days=0"), ("ann", "--scope=runs:read", "--days=367"),
        ("ann", "--scope=runs:read", f"--name={'x' * 101}"),
    ],
)  # fmt: skip
def test_usage(command: tuple[str, ...]) -> None:
    User.objects.create_user("ben", is_active=False)
    outcome = run("create_api_token", *command)
    assert (outcome.code, outcome.out) == (2, "")
    assert not ApiToken.objects.exists()


def test_scopes_are_asked_for_by_name() -> None:
    assert "--scope" in run("create_api_token", "ann").err
    assert "runs:delete" in run("create_api_token", "ann", "--scope=runs:delete").err


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_another_database() -> None:
    assert run("create_api_token", "ann", "--scope=runs:read", "--database=other").code == 0
    assert ApiToken.objects.using("other").count() == 1
    assert not ApiToken.objects.exists()
