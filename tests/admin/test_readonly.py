"""Nothing is added, edited or deleted in the admin, and only POST acts or locks a row."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.test import RequestFactory
from django.urls import URLPattern, reverse

from agentruns.models import ApiToken, Approval, Definition, Message, Run, Session
from agentruns.services.api_tokens import create_token
from tests.admin.pages import unchanged, url
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.statements import captured_statements

pytestmark = pytest.mark.django_db
LOCKING = ("UPDATE", "INSERT", "DELETE")
DJANGOS = {"changelist", "add", "history", "delete", "change"}


def test_add_change_and_delete_are_refused(world: World) -> None:
    approval, client = world.waiting(), browser("superuser")
    with unchanged():
        for obj, send in product((approval, approval.run), (client.get, client.post)):
            assert send(reverse(f"admin:agentruns_{obj._meta.model_name}_add")).status_code == 403
            assert send(url(obj, "delete"), {"post": "yes"}).status_code == 403
            assert client.post(url(obj), {"status": "completed", "_save": "1"}).status_code == 403


def test_what_is_not_there_is_a_404(world: World) -> None:
    client = browser("superuser")
    actions = {"run": ("change", "resume", "cancel"), "approval": ("change", "approve", "deny")}
    for key in ("0", "nonsense", "01a20063-1614-7366-bffc-9410caa63bce", "_5F"):
        for model, action in ((model, action) for model, names in actions.items() for action in names):
            target = reverse(f"admin:agentruns_{model}_{action}", args=[key])
            assert client.get(target).status_code == 404
            if action != "change":
                assert client.post(target, {"digest": "x", "reason": "x", "seq": 1}).status_code == 404
    run, other = world.completed(), world.waiting("other").run
    last = run.messages.latest("seq").seq
    assert client.get(url(run, "row", last)).status_code == 200
    assert not other.messages.filter(seq=last).exists()
    for seq in (0, last, 9999, 2**63 - 1, 2**63, 10**30):
        assert client.get(url(other, "row", seq)).status_code == 404, seq


def test_no_permission_to_write_is_ever_granted(db: None) -> None:
    assert not any(admin.site.is_registered(model) for model in (Message, Definition, Session))
    request = RequestFactory().get("/")
    request.user = user("superuser")
    for model in (Run, Approval):
        model_admin = admin.site.get_model_admin(model)
        assert model_admin.get_model_perms(request) == {
            "add": False, "change": False, "delete": False, "view": True,
        }  # fmt: skip
        assert set(model_admin.get_actions(request)) <= {
            "approve_selected", "deny_selected", "resume_selected", "pause_selected", "cancel_selected",
            "adopt_selected",
        }  # fmt: skip


def ours(model: type[Any]) -> list[URLPattern]:
    """Return the patterns that we add to the admin of a model."""
    prefix = f"agentruns_{model._meta.model_name}_"
    patterns = admin.site._registry[model].get_urls()
    return [one for one in patterns if one.name and one.name.removeprefix(prefix) not in DJANGOS]


@pytest.mark.parametrize("method", ["get", "options", "trace", "put", "patch", "delete", "post"])
def test_nothing_but_a_post_with_a_token_changes_anything(world: World, method: str) -> None:
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
    asked, tokens = set(), list(ApiToken.objects.values())
    with unchanged():
        for model, rows in things.items():
            for pattern in ours(model):
                for row in rows:
                    names = {"object_id": row.pk, "run_id": approval.run_id, **given}
                    wanted = {name: names[name] for name in pattern.pattern.converters}
                    with captured_statements() as statements:
                        response = getattr(client, method)(reverse(f"admin:{pattern.name}", kwargs=wanted))
                    assert response.status_code < 500, pattern.name
                    assert method != "post" or response.status_code == 403, pattern.name
                    assert not [sql for sql in statements if sql.startswith(LOCKING)], pattern.name
                    asked.add(pattern.name)
    for name in ("run_cancel", "run_pause", "run_watch", "run_again", "run_fork", "run_resolve",
                 "approval_approve", "approval_reveal", "approval_turn", "apitoken_revoke"):  # fmt: skip
        assert f"agentruns_{name}" in asked
    assert list(ApiToken.objects.values()) == tokens
    assert LogEntry.objects.count() == 0
