"""A run that another process finishes loses nothing, and keeps to its definition and budget."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from agentruns import cancel_run, pause_run, resume_run, run_agent, start_run
from agentruns.exceptions import AgentRunsError
from agentruns.journal.store import load
from agentruns.models import Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.dying import die_at
from tests.db.failures import failing, start
from tests.db.helpers import GO_ON, forget_backoff, outcomes, payloads, run_turns, the_run
from tests.db.racing import at_once
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def turns() -> list[dict[str, Any]]:
    """Build three steps that think, call and count tokens."""
    return [
        {
            "content": [
                {"type": "thinking", "thinking": f"step {number}", "signature": "c2ln"},
                {"type": "tool_use", "id": f"c{number}", "name": "lookup", "input": {"number": str(number)}},
            ],
            "stop_reason": "tool_use",
            "usage": {"input_tokens": 10 + number, "output_tokens": number},
        }
        for number in range(3)
    ]


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("point", ["after_reply", "after_result"])
def test_what_is_recovered_is_what_would_have_been(point: str, nth: int) -> None:
    smooth = run_turns(*turns(), session="smooth")
    died = die_at(point, shop_agent("died", *turns()), "died", nth=nth)
    result = resume_run(died.pk)
    assert (result.status, result.output) == (smooth.status, smooth.output)
    assert (result.messages, result.usage) == (smooth.messages, smooth.usage)
    runs = [the_run(one) for one in (smooth, result)]
    assert runs[0].step == runs[1].step == 4
    said = [[(row["content"], row["usage"]) for row in payloads(run, "assistant")] for run in runs]
    assert said[0] == said[1]


@pytest.mark.parametrize("driver", ["sweep", "resume"])
def test_a_run_goes_on_under_the_version_it_was_started_with(driver: str, effects: Effects) -> None:
    old = shop_agent("helper", {"tools": [call("post", text="as v7 says")]}, version="7")
    run = start_run(old, "do it", "s1", idempotency_key="k")
    shop_agent("helper", {"tools": [call("charge", cents=1)]}, version="8")
    assert sweep().completed == 1 if driver == "sweep" else resume_run(run.pk).status == "completed"
    assert [(line["tool"], line["text"]) for line in effects.lines()] == [("post", "as v7 says")]
    assert Run.objects.get().version == "7"
    later = start_run("helper", "do it", "s2", idempotency_key="k2")
    assert later.version == "8"
    assert later.definition_id != run.definition_id


def test_many_resume_one_orphan_and_one_result_is_written(effects: Effects) -> None:
    for round_number in range(3):
        session = f"s{round_number}"
        agent = shop_agent(f"poster-{session}", {"tools": [call("post", text="pay")]})
        run = die_at("after_tool", agent, session)
        results = at_once(*[partial(resume_run, run.pk)] * 4, sweep)
        for one in results:
            assert not isinstance(one, Exception) or isinstance(one, AgentRunsError), results
        for _ in range(3):  # whoever lost the race may have left it held, or queued
            if (run := Run.objects.get(pk=run.pk)).is_ended:
                break
            resume_run(run.pk)
        assert (run.status, outcomes(run)) == ("completed", ["unknown"])
        assert effects.count() == round_number + 1


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_steps": 4}, "max_steps: 4 of 4"), ({"token_budget": 35}, "token_budget: 40 of 35")],
)
def test_budgets_are_not_begun_anew_by_a_crash(options: dict[str, Any], said: str, effects: Effects) -> None:
    """A resumed run that dies repeats nothing either."""
    turn = {"tools": [call("post", text="pay")], "usage": {"input_tokens": 10}}
    agent = shop_agent("spender", *[turn] * 20, on_budget="fail", **options)
    for number in range(1, 4):
        die_at("after_result", agent)  # the same call again is the same run, resumed
        assert effects.count() == number
    assert sweep().failed == 1
    run = Run.objects.get()
    assert (run.step, said in run.error, outcomes(run), effects.count()) == (4, True, ["ok"] * 4, 4)
    assert len({line["key"] for line in effects.lines()}) == 4


def test_a_call_in_doubt_is_not_hidden_by_what_the_user_says_next(effects: Effects) -> None:
    """The call was known after the crash although the model gave it no id."""
    block = {"type": "tool_use", "name": "post", "input": {"text": "pay"}}
    run = die_at("after_tool", shop_agent("poster", {"content": [block], "stop_reason": "tool_use"}))
    cancel_run(run.pk, reason="start over")
    assert outcomes(run) == ["unknown"]
    check_messages([*result_of(run.pk).messages, GO_ON])
    agent = shop_agent("later", {"tools": [call("post", text="pay, please")]})
    later = run_agent(agent, "pay it then", "s1", idempotency_key="k2")
    assert (later.status, effects.count()) == ("awaiting-approval", 1)
    assert "unknown outcome" in later.pending[0].why
    check_messages(later.messages[:-1])  # the last turn still waits for its results


POINTS = [
    "before_model", "after_model", "after_reply", "before_tool", "after_tool", "after_result",
    "before_finish",
]  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_every_request_is_valid_and_the_history_is_what_was_returned(point: str, effects: Effects) -> None:
    """A reply that is stored is not asked for again, and what it decided is not done again."""
    asked: list[int] = []

    def ask(request: Any) -> dict[str, Any]:
        check_messages(request.messages)
        asked.append(len(request.messages))
        if request.step == 2:
            return {"text": "FINAL ANSWER"}
        return {"tools": [call("charge", cents=request.step), call("lookup", number=str(request.step))]}

    run = die_at(point, shop_agent("careful", ask, ask, ask))
    result = resume_run(run.pk)
    run = the_run(result)
    assert (result.status, result.output, run.output) == ("completed", "FINAL ANSWER", "FINAL ANSWER")
    assert load("default", run.session_id, run.pk).conversation.settled_messages() == result.messages
    assert [message["role"] for message in result.messages] == ["user", "assistant"] * 3
    check_messages([*result.messages, GO_ON])
    assert (asked.count(1), sorted(set(asked))) == (1 + (point == "after_model"), [1, 3, 5])
    assert len(payloads(run, "user")) == 1, "a resume is no new turn"
    assert [line["cents"] for line in effects.lines() if line["tool"] == "charge"] == [0, 1]


def test_a_result_says_why_the_run_does_not_go_on() -> None:
    run = start([failing("retry"), failing("pause")])
    assert (run.status, result_of(run.pk).error) == ("queued", "some_error: no luck")
    forget_backoff(run)
    told = run_agent("flaky", "do it", "s1", idempotency_key="k")
    assert (told.status, told.error) == ("paused", "some_error: no luck")
    queued = start_run(shop_agent("stopped"), "do it", "s2")
    pause_run(queued.pk, reason="the shop is being moved")
    assert result_of(queued.pk).error == Run.objects.get(pk=queued.pk).blocked_reason != ""
    died = die_at("after_tool", shop_agent("dies", {"tools": [call("post", text="x")]}), "s3")
    sweep()
    told = result_of(died.pk)
    why = f"Nobody knows whether post ({told.orphans[0]}) happened: resolve_orphan or resume_run goes on."
    assert (told.status, told.error, Run.objects.get(pk=died.pk).error) == ("orphaned", why, "")
    asks = run_turns({"tools": [call("refund", cents=5000)]}, session="s4")
    assert (asks.status, asks.error) == ("awaiting-approval", "")
