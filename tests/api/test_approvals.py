from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import Field

from agentruns import approve, cancel_run, deny
from agentruns.agents.agent import Agent
from agentruns.engine.gate import call_digest
from agentruns.models import Approval
from agentruns.services.runs import run_agent
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user
from tests.db.helpers import run_out
from tests.effects import Effects
from tests.shop.agents import call, refund, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

Pending = Callable[..., Approval]


@pytest.fixture
def staff(decider: Any) -> Api:
    return Api(decider)


def test_the_card_shows_effective_arguments_and_digest(staff: Api, pending: Pending) -> None:
    approval = pending()
    status, card = staff.get(f"/approvals/{approval.pk}")
    assert status == 200
    assert card["arguments"] == {"cents": 5000}
    assert card["digest"] == call_digest(approval.run.session.secret, "refund", {"cents": 5000})
    assert (card["run"], card["call_id"]) == (str(approval.run_id), approval.call_id)
    assert (card["status"], card["risk"], card["tool_name"]) == ("pending", "high", "refund")
    assert (card["decided_at"], card["decided_by"], card["reason"]) == (None, None, "")
    assert card["requested_at"].endswith("Z")
    assert staff.get("/approvals", status="pending")[1] == {"items": [card], "next": None}
    assert staff.get("/approvals", status="denied")[1]["items"] == []
    assert staff.get("/approvals", status="open")[0] == 422


def test_approve_records_and_a_worker_executes(
    staff: Api, decider: Any, pending: Pending, effects: Effects
) -> None:
    approval = pending()
    status, card = staff.post(
        f"/approvals/{approval.pk}/approve", {"digest": approval.digest, "reason": "fine by me"}
    )
    assert (status, card["status"]) == (200, "approved")
    assert (card["decided_by"], card["decided_by_name"]) == (str(decider.pk), "decider")
    assert (card["reason"], card["decided_at"][-1]) == ("fine by me", "Z")
    assert effects.count() == 0
    assert sweep().completed == 1
    assert [line["cents"] for line in effects.lines()] == [5000]


def test_an_edit_runs_with_the_edited_arguments(staff: Api, pending: Pending, effects: Effects) -> None:
    approval = pending()
    body = {"digest": approval.digest, "arguments": {"cents": 4000}}
    status, card = staff.post(f"/approvals/{approval.pk}/approve", body)
    assert (status, card["arguments"]) == (200, {"cents": 4000})
    assert card["digest"] == call_digest(approval.run.session.secret, "refund", {"cents": 4000})
    sweep()
    assert [line["cents"] for line in effects.lines()] == [4000]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"cents": "many"}, {"cents": 1, "more": 2}, {"cents": [[]] * 500}, {"\ud800": "\x00"}],
)
def test_an_edit_that_does_not_fit_changes_nothing(staff: Api, pending: Pending, arguments: Any) -> None:
    approval = pending()
    body = {"digest": approval.digest, "arguments": arguments}
    status, problem = staff.post(f"/approvals/{approval.pk}/approve", body)
    assert (status, problem["type"]) == (422, "urn:agentruns:invalid-arguments")
    assert staff.get(f"/approvals/{approval.pk}")[1]["status"] == "pending"


def test_bad_bodies(staff: Api, pending: Pending) -> None:
    approval = pending()
    nested = "[" * 400 + "]" * 400
    for verb, body in {
        ("approve", "{}"),
        ("approve", '{"digest": null}'),
        ("approve", '{"digest": "' + "0" * 65 + '"}'),
        ("approve", '{"digest": "x", "argument": {}}'),
        ("approve", '{"digest": "x", "arguments": {"cents": NaN}}'),
        ("approve", '{"digest": "x", "arguments": {"cents": -Infinity}}'),
        ("approve", '{"digest": "x", "arguments": []}'),
        ("approve", '{"digest": "x", "reason": 5}'),
        ("approve", '{"digest": "x", "actor": "root"}'),
        ("approve", '{"digest": "x", "tool_name": "search", "arguments": {"query": "y"}}'),
        ("approve", '{"digest": "x", "arguments": ' + nested + "}"),
        ("deny", '{"digest": "x"}'),
        ("deny", '{"digest": "x", "reason": " "}'),
        ("deny", '{"reason": "no"}'),
        ("deny", ""),
        ("deny", "null"),
        ("deny", "[]"),
    }:
        status, problem = staff.post(f"/approvals/{approval.pk}/{verb}", body)
        assert (status, problem["type"]) == (422, "urn:agentruns:validation"), body
    for body in ("{", b"\xff", "[" * 100_000, "{'digest': 1}"):
        status, problem = staff.post(f"/approvals/{approval.pk}/approve", body)
        assert (status, problem["type"]) == (400, "urn:agentruns:malformed"), body
    for depth in (200, 600, 900, 5000):
        deep = '{"digest": "x", "arguments": {"cents": ' + "[" * depth + "]" * depth + "}}"
        assert staff.post(f"/approvals/{approval.pk}/approve", deep)[0] in (400, 409, 422)
    assert staff.get(f"/approvals/{approval.pk}")[1]["status"] == "pending"


def test_deny_tells_the_model(staff: Api, pending: Pending, effects: Effects) -> None:
    approval = pending()
    reason = "<i>no</i> \x00 \ud800"
    status, card = staff.post(f"/approvals/{approval.pk}/deny", {"digest": approval.digest, "reason": reason})
    assert (status, card["status"]) == (200, "denied")
    assert card["reason"] == "<i>no</i> \ufffd \ufffd"
    assert Approval.objects.get().reason == reason
    assert sweep().completed == 1
    assert effects.count() == 0


def test_a_decided_approval_says_who_and_when(staff: Api, pending: Pending) -> None:
    approval = pending()
    other = make_user("quicker", "decide_approval")
    decided = deny(approval.pk, other, "no")
    for verb, more in (("approve", {}), ("deny", {"reason": "no"})):
        status, problem = staff.post(f"/approvals/{approval.pk}/{verb}", {"digest": approval.digest, **more})
        assert (status, problem["type"]) == (409, "urn:agentruns:approval-state")
        assert (problem["approval_status"], problem["run_id"]) == ("denied", str(approval.run_id))
        assert (problem["decided_by"], problem["decided_by_name"]) == (str(other.pk), "quicker")
        assert decided.decided_at is not None
        assert problem["decided_at"] == decided.decided_at.isoformat(timespec="microseconds")[:-6] + "Z"


def test_a_cancelled_approval_says_who_and_when(staff: Api, pending: Pending) -> None:
    approval = pending()
    cancel_run(approval.run_id, make_user("boss", "cancel_run"))
    status, problem = staff.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})
    assert (status, problem["approval_status"]) == (409, "cancelled")
    assert (problem["decided_by_name"], problem["decided_at"][-1]) == ("boss", "Z")


def test_a_stale_digest_says_who_edited(staff: Api) -> None:
    from agentruns import ToolContext, tool

    @tool(requires_approval=True, approvals=2)
    def ship(ctx: ToolContext, number: int) -> str:
        """Ship."""
        return "shipped"

    agent = shop_agent("shipper", {"tools": [call("ship", number=1)]}, tools=[ship])
    approval = run_agent(agent, "ship", "s1").pending[0]
    editor = make_user("editor", "decide_approval")
    approve(approval.pk, editor, digest=approval.digest, arguments={"number": 2})
    status, problem = staff.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})
    assert (status, problem["approval_status"]) == (409, "pending")
    assert problem["digest"] == call_digest(approval.run.session.secret, "ship", {"number": 2})
    assert problem["decided_by_name"] == "editor"
    card = staff.get(f"/approvals/{approval.pk}")[1]
    assert (card["approved_count"], card["required"], card["arguments"]) == (1, 2, {"number": 2})
    status, card = staff.post(f"/approvals/{approval.pk}/approve", {"digest": problem["digest"]})
    assert (status, card["status"]) == (200, "approved")


def test_a_wrong_digest_is_a_conflict(staff: Api, pending: Pending) -> None:
    approval = pending()
    for digest in ("", "0" * 64, "\x00"):
        status, problem = staff.post(f"/approvals/{approval.pk}/approve", {"digest": digest})
        assert (status, problem["type"]) == (409, "urn:agentruns:approval-state")
        assert problem["digest"] == approval.digest


def test_an_edit_of_an_agent_that_is_not_served_here(staff: Api, pending: Pending) -> None:
    from tests.registry import isolated_registry

    approval = pending()
    with isolated_registry():
        body = {"digest": approval.digest, "arguments": {"cents": 1}}
        status, problem = staff.post(f"/approvals/{approval.pk}/approve", body)
        assert (status, problem["type"]) == (422, "urn:agentruns:unknown-agent")
        # Without an edit nothing of the agent is needed.
        assert staff.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})[0] == 200


def test_odd_arguments_are_legal_json(staff: Api) -> None:
    from agentruns import ToolContext, tool

    @tool(requires_approval=True)
    def say(ctx: ToolContext, text: str, weight: Annotated[float, Field(allow_inf_nan=True)]) -> str:
        """Say."""
        return "said"

    odd = call("say", text="<img src=x onerror=alert(1)>\x00\ud800", weight=float("nan"))
    agent = shop_agent("sayer", {"tools": [odd]}, tools=[say, refund])
    approval = run_agent(agent, "say", "s1").pending[0]
    card = staff.get(f"/approvals/{approval.pk}")[1]
    assert card["arguments"] == {"text": "<img src=x onerror=alert(1)>\ufffd\ufffd", "weight": "NaN"}
    assert card["digest"] == approval.digest
    assert staff.post(f"/approvals/{approval.pk}/approve", {"digest": card["digest"]})[0] == 200


def test_an_expired_approval_is_a_conflict(staff: Api, pending: Pending, shop: Agent) -> None:
    approval = pending()
    run_out(approval)
    status, problem = staff.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})
    assert (status, problem["type"]) == (409, "urn:agentruns:approval-state")
    assert "expired" in problem["detail"]
