"""Operations on runs and approvals beyond start and cancel; forks; cards; and what is not sent again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import Field

from agentruns import ToolContext, approve, cancel_run, deny, run_agent, start_run, tool
from agentruns.agents.agent import Agent, registered
from agentruns.api import runs
from agentruns.engine.gate import call_digest
from agentruns.engine.leases import claim
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run, Session
from agentruns.providers.names import model_identity
from agentruns.services.sweep import sweep
from agentruns.utils.clock import utc
from tests.admin.world import World
from tests.api.http import Api, make_user, refused
from tests.db.helpers import run_out, user
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import call, refund, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def boss(db: None) -> Any:
    return make_user("boss", "view_run", "resolve_orphan", "resume_run", "pause_run")


def doubt(run: Run) -> str:
    return str(run.messages.get(kind="orphan_found").call_id)


def test_pause_waits_until_it_is_resumed(api: Api, shop: Agent, owner: Any, boss: Any) -> None:
    run = start_run(shop, "refund", "s1", actor=owner)
    status, body = api.post(f"/runs/{run.pk}/pause", {"reason": "lunch"})
    assert (status, body["status"], body["blocked_reason"]) == (200, "paused", "")
    assert Api(boss).get(f"/runs/{run.pk}")[1]["blocked_reason"] == "lunch"
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
    path, before = f"/runs/{run.pk}/orphans", run.messages.count()
    for call_id in ("x", "%00", "x" * 5000, "%22%3Cscript%3E"):
        problem = refused(api.post(f"{path}/{call_id}/resolve", {"verdict": "occurred"}), 404, "not-found")
        assert len(problem["detail"]) < 200
    path = f"{path}/{doubt(run)}/resolve"
    for wrong in ({}, {"verdict": "maybe"}, {"verdict": "occurred", "result": float("nan")}):
        assert api.post(path, wrong)[0] == 422
    assert Api(make_user("viewer", "view_run")).post(path, {"verdict": "occurred"})[0] == 403
    assert run.messages.count() == before
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
        problem = refused(api.post(path, body), 409, "run-state")
        assert (problem["call_id"], problem["resolved_by_name"]) == (doubt(run), "boss")
        assert problem["resolved_at"].endswith("Z")
    assert problems(run.session_id) == []


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


def test_a_budget_is_raised_with_permission(owner: Any, settings: Any) -> None:
    turns = [{"tools": [call("refund", cents=1)]}, {"text": "done"}]
    agent = shop_agent("spender", *turns, tools=[refund], max_steps=1, cost_budget=1)
    settings.AGENTRUNS_PRICES = {model_identity(agent.model): {"input": 0, "output": 0}}
    run = Run.objects.get(pk=run_agent(agent, "do it", "s1", actor=owner).run_id)
    path, body = f"/runs/{run.pk}/raise-budget", {"max_steps": 9, "cost_budget": "2.50", "reason": "why not"}
    assert Api(owner).post(path, body)[0] == 403, "the owner may not by owning it"
    staff = Api(user("treasurer", "raise_budget", "view_run"))
    for wrong, status in (
        ({"max_steps": 0}, 422), ({"cost_budget": 2}, 422), ({"cost_budget": "-2"}, 422),
        ({"budget": 1}, 422), ({"cost_budget": "0.00"}, 422),
        ({"deadline": 0}, 422), ({"max_steps": 1}, 409), ({"deadline": 60.5}, 409), ({}, 409),
    ):  # fmt: skip
        assert staff.post(path, wrong)[0] == status, wrong
    body["idempotency_key"] = "once"
    answers = [staff.post(path, body) for _time in range(2)]
    assert [(status, answer["status"]) for status, answer in answers] == [(200, "queued")] * 2
    (row,) = Message.objects.filter(kind="budget_raised")
    assert row.payload["limits"] == {"max_steps": 9, "cost_budget": "2.5"}
    assert staff.get(f"/runs/{run.pk}/state")[1]["raised_limits"] == row.payload["limits"]
    assert Api(user("other", "raise_budget")).post(path, body)[0] == 404
    assert sweep().completed == 1


def test_a_row_is_left_out_with_permission(api: Api, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "a task", "s1", actor=owner)
    path, body = f"/runs/{run.pk}/rows/2/leave-out", {"reason": "refused", "idempotency_key": "once"}
    assert api.post(path)[0] == 403, "the owner may not by owning it"
    staff = Api(user("mender", "resume_run", "view_run"))
    for wrong, status in (({"block": -1}, 422), ({"block": 9}, 409)):
        assert staff.post(path, wrong)[0] == status
    assert staff.post(f"/runs/{run.pk}/rows/1/leave-out")[0] == 409
    assert [staff.post(path, body)[0] for _time in range(2)] == [200, 200]
    (row,) = Message.objects.filter(kind="left_out")
    assert (row.payload["seq"], row.payload["actor"]["name"], row.payload["reason"]) == (
        2,
        "mender",
        "refused",
    )
    assert Api(user("other", "resume_run")).post(path)[0] == 404


def test_a_row_is_erased_with_permission_and_reason(api: Api, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "SECRET-TASK", "s1", actor=owner)
    path, body = f"/runs/{run.pk}/rows/2/erase", {"reason": "a letter"}
    assert api.post(path, body)[0] == 403, "the owner may not by owning it"
    staff = Api(user("eraser", "erase_payload", "view_run"))
    assert staff.post(path, {"reason": " "})[0] == 422
    refused(staff.post(path, body), 409, "run-state")
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


def test_what_is_known_is_neither_built_nor_sent_and_opens_nothing(
    api: Api, run: Run, monkeypatch: Any
) -> None:
    status, tag = tagged(api, run)
    assert (status, tag[:3], tag[-1]) == (200, 'W/"', '"')
    with monkeypatch.context() as patch:
        patch.setattr(runs.RunOut, "of", None)  # whoever builds a body fails
        for known in (tag, tag.removeprefix("W/"), f'"x", {tag}', "*"):
            assert tagged(api, run, known) == (304, tag)
    for other in ('"x"', 'W/"', "\x7f", tag.strip('W/"')):
        assert tagged(api, run, other) == (200, tag)
    stranger = Api(make_user("other")).client
    assert stranger.get(f"/api/runs/{run.pk}", headers={"If-None-Match": tag}).status_code == 404
    # Nothing else is kept.
    paths = ["runs", "approvals", "agents", "sessions/s1", "health", "runs/x", f"runs/{run.pk}/state"]
    for path in paths:
        api.get(f"/{path}")
        assert (api.response["Cache-Control"], "ETag" in api.response) == ("private, no-store", False)
    api.post(f"/runs/{run.pk}/cancel")
    assert api.response["Cache-Control"] == "private, no-store"


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


def test_a_fork_that_cannot_be_says_what_to_do_and_leaves_nothing(done: Run, api: Api, owner: Any) -> None:
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
    assert api.post(path, {"at": RESULT, "agent": "nobody"})[1]["type"] == "urn:agentruns:unknown-agent"
    assert [api.post(path, "{")[0], api.post(path)[0], api.request("GET", path)[0]] == [400, 422, 405]
    assert api.post("/runs/x/fork", {"at": RESULT})[0] == 404
    for change, place in (
        ({"at": None}, "at"), ({"at": -1}, "at"), ({"at": 2**63}, "at"), ({"at": "last"}, "at"),
        ({"text": " \n"}, "text"), ({"agent": ""}, "agent"), ({"session": "x" * 201}, "session"),
        ({"session": "a\u200bb"}, "session"), ({"idempotency_key": "a\u2028b"}, "idempotency_key"),
        ({"actor": "root"}, "actor"),
    ):  # fmt: skip
        problem = refused(api.post(path, {"at": RESULT, **change}), 422, "validation")
        assert [error["loc"] for error in problem["errors"]] == [["body", place]]
    assert (Run.objects.count(), Session.objects.count()) == before


# Cards

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


def test_approve_records_and_a_worker_executes_also_an_edit(
    staff: Api, decider: Any, pending: Pending, effects: Effects
) -> None:
    approval, other = pending("s1"), pending("s2")
    status, card = staff.post(
        f"/approvals/{approval.pk}/approve", {"digest": approval.digest, "reason": "fine by me"}
    )
    assert (status, card["status"]) == (200, "approved")
    assert (card["decided_by"], card["decided_by_name"]) == (str(decider.pk), "decider")
    assert (card["reason"], card["decided_at"][-1]) == ("fine by me", "Z")
    body = {"digest": other.digest, "arguments": {"cents": 4000}}
    status, card = staff.post(f"/approvals/{other.pk}/approve", body)
    assert (status, card["arguments"]) == (200, {"cents": 4000})
    assert card["digest"] == call_digest(other.run.session.secret, "refund", {"cents": 4000})
    assert effects.count() == 0
    assert sweep().completed == 2
    assert sorted(line["cents"] for line in effects.lines()) == [4000, 5000]


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
            refused(staff.post(f"/approvals/{approval.pk}/{verb}", body), 422, "validation")
    for body in ("{", b"\xff", "[" * 100_000, "{'digest': 1}"):
        refused(staff.post(f"/approvals/{approval.pk}/approve", body), 400, "malformed")
    for wrong in ({}, {"cents": "many"}, {"cents": 1, "more": 2}, {"cents": [[]] * 500}, {"\ud800": "\x00"}):
        edit = {"digest": approval.digest, "arguments": wrong}
        status, problem = staff.post(f"/approvals/{approval.pk}/approve", edit)
        assert (status, problem["type"]) == (422, "urn:agentruns:invalid-arguments")
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
        refused(staff.post(path, {**body, "arguments": {"cents": 1}}), 422, "unknown-agent")
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
