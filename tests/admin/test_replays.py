"""The page of replays: what it compares, who may ask a model, and that nothing is stored."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connections
from django.urls import reverse

from agentruns import ModelReply, ModelRequest
from agentruns.models import Message, Run
from agentruns.providers.base import ProviderError
from tests.admin.pages import read
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

HOSTILE = "<script>alert(1)</script>\u202e"


def url(run: Run) -> str:
    return reverse("admin:agentruns_run_replay", args=[run.pk])


class Otherwise:
    """A model that decides otherwise, and says whether a transaction was open when it was asked."""

    inside: list[bool] = []

    def propose(self, request: ModelRequest) -> ModelReply:
        self.inside.append(connections["default"].in_atomic_block)
        return ModelReply([{"type": "text", "text": HOSTILE}], "end_turn")


class Failing(Otherwise):
    error: Exception = ProviderError("the key is wrong")

    def propose(self, request: ModelRequest) -> ModelReply:
        raise self.error


def served_by(run: Run, model: Any) -> None:
    """Let the agent of a run have another model now."""
    agent = shop_agent(run.agent, {"tools": [call("post", text="hi")]})
    agent.model = model


def test_compared_with_what_would_be_sent_now(world: World, effects: Effects) -> None:
    run = world.completed()
    rows, did = Message.objects.count(), effects.count()
    client = browser("viewer")
    assert "Compare the recorded run with" in read(client.get(url(run))).text
    shown = read(client.post(url(run), {"who": "code"})).text
    assert "Every request and every call would be the same." in shown
    shop_agent(run.agent, instructions=HOSTILE)
    html = client.post(url(run), {"who": "code"}).content.decode()
    assert "The first difference: row 3, $.system" in html
    assert "<script>alert" not in html
    assert "\u202e" not in html
    assert (Message.objects.count(), effects.count()) == (rows, did)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_model_is_asked_outside_of_any_transaction(
    world: World, effects: Effects, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    run = world.completed()
    served_by(run, Otherwise())
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    Otherwise.inside.clear()
    rows, did = Message.objects.count(), effects.count()
    shown = read(browser("superuser").post(url(run), {"who": "own"})).text
    assert "The first difference: row 3, $.calls[0]" in shown
    assert Otherwise.inside == [False]
    assert (Message.objects.count(), effects.count()) == (rows, did)


def test_who_may_ask_a_model(world: World) -> None:
    run = world.completed()
    served_by(run, Otherwise())
    Otherwise.inside.clear()
    answer = browser("operator").post(url(run), {"who": "own"})
    assert (answer.status_code, Otherwise.inside) == (403, [])
    assert "replay_run" in read(answer).text
    user("operator").user_permissions.add(Permission.objects.get(codename="replay_run"))
    assert browser("operator").post(url(run), {"who": "own"}).status_code == 200
    assert browser("staff").get(url(run)).status_code == 403
    assert browser("anonymous").post(url(run), {"who": "code"}).status_code == 302
    assert browser("superuser", enforce_csrf_checks=True).post(url(run), {"who": "code"}).status_code == 403


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ProviderError("the key is wrong"), "the key is wrong"),
        (RuntimeError(HOSTILE), "The model failed: RuntimeError"),
    ],
)
def test_a_model_that_fails_is_told(world: World, error: Exception, said: str) -> None:
    run = world.completed()
    failing = Failing()
    failing.error = error
    served_by(run, failing)
    answer = browser("superuser").post(url(run), {"who": "own"})
    assert answer.status_code == 409
    assert said in read(answer).text
    assert "<script>alert" not in answer.content.decode()


def test_a_form_that_says_nothing(world: World) -> None:
    run = world.completed()
    client = browser("superuser")
    assert client.post(url(run), {}).status_code == 400
    answer = client.post(url(run), {"who": "model"})
    assert (answer.status_code, "Name the model to ask." in read(answer).text) == (400, True)
