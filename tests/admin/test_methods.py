"""Only POST acts, or locks a row: of OPTIONS and TRACE Django wants no CSRF token."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.urls import URLPattern, reverse

from agentruns.models import ApiToken, Approval, Run
from agentruns.services.api_tokens import create_token
from tests.admin.pages import snapshot
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.statements import captured_statements

pytestmark = pytest.mark.django_db
LOCKING = ("UPDATE", "INSERT", "DELETE")
DJANGOS = {"changelist", "add", "history", "delete", "change"}


def ours(model: type[Any]) -> list[URLPattern]:
    """Return the patterns that we add to the admin of a model."""
    prefix = f"agentruns_{model._meta.model_name}_"
    patterns = admin.site._registry[model].get_urls()
    return [one for one in patterns if one.name and one.name.removeprefix(prefix) not in DJANGOS]


@pytest.mark.parametrize("method", ["get", "options", "trace", "put", "patch", "delete"])
def test_nothing_but_post_changes_anything(world: World, method: str) -> None:
    approval, held = world.waiting(), world.orphaned()
    token, _text = create_token(user("decider"), ["runs:read"])
    call_id = held.messages.get(kind="orphan_found").call_id
    things: dict[type[Any], list[Any]] = {
        Approval: [approval],
        ApiToken: [token],
        Run: [held, world.queued(), world.paused(), world.completed()],
    }
    given = {"call_id": call_id, "seq": 1, "sha256": "0" * 64}
    # As a browser that another site sends: logged in, without a token.
    client = browser("superuser", enforce_csrf_checks=True)
    before, asked = snapshot(), set()
    tokens = list(ApiToken.objects.values())
    for model, rows in things.items():
        for pattern in ours(model):
            for row in rows:
                names = {"object_id": row.pk, "run_id": approval.run_id, **given}
                wanted = {name: names[name] for name in pattern.pattern.converters}
                with captured_statements() as statements:
                    response = getattr(client, method)(reverse(f"admin:{pattern.name}", kwargs=wanted))
                assert response.status_code < 500, pattern.name
                assert not [sql for sql in statements if sql.startswith(LOCKING)], pattern.name
                asked.add(pattern.name)
    for name in ("run_cancel", "run_pause", "run_watch", "run_again", "run_fork", "run_resolve",
                 "approval_approve", "approval_reveal", "approval_turn", "apitoken_revoke"):  # fmt: skip
        assert f"agentruns_{name}" in asked
    assert snapshot() == before
    assert list(ApiToken.objects.values()) == tokens
    assert LogEntry.objects.count() == 0
