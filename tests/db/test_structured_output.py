"""The output of an agent with an output_type is a value of it; what is none is sent back, once."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator

from agentruns import Agent, cancel_run, pause_run, resume_run, run_agent
from agentruns.models import Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.testing import Script, check_messages, crashing_at, expire_leases, run_until_blocked
from tests.commands.running import run as command
from tests.db.helpers import payloads, the_run
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, call

pytestmark = pytest.mark.django_db(transaction=True)


class Refund(BaseModel):
    order: str
    cents: int = Field(gt=0)

    @field_validator("order")
    @classmethod
    def known(cls, order: str) -> str:
        if order == "odd":
            raise LookupError("the shop is closed")
        return order


GOOD = {"text": '{"order": "A1", "cents": 5}'}
BAD = {"text": '{"order": "A1", "cents": 0}'}
VALUE = Refund(order="A1", cents=5)


def teller(*turns: Any, **options: Any) -> Script:
    """Declare the agent; return its model, which refuses what a provider would refuse."""
    script = Script(turns, "claude-sonnet-5-5")
    given = {"instructions": "Tell.", "tools": TOOLS, "output_type": Refund, **options}
    Agent("teller", model=script, **given)
    return script


def start(key: str = "k") -> Any:
    return run_agent("teller", "do it", "s1", idempotency_key=key)


def found(result: Any) -> Any:
    """Find the output of a run as a caller does later."""
    return result_of(Run.objects.get(pk=result.run_id).pk).output


def after_a_crash(point: str) -> Any:
    """Let the process die at a point; return the result of the one that goes on."""
    with crashing_at(point):
        start()
    expire_leases()
    (result,) = run_until_blocked()
    return result


def corrections(run: Run) -> list[str]:
    rows = [row for row in payloads(run, "user") if row.get("reason") == "output_invalid"]
    return [row["content"][0]["text"] for row in rows]


def test_the_output_is_a_value_and_the_run_keeps_its_text() -> None:
    script = teller(GOOD)
    result = start()
    assert (result.status, result.output) == ("completed", VALUE)
    assert the_run(result).output == GOOD["text"]
    assert corrections(the_run(result)) == []
    assert script.requests[0].output_schema == Refund.model_json_schema()
    assert start().output == found(result) == VALUE


def test_a_resumed_run_and_a_stateless_one_have_it_too() -> None:
    paused: list[Any] = []

    def pausing(request: Any) -> Any:
        if not paused:
            paused.append(pause_run(request.run_id))
        return {"tools": [call("post", text="x")]}

    teller(pausing, GOOD)
    result = start()
    assert (result.status, result.output) == ("paused", None)
    assert resume_run(result.run_id).output == VALUE
    teller(BAD, GOOD)
    result = run_agent("teller", "do it")
    assert (result.output, len(result.messages)) == (VALUE, 4)
    teller(BAD, BAD)
    result = run_agent("teller", "do it")
    assert (result.status, result.output) == ("failed", None)


def test_where_the_agent_is_unknown_or_another_the_output_is_text() -> None:
    class Other(BaseModel):
        other: int

    with isolated_registry():
        teller(GOOD)
        result = start()
    with isolated_registry():
        assert found(result) == GOOD["text"]
        teller(output_type=Other)
        assert found(result) == GOOD["text"]
    with isolated_registry():
        teller()
        assert found(result) == VALUE


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (BAD, "- cents: Input should be greater than 0"),
        ({"text": "Here you are: done."}, "- the whole: Invalid JSON"),
        ({"text": '{"order": "A1", "ce', "stop_reason": "max_tokens"}, "- the whole: Invalid JSON: EOF"),
        ({"text": '{"order": "odd", "cents": 5}'}, "LookupError: the shop is closed"),
        ({"content": [], "stop_reason": "end_turn"}, "- the whole: Invalid JSON: EOF"),
        ({"text": "nul \x00 and \ud800"}, "- the whole: "),
    ],
)
def test_an_answer_of_the_wrong_form_is_sent_back_once(wrong: Any, problem: str) -> None:
    script = teller({"tools": [call("lookup", number="A1")]}, wrong, GOOD)
    result = start()
    assert (result.status, result.output) == ("completed", VALUE)
    run = the_run(result)
    (said,) = corrections(run)
    assert problem in said
    assert "output_invalid: Your answer is not of the required form" in command("show_run", str(run.pk)).out
    last = script.requests[-1].messages[-1]
    assert (last["role"], last["content"][-1]["text"]) == ("user", said)
    assert (run.step, len(script.requests)) == (3, 3)
    assert payloads(run, "run_completed") == [{"v": 1, "output": GOOD["text"]}]
    check_messages(result.messages)


def test_a_second_one_fails_the_run_and_says_what_was_wrong_each_time() -> None:
    teller(BAD, {"text": "no"})
    result = start()
    run = the_run(result)
    assert (run.status, run.step, run.output, result.output) == ("failed", 2, None, None)
    assert run.error.startswith("OutputInvalidError: The answer does not fit output_type, also when asked")
    assert "Invalid JSON" in run.error
    assert "greater than 0" in corrections(run)[0]
    # The session's next run is none the worse, and has a correction of its own.
    teller(BAD, GOOD)
    assert start("k2").output == VALUE


def test_tools_come_before_the_answer_also_after_a_correction(effects: Effects) -> None:
    turn = {"text": "not JSON, and not the answer", "tools": [call("post", text="x")]}
    teller(turn, BAD, turn, GOOD)
    result = start()
    assert (result.output, effects.count()) == (VALUE, 2)
    assert len(corrections(the_run(result))) == 1
    teller(BAD, turn, BAD)
    result = start("k2")
    assert result.error.startswith("OutputInvalidError")


@pytest.mark.parametrize("point", ["before_finish", "after_finish", "before_model:2", "after_model:2"])
def test_a_crash_around_the_correction_does_not_double_it(point: str) -> None:
    script = teller(BAD, GOOD)
    result = after_a_crash(point)
    assert (result.status, result.output) == ("completed", VALUE)
    run = the_run(result)
    assert (len(corrections(run)), run.step) == (1, 2)
    kinds = list(Message.objects.filter(run=run).order_by("seq").values_list("kind", flat=True))
    correction = kinds.index("user", 2)
    assert kinds[correction - 1] == "assistant"
    assert len(script.requests) == (2 if point in ("after_finish", "before_model:2") else 3)


def test_a_crash_before_the_second_answer_does_not_forget_the_first() -> None:
    teller(BAD, BAD)
    assert after_a_crash("before_model:2").error.startswith("OutputInvalidError")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_steps": 1}, "max_steps: 1 of 1 replies used."),
        ({"token_budget": 10}, "token_budget: 12 of 10 tokens used."),
        ({"cost_budget": 0.00001}, "cost_budget: 0.000012 of 0.00001 used."),
    ],
)
def test_a_correction_stays_within_the_budgets(options: Any, said: str, settings: Any) -> None:
    settings.AGENTRUNS_PRICES = {"claude-sonnet-5-5": {"input": 1, "output": 1}}
    turn = {**BAD, "usage": {"input_tokens": 7, "output_tokens": 5}}
    script = teller(turn, GOOD, on_budget="fail", **options)
    result = start()
    assert (result.status, result.error) == ("failed", f"BudgetExceededError: {said}")
    assert len(script.requests) == 1


@pytest.mark.parametrize(("request_stop", "status"), [(cancel_run, "cancelled"), (pause_run, "paused")])
def test_a_run_that_is_to_stop_is_not_asked_again(request_stop: Any, status: str) -> None:
    def stopping(request: Any) -> Any:
        request_stop(request.run_id)
        return BAD

    script = teller(stopping, GOOD)
    result = start()
    assert (result.status, len(script.requests)) == (status, 1)
    run = the_run(result)
    if status == "paused":
        assert resume_run(run.pk).output == VALUE
        assert len(corrections(run)) == 1
