"""Operations on runs and approvals beyond start, cancel and approve, and their conflicts."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import start_run, tool
from agentruns.agents.agent import Agent, registered
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.admin.world import World
from tests.api.http import Api, make_user
from tests.effects import Effects
from tests.shop.agents import shop_agent

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


@pytest.mark.parametrize("path", ["pause", "resume", "orphans/x/resolve"])
def test_not_yours_is_not_there(api: Api, shop: Agent, path: str) -> None:
    theirs = start_run(shop, "refund", "s1", actor=make_user("other"))
    body = {"verdict": "unknown"} if "orphans" in path else {}
    nobody = "01890000-0000-7000-8000-000000000000"
    found = api.post(f"/runs/{theirs.pk}/{path}", body)
    missing = api.post(f"/runs/{nobody}/{path}", body)
    assert found[0] == missing[0] == 404
    assert found[1]["detail"].replace(str(theirs.pk), nobody) == missing[1]["detail"]
    assert theirs.messages.count() == 2


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


def test_agents_show_their_tools_and_not_their_instructions(api: Api, shop: Agent) -> None:
    @tool(requires_approval=True)
    def wire(cents: int) -> str:
        """Wire money.

        Args:
            cents: how much
        """
        return "wired"

    wires = shop_agent("wirer", tools=[wire])
    status, body = api.get("/agents")
    assert (status, body["next"]) == (200, None)
    for_anyone = [agent.name for agent in registered() if agent.starters == "anyone"]
    assert [each["name"] for each in body["items"]] == for_anyone
    asked, shown = body["items"][-2:]
    assert shown == {
        "name": "wirer",
        "version": "1",
        "tools": [
            {
                "name": "wire",
                "description": wire.description,
                "input_schema": wire.input_schema,
                "requires_approval": True,
            }
        ],
    }
    assert wires.instructions not in api.response.content.decode()
    asks = {each["name"]: each["requires_approval"] for each in asked["tools"]}
    assert (asks["refund"], asks["post"]) == ("predicate", False)
    assert Api().get("/agents")[0] == 401
    assert not Message.objects.exists()
