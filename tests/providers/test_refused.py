"""A provider that refuses a conversation: one shorter request, then a person leaves a part out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentruns import (
    Agent,
    Document,
    Image,
    Policy,
    Text,
    ToolContext,
    ToolRefused,
    approve,
    cancel_run,
    erase_payload,
    export_run,
    fork_run,
    leave_out,
    pause_run,
    replay_run,
    resume_run,
    run_agent,
    start_run,
    tool,
)
from agentruns.engine.leases import take
from agentruns.exceptions import (
    DurableRunNotFoundError,
    PermissionDeniedError,
    RunStateError,
    SessionBusyError,
)
from agentruns.journal.conversation import BOUND
from agentruns.models import Approval, Message, Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.providers.base import ProviderError
from agentruns.providers.blocks import GONE
from agentruns.providers.openai import OpenAIModel
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.db.dying import die_at
from tests.db.helpers import sound, the_run, user
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.fake_openai import FakeOpenAI
from tests.pictures import PDF, png
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

POISON = "a-word-that-no-filter-likes"
PROVIDERS = pytest.mark.parametrize("provider", ["claude", "responses", "chat"])


@tool
def pay(ctx: ToolContext, how: str) -> Any:
    """Pay, and give back a receipt."""
    act("pay", ctx)
    if how == "file":
        return [Text("Receipt:"), Image(data=png(note=POISON.encode() * 400), name="receipt.png")]
    return {"poison": POISON, "large": f"{'x' * 6 * BOUND}{POISON}", "fine": "paid"}[how]


@tool(safe_to_retry=True)
def look(ctx: ToolContext) -> str:
    """Look it up."""
    act("look", ctx)
    return POISON


def serving(provider: str, script: Any, **options: Any) -> Any:
    options = {"poison": POISON, **options}
    return FakeAnthropic(script, **options) if provider == "claude" else FakeOpenAI(script, **options)


def agent_on(provider: str, fake: Any, **options: Any) -> Agent:
    if provider == "claude":
        model: Any = AnthropicModel("claude-sonnet-5-5", fake.client())
    else:
        model = OpenAIModel("gpt-4.1", api=provider, client=fake.client())  # type: ignore[arg-type]
    return Agent("pays", instructions="Pay.", model=model, tools=[pay, look], **options)


def pays(how: str, text: str = "I pay.") -> Any:
    """Pay once, then say so."""

    def turn(body: Any) -> dict[str, Any]:
        said = json.dumps(body)
        if "tool_result" in said or "function_call_output" in said or '"tool"' in said:
            return {"text": "Paid."}
        return {"text": text, "tools": [{"name": "pay", "input": {"how": how}}]}

    return turn


def refusals(run: Run) -> int:
    return run.messages.filter(kind="model_failed").count()


def left_out(run: Run) -> list[dict[str, Any]]:
    rows = Message.objects.filter(session_id=run.session_id, kind="left_out").order_by("seq")
    return [row.payload for row in rows]


def seq_of(run: Run, kind: str) -> int:
    return int(run.messages.filter(kind=kind).order_by("seq")[0].seq)


@PROVIDERS
@pytest.mark.parametrize("status", [400, 422, 413])
def test_a_run_that_has_acted_pauses_and_goes_on_without_the_result(
    provider: str, status: int, effects: Effects
) -> None:
    with serving(provider, pays("poison"), status=status) as fake:
        agent = agent_on(provider, fake)
        run = the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))
        assert (run.status, refusals(run), left_out(run)) == ("paused", 1, []), "nothing would be shorter"
        assert "This content cannot be processed" in run.blocked_reason
        seq = seq_of(run, "tool_result")
        named = f"It names row {seq}." in run.blocked_reason
        assert named == (provider == "claude"), "where the index cannot be mapped, nobody guesses"
        run = sound(leave_out(run.pk, seq, user("maria", "resume_run"), reason="filter"))
        assert (run.status, sweep().found, sound(run).status) == ("queued", 1, "completed")
        assert GONE in json.dumps(fake.calls[-1].body)
        assert run_agent(agent, "and now?", "s1").status == "completed"
    (row,) = left_out(run)
    assert (row["seq"], row["actor"]["name"], row["reason"]) == (seq, "maria", "filter")
    assert effects.count() == 1 and POISON in str(run.messages.get(seq=seq).payload["content"])
    assert replay_run(run.pk).is_equal


@PROVIDERS
@pytest.mark.parametrize("how", ["large", "file"])
def test_one_shorter_request_is_made_by_itself(provider: str, how: str, effects: Effects) -> None:
    options = {"poison": "", "largest": 6 * BOUND} if how == "large" else {"poison": "base64"}
    with serving(provider, pays(how), **options) as fake:
        run = the_run(run_agent(agent_on(provider, fake), "do it", "s1", idempotency_key="k"))
    assert (run.status, refusals(run), effects.count()) == ("completed", 1, 1), run.error
    (row,) = left_out(run)
    assert (row["bound"], row["actor"]) == (BOUND, None)
    assert replay_run(run.pk).is_equal


CUT_OFF = {
    "nothing": [],
    "blank": [{"type": "text", "text": " \n"}],
    "thinking": [{"type": "thinking", "thinking": "Hm", "signature": "s"}],
    "call": [
        {"type": "text", "text": "And"},
        {"type": "tool_use", "id": "toolu_9", "name": "pay", "input": {"how": "la"}},
    ],
}


def filling(cut: list[dict[str, Any]], fits: bool) -> Any:
    """Pay once, and reach the end of the window with a result that is large, or with any result."""

    def turn(body: Any) -> dict[str, Any]:
        if "tool_result" not in (said := json.dumps(body)):
            return {"tools": [{"name": "pay", "input": {"how": "large"}}]}
        if fits and len(said) < 6 * BOUND:
            return {"text": "Paid."}
        return {"content": cut, "stop_reason": "model_context_window_exceeded"}

    return turn


@pytest.mark.parametrize("cut", CUT_OFF)
def test_a_reply_that_the_windows_end_cuts_off_is_asked_for_with_less(cut: str, effects: Effects) -> None:
    with serving("claude", filling(CUT_OFF[cut], fits=True), poison="") as fake:
        run = the_run(run_agent(agent_on("claude", fake), "do it", "s1", idempotency_key="k"))
    assert (run.status, run.output, refusals(run), effects.count()) == ("completed", "Paid.", 1, 1), run.error
    assert [row["bound"] for row in left_out(run)] == [BOUND]
    failed = run.messages.get(kind="model_failed").payload
    assert (failed["error"]["type"], "output_tokens" in failed["usage"]) == ("context_window_exceeded", True)
    assert replay_run(run.pk).is_equal


def test_a_run_that_has_acted_pauses_where_less_does_not_fit_either(effects: Effects) -> None:
    with serving("claude", filling([], fits=False), poison="") as fake:
        run = the_run(run_agent(agent_on("claude", fake), "do it", "s1", idempotency_key="k"))
    assert (run.status, refusals(run), effects.count()) == ("paused", 2, 1)
    assert "no longer fits the model's context window. The provider refuses" in run.blocked_reason


def test_a_text_that_the_windows_end_cuts_off_is_an_answer_that_was_cut(effects: Effects) -> None:
    with serving("claude", filling([{"type": "text", "text": "Paid, and"}], fits=False), poison="") as fake:
        run = the_run(run_agent(agent_on("claude", fake), "do it", "s1", idempotency_key="k"))
    assert (run.status, run.output, refusals(run)) == ("completed", "Paid, and", 0)
    assert run.messages.get(kind="run_completed").payload["truncated"] is True


def test_the_shorter_request_is_made_once_also_after_a_crash(effects: Effects) -> None:
    with serving("claude", pays("large")) as fake:
        agent = agent_on("claude", fake)
        run = die_at("before_model", agent, nth=3)  # after the refusal, with the shorter request built
        assert (len(left_out(run)), len(fake.calls)) == (1, 2)
        assert (sweep().found, sound(run).status, len(left_out(run))) == (1, "paused", 1)
        assert [len(json.dumps(call.body)) > 6 * BOUND for call in fake.calls] == [False, True, False]
        assert resume_run(run.pk).status == "paused"
        assert (len(left_out(run)), effects.count()) == (1, 1)
        leave_out(run.pk, seq_of(run, "tool_result"))
        assert (sweep().found, sound(run).status) == (1, "completed")


@PROVIDERS
def test_a_reply_is_left_out_and_its_calls_and_results_stay(provider: str, effects: Effects) -> None:
    with serving(provider, pays("fine", POISON)) as fake:
        run = the_run(run_agent(agent_on(provider, fake), "do it", "s1", idempotency_key="k"))
        assert run.status == "paused"
        leave_out(run.pk, seq_of(run, "assistant"))
        assert (sweep().found, sound(run).status, effects.count()) == (1, "completed", 1)
        last = json.dumps(fake.calls[-1].body)
        assert all(text in last for text in (GONE, '"pay"', "paid")), "the model knows what it did"
    assert replay_run(run.pk).is_equal


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_a_reply_with_thinking_is_left_out(kind: str, effects: Effects) -> None:
    used = {"type": "tool_use", "id": "t1", "name": "pay", "input": {"how": "fine"}}
    thought = {"type": "thinking", "thinking": f"Hm. {POISON}"}

    def turn(body: Any) -> dict[str, Any]:
        return {"text": "Paid."} if "tool_result" in json.dumps(body) else {"content": [thought, used]}

    budget = {"budget_tokens": 1024} if kind == "enabled" else {}
    params = {"thinking": {"type": kind, **budget}, "max_tokens": 4096}
    with serving("claude", turn) as fake:
        agent = agent_on("claude", fake, model_params=params)
        run = the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))
        assert run.status == "paused"
        leave_out(run.pk, seq_of(run, "assistant"))
        assert (sweep().found, sound(run).status, effects.count()) == (1, "completed", 1)
        assert run_agent(agent, "and now?", "s1").status == "completed"
        kinds = [call.body["thinking"]["type"] for call in fake.calls]
        assert kinds == [kind, kind, "disabled", kind], "it thinks again in the next turn"


@PROVIDERS
def test_one_block_of_a_task_is_left_out(provider: str, effects: Effects) -> None:
    def turn(body: Any) -> dict[str, Any]:
        fake.poison = POISON  # which the provider minds since then
        return dict(pays("fine")(body))

    with serving(provider, turn, poison="") as fake:
        task = [Text("do it"), Text(POISON), Document(data=PDF, name="a.pdf")]
        run = the_run(run_agent(agent_on(provider, fake), task, "s1", idempotency_key="k"))
        assert (run.status, len(left_out(run))) == ("paused", 1), "without the file first"
        seq = seq_of(run, "user")
        with pytest.raises(RunStateError, match="no reply, result or message"):
            leave_out(run.pk, seq, block=3)
        leave_out(run.pk, seq, block=1)
        assert (sweep().found, sound(run).status) == (1, "completed")
        last = json.dumps(fake.calls[-1].body)
        assert all(text in last for text in (GONE, "do it", "a.pdf")) and POISON not in last


@PROVIDERS
@pytest.mark.parametrize("how", ["task", "result"])
def test_the_next_task_goes_on_after_a_run_that_had_not_acted(
    provider: str, how: str, effects: Effects
) -> None:
    def turn(body: Any) -> dict[str, Any]:
        looks = how == "result" and all(call.error for call in fake.calls)
        return {"tools": [{"name": "look", "input": {}}]} if looks else {"text": "Hello."}

    with serving(provider, turn) as fake:
        agent = agent_on(provider, fake)
        first = run_agent(agent, POISON if how == "task" else "look", "s1")
        assert (first.status, "cannot be processed" in first.error) == ("failed", True)
        assert [run_agent(agent, text, "s1").status for text in ("hello", "again")] == ["completed"] * 2
        assert json.dumps(fake.calls[-1].body).count(GONE) == (1 if how == "task" else 3)
    assert the_run(first).error


def test_an_ended_run_is_mended_for_the_next_task(effects: Effects) -> None:
    with serving("claude", pays("poison")) as fake:
        agent = agent_on("claude", fake)
        run = the_run(run_agent(agent, "do it", "s1", idempotency_key="k"))
        cancel_run(run.pk)
        seq = seq_of(run, "tool_result")
        assert run_agent(agent, "and now?", "s1").status == "failed"
        other = start_run(agent, "wait", "s1")
        assert leave_out(run.pk, seq).pk == other.pk, "which goes on without the row"
        assert leave_out(other.pk, seq).status == "queued", "twice is once"
        assert len([row for row in left_out(run) if row.get("seq") == seq]) == 1
        sweep()
        assert sound(other).status == "completed"
        leave_out(run.pk, seq_of(run, "assistant"), reason="as well")
        assert (sound(run).status, run_agent(agent, "and now?", "s1").status) == ("cancelled", "completed")


def test_a_fork_starts_from_the_mended_conversation(effects: Effects) -> None:
    with serving("claude", pays("poison")) as fake:
        run = the_run(run_agent(agent_on("claude", fake), "do it", "s1", idempotency_key="k"))
        leave_out(run.pk, seq_of(run, "tool_result"))
        fork = fork_run(run.pk, Run.objects.get(pk=run.pk).session.next_seq - 1, text="and now?")
        cancel_run(run.pk)
        sweep()
        assert (sound(fork).status, effects.count()) == ("completed", 1)
        assert GONE in json.dumps(fake.calls[-1].body)
    assert "left_out" in [line.get("kind") for line in export_run(run.pk)]


def test_a_run_that_waits_for_a_person_still_waits(effects: Effects) -> None:
    used = {"tools": [call("lookup", number="A1")]}, {"tools": [call("refund", cents=5000)]}, {"text": "So."}
    run = the_run(run_agent(shop_agent("waits", *used), "do it", "s1", idempotency_key="k"))
    waiting = leave_out(run.pk, seq_of(run, "tool_result"), user("maria", "resume_run"))
    assert (waiting.status, sweep().found) == ("awaiting-approval", 0)
    approve(Approval.objects.get().pk, None)
    assert (sweep().found, sound(run).status, effects.count()) == (1, "completed", 2)
    assert replay_run(run.pk).is_equal


def test_what_cannot_be_left_out(effects: Effects) -> None:
    with serving("claude", pays("poison")) as fake:
        run = the_run(run_agent(agent_on("claude", fake), "do it", "s1", idempotency_key="k"))
        seq = seq_of(run, "tool_result")
        with pytest.raises(PermissionDeniedError):
            leave_out(run.pk, seq, user("nobody", "view_run"))
        for wrong in (seq - 1, 999):
            with pytest.raises(RunStateError, match=f"row {wrong}: it has no reply, result or message"):
                leave_out(run.pk, wrong)
        resume_run(run.pk, drive=False)
        assert take(run._state.db, run.pk)
        with pytest.raises(RunStateError, match="pause or cancel it first"):
            leave_out(run.pk, seq)
        pause_run(run.pk)
    assert left_out(run) == []


class Partly(Policy):
    """Hides the runs with a secret task."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.exclude(input="secret")


def test_only_what_may_be_seen_is_left_out(effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Partly"
    agent = Agent("talks", instructions="Talk.", model=ScriptedModel([{"text": "one"}, {"text": "two"}]))
    hidden = run_agent(agent, "secret", "s1").run_id
    seen, staff = run_agent(agent, "hello", "s1").run_id, user("maria", "resume_run", "view_run")
    with pytest.raises(DurableRunNotFoundError):
        leave_out(str(hidden), 2, staff)
    with pytest.raises(RunStateError, match="no reply, result or message there"):
        leave_out(str(seen), 2, staff)
    leave_out(str(seen), seq_of(Run.objects.get(pk=seen), "user"), staff)
    assert len(left_out(Run.objects.get(pk=seen))) == 1
    start_run(agent, "secret", "s1")
    with pytest.raises(SessionBusyError, match="may not see"):
        leave_out(str(seen), 2, staff)


def test_the_words_of_the_provider_are_erased_with_the_failure(effects: Effects) -> None:
    with serving("claude", pays("poison")) as fake:
        run = the_run(run_agent(agent_on("claude", fake), POISON, "s1", idempotency_key="k"))
    assert run.status == "failed"
    erase_payload(run.pk, seq_of(run, "model_failed"), None, "as asked")
    (row,) = Message.objects.filter(kind="left_out")
    assert row.content is None and "processed" not in sound(run).error


@pytest.mark.parametrize("how", ["looks", "refuses"])
def test_a_call_that_did_nothing_is_no_act(how: str, effects: Effects) -> None:
    @tool(name="pay")
    def pays_not(ctx: ToolContext, how: str) -> str:
        raise ToolRefused(POISON)

    used, name, given = (pays_not, "pay", {"how": "x"}) if how == "refuses" else (look, "look", {})
    with serving("claude", [{"tools": [{"name": name, "input": given}]}]) as fake:
        model = AnthropicModel("claude-sonnet-5-5", fake.client())
        agent = Agent("pays", instructions="Pay.", model=model, tools=[used])
        assert run_agent(agent, "do it", "s1").status == "failed"


@pytest.mark.parametrize(
    ("facts", "is_refusal"),
    [
        ({"status": 400, "type": "invalid_request_error"}, True),
        ({"status": 413, "type": "request_too_large"}, True),
        ({"status": 422}, True),
        ({"type": "context_window_exceeded"}, True),
        ({"code": "context_length_exceeded"}, True),
        ({"code": "invalid_image_format"}, True),
        ({"type": "invalid_reply"}, False),
        ({"status": 418}, False),
        ({"status": 400, "disposition": "pause", "code": "insufficient_quota"}, False),
        ({"status": 401, "disposition": "pause"}, False),
        ({"status": 404, "disposition": "pause", "type": "not_found_error"}, False),
        ({"status": 429, "disposition": "retry"}, False),
        ({}, False),
    ],
)
def test_which_errors_are_about_the_conversation(facts: dict[str, Any], is_refusal: bool) -> None:
    assert ProviderError("no", **facts).is_refusal == is_refusal
