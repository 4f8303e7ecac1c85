from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import Field

from agentruns import ToolContext, approve, cancel_run, deny, run_agent, tool
from agentruns.engine.gate import call_digest
from agentruns.models import Approval
from agentruns.services.sweep import sweep
from agentruns.utils.clock import utc
from tests.api.http import Api, make_user
from tests.db.helpers import run_out
from tests.effects import Effects
from tests.registry import isolated_registry
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
    bad: dict[str, list[Any]] = {
        "approve": [
            {}, {"digest": None}, {"digest": "0" * 65}, {"digest": "x", "argument": {}},
            {"digest": "x", "arguments": {"cents": float("nan")}}, {"digest": "x", "arguments": []},
            {"digest": "x", "arguments": {"cents": -float("inf")}}, {"digest": "x", "reason": 5},
            {"digest": "x", "actor": "root"}, '{"digest": "x", "arguments": ' + nested + "}",
            {"digest": "x", "tool_name": "search", "arguments": {"query": "y"}},
        ],
        "deny": [{"digest": "x"}, {"digest": "x", "reason": " "}, {"reason": "no"}, "", "null", "[]"],
    }  # fmt: skip
    for verb, bodies in bad.items():
        for body in bodies:
            status, problem = staff.post(f"/approvals/{approval.pk}/{verb}", body)
            assert (status, problem["type"]) == (422, "urn:agentruns:validation"), body
    for body in ("{", b"\xff", "[" * 100_000, "{'digest': 1}"):
        status, problem = staff.post(f"/approvals/{approval.pk}/approve", body)
        assert (status, problem["type"]) == (400, "urn:agentruns:malformed"), body
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
    denied, cancelled, expired = pending("s1"), pending("s2"), pending("s3")
    other = make_user("quicker", "decide_approval", "cancel_run")
    decided = deny(denied.pk, other, "no")
    cancel_run(cancelled.run_id, other)
    run_out(expired)
    for approval, verb, more in (
        (denied, "approve", {}), (denied, "deny", {"reason": "no"}), (cancelled, "approve", {}),
    ):  # fmt: skip
        status, problem = staff.post(f"/approvals/{approval.pk}/{verb}", {"digest": approval.digest, **more})
        assert (status, problem["type"]) == (409, "urn:agentruns:approval-state")
        state = "denied" if approval is denied else "cancelled"
        assert (problem["approval_status"], problem["run_id"]) == (state, str(approval.run_id))
        assert (problem["decided_by"], problem["decided_by_name"]) == (str(other.pk), "quicker")
        assert problem["decided_at"][-1] == "Z"
        assert approval is cancelled or problem["decided_at"] == utc(decided.decided_at)
    status, problem = staff.post(f"/approvals/{expired.pk}/approve", {"digest": expired.digest})
    assert (status, problem["type"]) == (409, "urn:agentruns:approval-state")
    assert "expired" in problem["detail"]


def test_a_stale_digest_says_who_edited(staff: Api) -> None:
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
    approval = pending()
    path, body = f"/approvals/{approval.pk}/approve", {"digest": approval.digest}
    with isolated_registry():
        status, problem = staff.post(path, {**body, "arguments": {"cents": 1}})
        assert (status, problem["type"]) == (422, "urn:agentruns:unknown-agent")
        assert staff.post(path, body)[0] == 200, "without an edit nothing of the agent is needed"


def test_odd_arguments_are_legal_json(staff: Api) -> None:
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
