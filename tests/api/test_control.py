"""Operations on runs and approvals beyond start, cancel and approve; forks; and what is not sent again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentruns import cancel_run, run_agent, start_run, tool
from agentruns.agents.agent import Agent, registered
from agentruns.api import runs
from agentruns.engine.leases import claim
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session
from agentruns.services.sweep import sweep
from tests.admin.world import World
from tests.api.http import Api, make_user
from tests.db.helpers import user
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def boss(db: None) -> Any:
    return make_user("boss", "view_run", "resolve_orphan", "resume_run", "pause_run")


def doubt(run: Run) -> str:
    return str(run.messages.get(kind="orphan_found").call_id)


def test_pause_waits_until_it_is_resumed(api: Api, shop: Agent, owner: Any, boss: Any) -> None:
    run = start_run(shop, "refund", "s1", actor=owner)
    status, body = api.post(f"/runs/{run.pk}/pause", {"reason": "lunch"})
    assert (status, body["status"], body["blocked_reason"]) == (200, "paused", "lunch")
    row = run.messages.get(kind="run_paused")
    assert row.payload["actor"] == {"id": str(owner.pk), "name": "owner"}
    status, problem = api.post(f"/runs/{run.pk}/pause")
    assert (status, problem["type"], problem["run_status"]) == (409, "urn:agentruns:run-state", "paused")
    assert (problem["paused_by"], problem["paused_by_name"]) == (str(owner.pk), "owner")
    assert problem["paused_at"] == row.created_at.isoformat(timespec="microseconds")[:-6] + "Z"
    assert sweep().found == 0
    assert Api(boss).post(f"/runs/{run.pk}/resume")[1]["status"] == "queued"
    assert api.post(f"/runs/{run.pk}/cancel")[0] == 200
    status, problem = api.post(f"/runs/{run.pk}/pause")
    assert (status, problem["ended_by_name"], "paused_by" in problem) == (409, "owner", False)
    assert problems(run.session_id) == []


def test_an_answer_is_what_the_model_gets(
    api: Api, pending: Any, owner: Any, decider: Any, effects: Effects
) -> None:
    approval, staff = pending(), Api(decider)
    body = {"digest": approval.digest, "text": "take the voucher \x00 instead"}
    path = f"/approvals/{approval.pk}/answer"
    assert api.post(path, body)[0] == 403
    assert Api(make_user("other")).post(path, body)[0] == 404
    for wrong in ({"digest": approval.digest, "text": " "}, {"text": "x"}, {**body, "actor": "root"}):
        assert staff.post(path, wrong)[0] == 422
    assert staff.post(path, {**body, "digest": "0" * 64})[1]["digest"] == approval.digest
    status, card = staff.post(path, body)
    assert (status, card["status"], card["decided_by_name"]) == (200, "answered", "decider")
    status, problem = staff.post(path, body)
    assert (status, problem["approval_status"], problem["decided_by_name"]) == (409, "answered", "decider")
    assert sweep().completed == 1
    assert effects.count() == 0
    decided = approval.run.messages.get(kind="approval_decided").payload
    assert (decided["text"], decided["channel"]) == (body["text"], "api")


@pytest.mark.parametrize(
    ("verdict", "outcome"), [("occurred", "ok"), ("unknown", "unknown"), ("not_occurred", None)]
)
def test_a_verdict_ends_the_doubt(world: World, boss: Any, verdict: str, outcome: str | None) -> None:
    run, api = world.orphaned(), Api(boss)
    path = f"/runs/{run.pk}/orphans/{doubt(run)}/resolve"
    body = {"verdict": verdict, "result": {"receipt": ["A1"]}, "evidence": "asked the bank"}
    status, answer = api.post(path, body)
    assert (status, answer["status"]) == (200, "queued")
    resolved = run.messages.get(kind="orphan_resolved").payload
    assert (resolved["verdict"], resolved["evidence"]) == (verdict, "asked the bank")
    assert (resolved["actor"]["name"], resolved["channel"]) == ("boss", "api")
    results = [row.payload for row in run.messages.filter(kind="tool_result")]
    assert [result["outcome"] for result in results] == ([outcome] if outcome else [])
    if verdict == "occurred":
        assert results[0]["content"] == {"receipt": ["A1"]}
        status, problem = api.post(path, body)
        assert (status, problem["type"]) == (409, "urn:agentruns:run-state")
        assert (problem["call_id"], problem["resolved_by_name"]) == (doubt(run), "boss")
        assert problem["resolved_at"].endswith("Z")
    assert problems(run.session_id) == []


def test_a_verdict_that_cannot_be_given(world: World, boss: Any) -> None:
    run, api = world.orphaned(), Api(boss)
    path, before = f"/runs/{run.pk}/orphans", run.messages.count()
    for call_id in ("x", "%00", "x" * 5000, "%22%3Cscript%3E"):
        status, problem = api.post(f"{path}/{call_id}/resolve", {"verdict": "occurred"})
        assert (status, problem["type"]) == (404, "urn:agentruns:not-found")
        assert len(problem["detail"]) < 200
    path = f"{path}/{doubt(run)}/resolve"
    for body in ({}, {"verdict": "maybe"}, {"verdict": "occurred", "result": float("nan")}):
        assert api.post(path, body)[0] == 422
    assert Api(make_user("viewer", "view_run")).post(path, {"verdict": "occurred"})[0] == 403
    assert run.messages.count() == before


@tool(requires_approval=True)
def wire(cents: int) -> str:
    """Wire money.

    Args:
        cents: how much
    """
    return "wired"


def test_agents_show_their_tools_and_not_their_instructions(api: Api, shop: Agent) -> None:
    wires = shop_agent("wirer", tools=[wire])
    status, body = api.get("/agents")
    assert (status, body["next"]) == (200, None)
    for_anyone = [agent.name for agent in registered() if agent.starters == "anyone"]
    assert [each["name"] for each in body["items"]] == for_anyone
    asked, shown = body["items"][-2:]
    about = {"name": "wire", "description": wire.description, "input_schema": wire.input_schema}
    assert shown == {"name": "wirer", "version": "1", "tools": [{**about, "requires_approval": True}]}
    assert wires.instructions not in api.response.content.decode()
    asks = {each["name"]: each["requires_approval"] for each in asked["tools"]}
    assert (asks["refund"], asks["post"]) == ("predicate", False)
    assert Api().get("/agents")[0] == 401
    assert not Message.objects.exists()


def test_a_row_is_erased_with_permission_and_reason(api: Api, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "SECRET-TASK", "s1", actor=owner)
    path, body = f"/runs/{run.pk}/rows/2/erase", {"reason": "a letter"}
    assert api.post(path, body)[0] == 403, "the owner may not by owning it"
    staff = Api(user("eraser", "erase_payload", "view_run"))
    assert staff.post(path, {"reason": " "})[0] == 422
    status, problem = staff.post(path, body)
    assert (status, problem["type"]) == (409, "urn:agentruns:run-state"), "it has not ended"
    cancel_run(run.pk)
    status, answer = staff.post(path, {**body, "idempotency_key": "once"})
    assert (status, answer["input"]) == (200, "[erased]")
    assert "SECRET-TASK" not in str(staff.get(f"/runs/{run.pk}/messages"))
    assert staff.post(path, {**body, "idempotency_key": "once"})[0] == 200
    assert Message.objects.filter(kind="payload_erased").count() == 1
    assert staff.post(f"/runs/{run.pk}/rows/999/erase", body)[0] == 409
    assert Api(user("other", "erase_payload")).post(path, body)[0] == 404


@pytest.fixture
def run(shop: Agent, owner: Any) -> Run:
    return start_run(shop, "refund", "s1", actor=owner)


def tagged(api: Api, run: Run, tag: str | None = None) -> tuple[int, str]:
    """Ask for a run and return the status and the tag of the answer."""
    response = api.client.get(f"/api/runs/{run.pk}", headers={"If-None-Match": tag} if tag else {})
    assert response["Cache-Control"] == "private, no-cache"
    assert bool(response.content) == (response.status_code == 200)
    return response.status_code, response["ETag"]


def test_what_is_known_is_neither_built_nor_sent(api: Api, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    status, tag = tagged(api, run)
    assert (status, tag[:3], tag[-1]) == (200, 'W/"', '"')
    with monkeypatch.context() as patch:
        patch.setattr(runs.RunOut, "of", None)  # whoever builds a body fails
        for known in (tag, tag.removeprefix("W/"), f'"x", {tag}', "*"):
            assert tagged(api, run, known) == (304, tag)
    for other in ('"x"', 'W/"', "\x7f", tag.strip('W/"')):
        assert tagged(api, run, other) == (200, tag)


CHANGES: dict[str, Callable[[Run], Any]] = {
    "driven": lambda run: sweep(),
    "leased": lambda run: claim("default", run.pk),
    "blocked": lambda run: Run.objects.filter(pk=run.pk).update(blocked_reason="nobody serves it"),
    "attempted": lambda run: Run.objects.filter(pk=run.pk).update(attempts=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_sent(api: Api, run: Run, change: str) -> None:
    _, tag = tagged(api, run)
    CHANGES[change](run)
    status, new = tagged(api, run, tag)
    assert (status, new != tag) == (200, True)


def test_a_tag_opens_nothing_and_nothing_else_is_kept(api: Api, run: Run) -> None:
    _, tag = tagged(api, run)
    stranger = Api(make_user("other")).client
    assert stranger.get(f"/api/runs/{run.pk}", headers={"If-None-Match": tag}).status_code == 404
    paths = ["runs", "approvals", "agents", "sessions/s1", "health", "runs/x", f"runs/{run.pk}/state"]
    for path in paths:
        api.get(f"/{path}")
        assert (api.response["Cache-Control"], "ETag" in api.response) == ("private, no-store", False)
    api.post(f"/runs/{run.pk}/cancel")
    assert api.response["Cache-Control"] == "private, no-store"


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


def test_all_that_can_be_said_of_a_fork_and_a_key_is_one_for_ever(done: Run, api: Api) -> None:
    shop_agent("another", *[{"text": "the invoice"}] * 3)
    path, body = f"/runs/{done.pk}/fork", {"at": END, "text": "And the invoice?", "agent": "another"}
    body |= {"session": "mine", "idempotency_key": "k2"}
    status, first = api.post(path, body)
    assert (status, first["agent"], first["input"]) == (201, "another", "And the invoice?")
    assert (first["session"], first["idempotency_key"]) == ("mine", "k2")
    assert api.post(path, body) == (200, first)
    sweep()
    status, again = api.post(path, body)
    assert (status, again["id"], again["status"]) == (200, first["id"], "completed")
    # Keys are each user's own.
    other = Api(make_user("other", "view_run", "fork_run"))
    assert other.post(path, {**body, "session": "theirs"})[0] == 201
    assert Run.objects.filter(origin=done.pk).count() == 2
    assert problems(Session.objects.get(key="mine").pk) == []


def test_conflicts_of_a_fork_say_what_to_do_and_leave_nothing(done: Run, api: Api, owner: Any) -> None:
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


def test_a_fork_of_what_cannot_be_read_or_is_not_there(done: Run, api: Api) -> None:
    path = f"/runs/{done.pk}/fork"
    assert api.post(path, {"at": RESULT, "agent": "nobody"})[1]["type"] == "urn:agentruns:unknown-agent"
    assert [api.post(path, "{")[0], api.post(path)[0], api.request("GET", path)[0]] == [400, 422, 405]
    assert api.post("/runs/x/fork", {"at": RESULT})[0] == 404
    assert Run.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"at": None}, "at"), ({"at": -1}, "at"), ({"at": 2**63}, "at"), ({"at": "last"}, "at"),
        ({"text": " \n"}, "text"), ({"agent": ""}, "agent"), ({"session": "x" * 201}, "session"),
        ({"session": "a\u200bb"}, "session"), ({"idempotency_key": "a\u2028b"}, "idempotency_key"),
        ({"actor": "root"}, "actor"),
    ],
)  # fmt: skip
def test_bad_fields_of_a_fork_are_named(done: Run, api: Api, change: dict[str, Any], place: str) -> None:
    status, problem = api.post(f"/runs/{done.pk}/fork", {"at": RESULT, **change})
    assert (status, problem["type"]) == (422, "urn:agentruns:validation")
    assert [error["loc"] for error in problem["errors"]] == [["body", place]]
