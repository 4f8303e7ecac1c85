from __future__ import annotations

from typing import Any

import pytest

from agentruns import run_agent, start_run
from agentruns.journal.verify import problems
from agentruns.models import Run, Session
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

RESULT, END = 5, 7  # rows of the run: the result of its call, and its last one


@pytest.fixture
def done(owner: Any) -> Run:
    """A run of the owner's that posted something and ended."""
    agent = shop_agent("poster", {"tools": [call("post", text="hi")]})
    result = run_agent(agent, "say hi", "s1", actor=owner, idempotency_key="k1")
    return Run.objects.get(pk=result.run_id)


def test_a_fork_is_the_callers_is_queued_and_repeats_nothing(done: Run, effects: Effects) -> None:
    staff = make_user("staff", "view_run", "fork_run")
    api = Api(staff)
    status, run = api.post(f"/runs/{done.pk}/fork", {"at": RESULT})
    assert status == 201
    assert (run["origin"], run["origin_seq"], run["status"]) == (str(done.pk), RESULT, "queued")
    assert (run["owner"], run["agent"], run["input"]) == (str(staff.pk), "poster", "say hi")
    assert run["session"].startswith("s1 (fork ")
    sweep()
    _, run = api.get(f"/runs/{run['id']}")
    assert (run["status"], run["output"], effects.count()) == ("completed", "all done", 1)
    _, origin = api.get(f"/runs/{done.pk}")
    assert (origin["origin"], origin["origin_seq"], origin["owner_name"]) == (None, None, "owner")


def test_all_that_can_be_said_of_a_fork(done: Run, api: Api) -> None:
    shop_agent("another")
    body = {"at": END, "text": "And the invoice?", "agent": "another", "session": "mine"}
    status, run = api.post(f"/runs/{done.pk}/fork", {**body, "idempotency_key": "k2"})
    assert (status, run["agent"], run["input"]) == (201, "another", "And the invoice?")
    assert (run["session"], run["idempotency_key"]) == ("mine", "k2")
    assert problems(Session.objects.get(key="mine").pk) == []


def test_the_same_key_is_the_same_fork_for_ever(done: Run, api: Api) -> None:
    body = {"at": RESULT, "idempotency_key": "k2"}
    status, first = api.post(f"/runs/{done.pk}/fork", body)
    assert status == 201
    assert api.post(f"/runs/{done.pk}/fork", body) == (200, first)
    sweep()
    status, again = api.post(f"/runs/{done.pk}/fork", body)
    assert (status, again["id"], again["status"]) == (200, first["id"], "completed")
    # Keys are each user's own.
    other = Api(make_user("other", "view_run", "fork_run"))
    assert other.post(f"/runs/{done.pk}/fork", body)[0] == 201
    assert Run.objects.filter(origin=done.pk).count() == 2


def test_who_may(done: Run) -> None:
    may = {
        (): 404,
        ("fork_run",): 404,
        ("view_run",): 403,
        ("view_run", "fork_run"): 201,
    }
    path = f"/runs/{done.pk}/fork"
    for number, (permissions, status) in enumerate(may.items()):
        assert Api(make_user(f"user{number}", *permissions)).post(path, {"at": RESULT})[0] == status
    assert Api().post(path, {"at": RESULT})[0] == 401
    assert Run.objects.filter(origin=done.pk).count() == 1


def test_conflicts_say_what_to_do_and_leave_nothing(done: Run, api: Api, owner: Any) -> None:
    start_run("poster", "another", "taken", actor=owner)
    before = Run.objects.count(), Session.objects.count()
    path = f"/runs/{done.pk}/fork"
    for body, kind, words in (
        ({"at": 99}, "run-state", "has the rows 1 to 7, not 99"),
        ({"at": END}, "run-state", "say in a text what to do"),
        ({"at": RESULT, "idempotency_key": "k1"}, "run-state", "Use a new key"),
        ({"at": RESULT, "session": "taken"}, "session-busy", "a fork needs a new one"),
    ):
        status, problem = api.post(path, body)
        assert (status, problem["type"]) == (409, f"urn:agentruns:{kind}")
        assert words in problem["detail"]
        if kind == "run-state":
            assert (problem["run_id"], problem["run_status"]) == (str(done.pk), "completed")
    assert (Run.objects.count(), Session.objects.count()) == before


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"at": None}, "at"),
        ({"at": -1}, "at"),
        ({"at": 2**63}, "at"),
        ({"at": "last"}, "at"),
        ({"text": " \n"}, "text"),
        ({"agent": ""}, "agent"),
        ({"session": "x" * 201}, "session"),
        ({"session": "a\u200bb"}, "session"),
        ({"idempotency_key": "a\u2028b"}, "idempotency_key"),
        ({"actor": "root"}, "actor"),
    ],
)
def test_bad_fields_are_named(done: Run, api: Api, change: dict[str, Any], place: str) -> None:
    status, problem = api.post(f"/runs/{done.pk}/fork", {"at": RESULT, **change})
    assert (status, problem["type"]) == (422, "urn:agentruns:validation")
    assert [error["loc"] for error in problem["errors"]] == [["body", place]]


def test_what_cannot_be_read_or_is_not_there(done: Run, api: Api) -> None:
    path = f"/runs/{done.pk}/fork"
    assert api.post(path, {"at": RESULT, "agent": "nobody"})[1]["type"] == "urn:agentruns:unknown-agent"
    assert [api.post(path, "{")[0], api.post(path)[0], api.request("GET", path)[0]] == [400, 422, 405]
    assert api.post("/runs/x/fork", {"at": RESULT})[0] == 404
    assert Run.objects.count() == 1
