"""Child runs: one for each call, whatever dies; results come up, and a cancel and a pause go down."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from django.db.models.functions import Now

from agentruns import (
    RunContext,
    approve,
    cancel_run,
    deny,
    fork_run,
    pause_run,
    resume_run,
    run_agent,
    start_run,
    tool,
)
from agentruns.engine import children as engine
from agentruns.engine.leases import claim
from agentruns.exceptions import NotDurableError, RunStateError
from agentruns.models import Approval, Event, Message, Run, Session
from agentruns.services.data.erasure import erase_whole_session
from agentruns.services.data.retention import prune_ended
from agentruns.services.events import settle_due, stop_waiting
from agentruns.services.runs import family
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at
from tests.admin.people import browser
from tests.api.http import Api, make_user
from tests.db.families import HAND_OVER, begin, children, hand_over, whole, work
from tests.db.helpers import kill, names, outcomes, payloads, user
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

POST = {"tools": [call("post", text="hello")]}
ASK = {"tools": [call("refund", cents=5000)]}


def result(run: Run, position: int = 0) -> dict[str, Any]:
    return payloads(run, "tool_result")[position]


def test_a_call_starts_a_run_of_the_agent_and_its_output_is_the_result(effects: Effects) -> None:
    owner = user("ada")
    boss = hand_over(to=[POST])
    run = begin(boss, owner=owner, scope="shop", context={"order": 7}, priority="high")
    (child,) = children(run)
    assert (run.status, run.lease_expires_at, child.status) == ("waiting", None, "queued")
    assert (child.agent, child.input, child.title) == ("scout", "look around", "look around")
    assert (child.owner_id, child.scope, child.context, child.priority) == (
        owner.pk,
        "shop",
        {"order": 7},
        -1,
    )
    assert child.requesters == run.requesters
    assert child.session.key not in {"s1", ""}
    assert Run.objects.with_context(order=7).count() == 2
    work()
    run, child = whole()
    assert (run.status, child.status, child.output, names(effects)) == (
        "completed",
        "completed",
        "all done",
        ["post"],
    )
    (told,) = payloads(run, "tool_result")
    assert (told["content"], told["outcome"], told["is_error"]) == ("all done", "ok", False)
    assert run.attempts == child.attempts == 0


def test_the_end_of_a_child_settles_its_parent_at_once() -> None:
    run = begin(hand_over())
    (child,) = children(run)
    sweep(run_id=child.pk)
    run.refresh_from_db()
    assert (run.status, outcomes(run)) == ("queued", ["ok"])


def test_children_of_one_reply_are_started_together_and_go_on_side_by_side() -> None:
    calls = [call("scout", task=f"look {number}") for number in range(3)]
    run = begin(hand_over({"tools": calls}))
    assert [child.input for child in children(run)] == ["look 0", "look 1", "look 2"]
    started = Message.objects.filter(run=run, kind="tool_started").order_by("seq")
    assert len({row.created_at for row in started}) == 1
    for child in children(run)[:2]:
        sweep(run_id=child.pk)
    run.refresh_from_db()
    assert (run.status, outcomes(run)) == ("waiting", ["ok", "ok"])
    work()
    assert [each.status for each in whole()] == ["completed"] * 4


def test_a_child_does_not_pass_another_call_of_the_reply(effects: Effects) -> None:
    calls = [call("scout", task="first"), call("post", text="then"), call("scout", task="last")]
    run = begin(hand_over({"tools": [*calls, call("search", query="beside")]}))
    assert ([child.input for child in children(run)], names(effects)) == (["first"], ["search"])
    work()
    assert names(effects) == ["search", "post"]
    assert [child.input for child in children(run)] == ["first", "last"]
    assert [each.status for each in whole()] == ["completed"] * 3


def test_a_child_waits_for_a_decision_about_a_call_before_it() -> None:
    run = begin(hand_over({"tools": [call("refund", cents=5000), call("scout", task="then")]}))
    assert (run.status, children(run)) == ("awaiting-approval", [])
    approve(Approval.objects.get().pk, None)
    work()
    assert [each.status for each in whole()] == ["completed"] * 2


@pytest.mark.parametrize(
    "point",
    [
        *("before_children", "after_children", "before_finish", "after_finish"),
        *("before_settled", "after_settled"),
    ],
)
def test_a_death_at_each_boundary_starts_no_second_child_and_loses_no_result(
    point: str, effects: Effects
) -> None:
    run = start_run(hand_over(to=[POST]), "do it", "s1")
    with crashing_at(point):
        work()
    for each in Run.objects.filter(status="running"):
        kill(each)
    work()
    assert [each.status for each in whole()] == ["completed", "completed"]
    assert (names(effects), outcomes(run)) == (["post"], ["ok"])


def test_a_child_that_failed_before_it_acted_is_an_error_without_a_doubt() -> None:
    run = begin(hand_over(HAND_OVER, HAND_OVER, to=[{"stop_reason": "refusal", "text": "no"}]))
    work()
    told = result(run)
    assert (told["outcome"], told["is_error"], "in_doubt" in told) == ("error", True, False)
    assert told["content"].startswith("The run of agent scout failed: refusal: ")
    assert (outcomes(run), Approval.objects.count(), len(whole())) == (["error", "error"], 0, 3)


def test_a_child_that_failed_after_it_acted_is_in_doubt_and_the_next_call_asks(effects: Effects) -> None:
    run = begin(hand_over(HAND_OVER, HAND_OVER, to=[POST, {"stop_reason": "refusal", "text": "no"}]))
    work()
    told = result(run)
    assert (told["outcome"], told["in_doubt"]) == ("error", True)
    assert "It had acted before." in told["content"]
    card = Approval.objects.get()
    assert (card.run_id, card.tool_name, len(children(run))) == (run.pk, "scout", 1)
    deny(card.pk, None, "no more")
    work()
    assert (outcomes(run), names(effects)) == (["error", "denied"], ["post"])


def test_a_doubt_inside_a_completed_child_is_a_doubt_about_the_call(effects: Effects) -> None:
    run = begin(hand_over(HAND_OVER, HAND_OVER, to=[{"tools": [call("broken")]}]))
    work()
    told = result(run)
    assert (told["outcome"], told["in_doubt"], told["is_error"]) == ("ok", True, False)
    assert told["content"] == "all done\nNobody knows whether these calls of it happened: broken."
    assert Approval.objects.get().tool_name == "scout"


def test_a_child_that_somebody_cancels_is_an_error_with_the_reason() -> None:
    run = begin(hand_over())
    cancel_run(children(run)[0].pk, None, reason="not now")
    work()
    assert result(run)["content"] == "The run of agent scout was cancelled: not now"
    assert [each.status for each in whole()] == ["completed", "cancelled"]


def test_an_approval_inside_a_child_is_decided_there_and_nothing_restarts(effects: Effects) -> None:
    run = begin(hand_over(to=[POST, ASK]))
    work()
    run.refresh_from_db()
    (child,) = children(run)
    assert (run.status, child.status, run.step) == ("waiting", "awaiting-approval", 1)
    (card,) = Approval.objects.all()
    assert card.run_id == child.pk
    approve(card.pk, None)
    work()
    assert [each.status for each in whole()] == ["completed", "completed"]
    assert (names(effects), payloads(run, "run_resumed")) == (["post", "refund"], [])


def test_a_gated_call_starts_its_child_when_it_is_approved() -> None:
    send = {"tools": [call("send_scout", task="look around")]}
    run = begin(hand_over(send, tool={"requires_approval": True, "name": "send_scout"}))
    assert (run.status, children(run)) == ("awaiting-approval", [])
    approve(Approval.objects.get().pk, None)
    work()
    assert [each.status for each in whole()] == ["completed", "completed"]
    assert Approval.objects.get().status == "consumed"


def test_a_run_that_is_cancelled_ends_after_its_children(effects: Effects) -> None:
    run = begin(hand_over({"tools": [call("scout", task="a"), call("scout", task="b")]}, to=[ASK]))
    work()
    busy = children(run)[0]
    lease = claim("default", Run.objects.filter(pk=busy.pk).update(status="queued") and busy.pk)
    assert lease is not None
    cancel_run(run.pk, None, reason="enough")
    run.refresh_from_db()
    assert [child.status for child in children(run)] == ["running", "cancelled"]
    assert run.status == "waiting"
    work()
    run.refresh_from_db()
    assert run.status == "waiting", "a child is still driven"
    kill(busy)
    work()
    assert [each.status for each in whole()] == ["cancelled"] * 3
    assert (outcomes(run), names(effects)) == (["error", "error"], [])
    reason = payloads(children(run)[0], "run_cancel_requested")[0]
    assert (str(run.pk) in reason["reason"], reason["actor"]["name"]) == (True, "the parent run")


def test_a_second_cancel_ends_the_children_by_force_and_then_the_run(settings: Any) -> None:
    run = begin(hand_over())
    (child,) = children(run)
    assert claim("default", child.pk) is not None
    cancel_run(run.pk)
    assert Run.objects.get(pk=run.pk).status == "waiting"
    settings.AGENTRUNS_LEASE_SECONDS = 1e-6
    cancel_run(run.pk)
    settings.AGENTRUNS_LEASE_SECONDS = 60
    work()
    assert [each.status for each in whole()] == ["cancelled", "cancelled"]


def test_a_second_cancel_ends_the_run_though_a_child_cannot_be_ended(settings: Any) -> None:
    run = begin(hand_over())
    (child,) = children(run)
    assert claim("default", child.pk) is not None
    with patch.object(family, "attend", side_effect=RunStateError("locked")):
        cancel_run(run.pk)
        settings.AGENTRUNS_LEASE_SECONDS = 1e-6
        cancel_run(run.pk)
    settings.AGENTRUNS_LEASE_SECONDS = 60
    run.refresh_from_db()
    assert (run.status, outcomes(run)) == ("cancelled", ["unknown"])
    settle_due()
    kill(child)
    work()
    assert [each.status for each in whole()] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("word", ["cancel", "pause"])
def test_the_sweep_passes_on_what_a_dying_process_did_not(word: str) -> None:
    run = begin(hand_over())
    with patch.object(family, "follow"):
        (cancel_run if word == "cancel" else pause_run)(run.pk)
    assert children(run)[0].status == "queued"
    settle_due()
    work()
    expected = {"cancel": "cancelled", "pause": "paused"}[word]
    assert [each.status for each in whole()] == [expected, expected]


def test_a_pause_goes_down_and_so_does_the_resume(effects: Effects) -> None:
    inner = shop_agent("inner", POST)
    scout = shop_agent("scout", {"tools": [call("inner", task="deeper")]}, tools=[inner.as_tool()])
    run = begin(shop_agent("boss", HAND_OVER, tools=[scout.as_tool()]))
    work_on = children(run)[0]
    sweep(run_id=work_on.pk)
    pause_run(run.pk, None, reason="wait")
    assert [each.status for each in whole()] == ["paused"] * 3
    work()
    assert names(effects) == []
    resume_run(run.pk, drive=False)
    assert [each.status for each in whole()] == ["waiting", "waiting", "queued"]
    work()
    assert ([each.status for each in whole()], names(effects)) == (["completed"] * 3, ["post"])


def test_a_child_that_somebody_else_paused_stays_paused() -> None:
    run = begin(hand_over())
    (child,) = children(run)
    pause_run(child.pk)
    pause_run(run.pk)
    resume_run(run.pk, drive=False)
    work()
    assert [each.status for each in whole()] == ["waiting", "paused"]
    resume_run(child.pk)
    work()
    assert [each.status for each in whole()] == ["completed", "completed"]


def test_a_child_ends_while_its_parent_is_paused() -> None:
    run = begin(hand_over())
    (child,) = children(run)
    with patch.object(family, "follow"):
        pause_run(run.pk)
    with patch.object(family, "pause"):  # as where the child's worker ends it first
        sweep(run_id=child.pk)
    run.refresh_from_db()
    assert (run.status, outcomes(run), children(run)[0].status) == ("paused", ["ok"], "completed")
    resume_run(run.pk, drive=False)
    work()
    assert [each.status for each in whole()] == ["completed", "completed"]


def test_a_run_may_be_five_levels_below_the_first() -> None:
    agent = shop_agent("level-0")
    for level in range(1, 7):
        turn = {"tools": [call(f"level-{level - 1}", task="deeper")]}
        agent = shop_agent(f"level-{level}", turn, tools=[agent.as_tool()])
    begin(agent)
    work()
    runs = whole()
    assert [run.agent for run in runs] == [f"level-{level}" for level in (6, 5, 4, 3, 2, 1)]
    told = result(runs[-1])
    assert told["content"].startswith("Not executed: this run is 5 levels below the first run of its family")
    assert {run.status for run in runs} == {"completed"}


def test_a_family_has_so_many_runs_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_FAMILY", 3)
    run = begin(hand_over({"tools": [call("scout", task="x")] * 3}))
    work()
    assert (len(children(run)), sorted(outcomes(run))) == (2, ["error", "ok", "ok"])
    assert "its family has 3 runs, and there may be 3" in str(payloads(run, "tool_result"))
    assert len(whole()) == 3


def test_an_agent_whose_calls_the_requester_confirms_needs_an_owner() -> None:
    @tool(requires_approval=True, approvers="requester")
    def pay() -> str:
        return "paid"

    scout = shop_agent("scout", tools=[pay])
    boss = shop_agent("boss", HAND_OVER, tools=[scout.as_tool()])
    run = begin(boss)
    assert "are confirmed by the requester" in result(run)["content"]
    assert len(children(begin(boss, "s2", owner=user("ada")))) == 1


def say(run: RunContext) -> str:
    if run.text == "fail":
        raise ValueError("no instructions")
    return f"Serve {run.context['who']}: {run.text}."


def test_functions_make_the_instructions_of_a_child() -> None:
    scout = shop_agent("scout", instructions=say)
    calls = [call("scout", task="look around"), call("scout", task="fail")]
    run = begin(shop_agent("boss", {"tools": calls}, tools=[scout.as_tool()]), context={"who": "Ada"})
    work()
    (child,) = children(run)
    assert payloads(child, "run_started")[0]["instructions"] == "Serve Ada: look around."
    assert sorted(outcomes(run)) == ["error", "ok"]
    whole()


def test_an_agent_that_is_gone_is_an_error() -> None:
    boss = hand_over()
    with patch.object(
        engine, "get_agent", side_effect=engine.UnknownAgentError("There is no agent 'scout'.")
    ):
        run = begin(boss)
    assert result(run)["content"] == "Not executed: There is no agent 'scout'. Nothing happened."


def test_a_stateless_run_starts_no_other_run() -> None:
    with pytest.raises(NotDurableError, match="scout"):
        run_agent(hand_over(), "do it")


def test_nobody_stops_the_wait_for_a_child() -> None:
    run = begin(hand_over())
    (call_id,) = run.pending_calls
    with pytest.raises(RunStateError):
        stop_waiting(run.pk, call_id, None)


def test_a_fork_of_a_run_that_waits_starts_no_child_again() -> None:
    run = begin(hand_over())
    at = Message.objects.filter(run=run).order_by("-seq")[0].seq
    fork = fork_run(run.pk, at, text="go on")
    work()
    assert (outcomes(fork), len(children(fork)), len(children(run))) == (["unknown"], 0, 1)


def test_a_family_is_pruned_together() -> None:
    run = begin(hand_over())
    (child,) = children(run)
    sweep(run_id=child.pk)
    long_ago = Now() - timedelta(days=10)
    Run.objects.filter(pk=child.pk).update(updated_at=long_ago)
    assert prune_ended(5).sessions == 0, "its parent goes on"
    work()
    Run.objects.filter(pk=child.pk).update(updated_at=long_ago)
    assert prune_ended(5).sessions == 0, "its parent has just ended"
    Run.objects.update(updated_at=long_ago)
    assert prune_ended(5).sessions == 2
    assert (Run.objects.count(), Session.objects.count(), Event.objects.count()) == (0, 0, 0)


def test_a_family_is_erased_together() -> None:
    run = begin(hand_over())
    (child,) = children(run)
    with pytest.raises(RunStateError, match=str(run.pk)):
        erase_whole_session(child.session.key)
    work()
    with pytest.raises(RunStateError, match=str(run.pk)):
        erase_whole_session(child.session.key)
    erase_whole_session("s1")
    assert (Run.objects.count(), Session.objects.count()) == (0, 0)


def test_the_ids_of_a_child_are_those_of_its_call(effects: Effects) -> None:
    run = begin(hand_over(to=[POST]))
    (child,) = children(run)
    awaited = payloads(run, "event_awaited")[0]
    assert (awaited["name"], awaited["key"]) == ("agentruns.child", str(child.pk))
    begun = payloads(child, "run_started")[0]["parent"]
    assert begun == {"run": str(run.pk), "call": run.pending_calls[0], "root": str(run.pk), "depth": 1}


def test_the_api_tells_of_the_parent_and_lists_the_children() -> None:
    owner = make_user("ada", "view_run")
    run = begin(hand_over(), owner=owner)
    (child,) = children(run)
    api = Api(owner)
    assert api.get(f"/runs/{child.pk}")[1]["parent"] == str(run.pk)
    assert api.get(f"/runs/{run.pk}")[1]["parent"] is None
    listed = api.get(f"/runs?parent={run.pk}")[1]["items"]
    assert [each["id"] for each in listed] == [str(child.pk)]
    assert [each["key"] for each in api.get("/sessions")[1]["items"]] == ["s1"]


def test_the_console_links_a_family_and_a_card_names_the_parent() -> None:
    run = begin(hand_over(to=[ASK]))
    work()
    (child,) = children(run)
    staff = browser(make_user("bob", "view_run", "view_approval", "decide_approval", is_staff=True))
    url = "/admin/agentruns"
    assert f"{url}/run/{child.pk}/change/" in staff.get(f"{url}/run/{run.pk}/change/").content.decode()
    assert f"{url}/run/{run.pk}/change/" in staff.get(f"{url}/run/{child.pk}/change/").content.decode()
    card = staff.get(f"{url}/approval/{Approval.objects.get().pk}/change/").content.decode()
    assert "Started by a call of run" in card
    assert f"{url}/run/{run.pk}/change/" in card
