"""The journal is the truth: state is what it adds up to, and nothing is asked or done twice.

Interrupted calls are repeated where their tool allows it, else in doubt, and the model is told.
"""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from agentruns import Agent, ToolContext, approve, erase_payload, resume_run, run_agent, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.journal.fold import fold
from agentruns.journal.read import COLUMNS, _quickly, rows_with_secret, run_rows, session_rows
from agentruns.journal.store import DatabaseStore, load
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session
from agentruns.providers.base import ModelReply
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.db.dying import die_at
from tests.db.helpers import names, outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_pending_set_at_every_prefix_of_the_log() -> None:
    run = the_run(run_turns({"tools": [call("post", text="a"), call("lookup", number="A1")]}))
    rows = run_rows("default", run.pk)
    seen = []
    for end in range(1, len(rows) + 1):
        state = fold(run.pk, rows[:end])
        seen.append((rows[end - 1].kind, [one.tool for one in state.open_calls()], state.status))
    assert seen == [
        ("run_started", [], "active"), ("user", [], "active"), ("assistant", ["post", "lookup"], "active"),
        ("tool_started", ["post", "lookup"], "active"), ("tool_result", ["lookup"], "active"),
        ("tool_started", ["lookup"], "active"), ("tool_result", [], "active"), ("assistant", [], "active"),
        ("run_completed", [], "completed"),
    ]  # fmt: skip


TWO_STEPS = ({"tools": [call("lookup", number="A1")]}, {"tools": [call("refund", cents=5000)]})


def test_the_folded_columns_may_be_lost(effects: Effects) -> None:
    """The driver reads the log and not them, and the next rows bring them back."""
    result = run_turns(*TWO_STEPS)
    Run.objects.update(step=0, usage={"lost": 1}, pending_calls=["none"], output="lost", error="lost")
    assert problems(Run.objects.get().session_id) != []
    approve(result.pending[0].pk, None)
    assert sweep().completed == 1
    run = the_run(result)
    assert (run.step, run.output, effects.count()) == (3, "all done", 2)


def test_a_session_is_read_as_djangos_own_converters_read_it() -> None:
    result = run_turns(*TWO_STEPS)
    approve(result.pending[0].pk, None)
    assert sweep().completed == 1
    run = the_run(result)
    erase_payload(run.pk, 5, None, "asked for")
    rows, secret = rows_with_secret("default", run.session_id)
    assert (rows, secret) == (session_rows("default", run.session_id), Session.objects.get().secret)
    assert [row for row in rows if row.consumes], "an id that most rows lack"
    assert [row for row in rows if row.is_erased]
    assert {type(row.run_id) for row in rows} == {UUID}
    assert {row.created_at.utcoffset() for row in rows} == {timedelta()}


@pytest.mark.skipif(connection.vendor != "sqlite", reason="PostgreSQL has times of its own")
def test_times_that_a_projects_options_leave_as_texts_or_convert_themselves() -> None:
    run = the_run(run_turns())
    (row, *_later) = session_rows("default", run.session_id)
    stored = dict(zip(COLUMNS, Message.objects.order_by("seq").values_list(*COLUMNS)[0], strict=True))
    stored |= {"run_id": run.pk.hex, "facts": "{}", "content": "{}"}
    at = row.created_at
    for given in (f"{at:%Y-%m-%d %H:%M:%S.%f}", at, at.replace(tzinfo=None)):
        values = {**stored, "created_at": given, "secret": "s"}
        assert _quickly(connection)([*values.values()]).created_at == at


class Parrot:
    """A model of somebody else: `propose` is all there is to it."""

    def propose(self, request: Any) -> ModelReply:
        """Post what was said, then stop."""
        if request.step:
            return ModelReply([{"type": "text", "text": "posted"}], "end_turn")
        block = {"type": "tool_use", "id": "p1", "name": "post", "input": {"text": "echo"}}
        return ModelReply([block], "tool_use")


def test_models_and_stores_are_two_small_interfaces(effects: Effects) -> None:
    inner = DatabaseStore()
    store: Any = SimpleNamespace(durable=True, append=inner.append, load=inner.load)
    result = run_agent(
        Agent("parrot", instructions="Echo.", tools=TOOLS, model=Parrot()), "hi", "s1", store=store
    )
    assert (the_run(result).output, effects.count()) == ("posted", 1)


def test_a_crash_at_a_late_step_neither_restarts_nor_loses_the_run(effects: Effects) -> None:
    def ask(request: Any) -> dict[str, Any]:
        effects.record("asked", tool=f"model {request.step}")
        return {"tools": [call("charge", cents=request.step)]}

    run = die_at("after_result", shop_agent("long", *[ask] * 12), nth=10)
    assert sweep().completed == 1
    assert names(effects) == [name for number in range(12) for name in (f"model {number}", "charge")]
    assert Run.objects.get(pk=run.pk).step == 13


def test_what_is_a_function_of_the_log_is_not_stored() -> None:
    """The conversation is built from the rows each time; instructions stand once, in the definition."""
    asked: list[Any] = []
    turn = {"tools": [call("post", text="hi")]}
    last = [lambda request: asked.append(request) or {"text": "done"}]
    agent = Agent("derived", instructions="Be brief.", tools=TOOLS, model=ScriptedModel([turn, *last]))
    result = run_agent(agent, "do it", "s1", idempotency_key="k")
    run = the_run(result)
    assert (asked[0].system, asked[0].messages) == ("Be brief.", result.messages[:-1])
    assert load("default", run.session_id, run.pk).conversation.settled_messages() == result.messages
    rows = str([row.payload for row in Message.objects.all()])
    assert ("Be brief." in rows, "role" in rows) == (False, False)


def test_the_result_of_an_interrupted_call_has_one_json_form(effects: Effects) -> None:
    run = die_at("after_tool", shop_agent("poster", {"tools": [call("post", text="hi")]}))
    result = resume_run(run.pk)
    asked, answered = result.messages[1]["content"][0], result.messages[2]["content"][0]
    told = json.loads(answered["content"])
    assert set(told) == {"error", "kind", "toolName", "toolCallId"}
    assert (told["kind"], told["toolName"]) == (ToolDurabilityError.kind, "post")
    assert told["toolCallId"] == answered["tool_use_id"] == asked["id"]
    assert answered["is_error"] is True
    assert effects.count() == 1


@tool(safe_to_retry=True)
def count_down(ctx: ToolContext) -> str:
    Effects.from_environment().record(ctx.idempotency_key, attempt=ctx.attempt, call=ctx.call_id)
    if ctx.attempt > 1:
        raise ValueError("gone meanwhile")
    return "there"


def test_a_second_attempt_takes_the_normal_path(effects: Effects) -> None:
    """It gets a real context, and its error becomes its result as any other's."""
    run = die_at("after_tool", shop_agent("counter", {"tools": [call("count_down")]}, tools=[count_down]))
    assert sweep().completed == 1
    first, second = effects.lines()
    assert (first["attempt"], second["attempt"], first["call"] == second["call"]) == (1, 2, True)
    (row,) = payloads(run, "tool_result")
    assert (row["outcome"], "gone meanwhile" in row["content"]) == ("error", True)


@pytest.mark.parametrize("caller", ["sweep", "person"])
@pytest.mark.parametrize(("point", "kept"), [("before_result_commit", 0), ("after_result", 1)])
def test_everything_in_doubt_is_settled_before_the_model_is_asked(
    point: str, kept: int, caller: str, effects: Effects
) -> None:
    """Safe calls in flight run again, and the unsafe one after them runs as if nothing had been.

    What a parallel batch had finished stays finished.
    """
    searches = [call("search", query=str(number)) for number in range(3)]
    turn = {"tools": [*searches, call("post", text="hi"), call("lookup", number="A1")]}
    run = die_at(point, shop_agent("mixed", turn))
    wait_for(lambda: effects.count() == 3, "the other threads, which a real death would end")
    status = sweep().completed if caller == "sweep" else resume_run(run.pk).status
    assert status in (1, "completed")
    kinds = list(Message.objects.filter(run=run).order_by("seq").values_list("kind", flat=True))
    rest = [kind for kind in kinds[kinds.index("run_resumed") :] if kind != "run_resumed"]
    lost = 3 - kept
    repaired = ["orphan_found"] * lost + ["tool_started"] * lost + ["tool_result"] * lost
    others = ["tool_started", "tool_result"] * 2
    assert rest == [*repaired, *others, "assistant", "run_completed"]
    assert (outcomes(run), names(effects)[-2:]) == (["ok"] * 5, ["post", "lookup"])
    assert (effects.count(), len({line["key"] for line in effects.lines()})) == (5 + lost, 5)
    started = Message.objects.filter(run=run, kind="tool_started", tool_name="search").order_by("seq")
    assert sorted(dict(started.values_list("call_id", "attempt")).values()) == [1] * kept + [2] * lost
