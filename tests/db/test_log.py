"""The journal is the truth: state is what it adds up to, and nothing is asked or done twice."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connection

from agentruns import Agent, approve, erase_payload, run_agent
from agentruns.journal.fold import fold
from agentruns.journal.read import COLUMNS, _quickly, rows_with_secret, run_rows, session_rows
from agentruns.journal.store import DatabaseStore, load
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session
from agentruns.providers.base import ModelReply
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.db.dying import die_at
from tests.db.helpers import run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_pending_set_at_every_prefix_of_the_log() -> None:
    run = the_run(run_turns({"tools": [call("post", text="a"), call("lookup", number="A1")]}))
    rows = run_rows("default", run.pk)
    seen = []
    for end in range(1, len(rows) + 1):
        state = fold(run.pk, rows[:end])
        seen.append((rows[end - 1].kind, [one.tool for one in state.open_calls()], state.status))
    assert seen == [
        ("run_started", [], "active"),
        ("user", [], "active"),
        ("assistant", ["post", "lookup"], "active"),
        ("tool_started", ["post", "lookup"], "active"),
        ("tool_result", ["lookup"], "active"),
        ("tool_started", ["lookup"], "active"),
        ("tool_result", [], "active"),
        ("assistant", [], "active"),
        ("run_completed", [], "completed"),
    ]


def test_the_folded_columns_may_be_lost(effects: Effects) -> None:
    """The driver reads the log and not them, and the next rows bring them back."""
    result = run_turns({"tools": [call("lookup", number="A1")]}, {"tools": [call("refund", cents=5000)]})
    Run.objects.update(step=0, usage={"lost": 1}, pending_calls=["none"], output="lost", error="lost")
    assert problems(Run.objects.get().session_id) != []
    approve(result.pending[0].pk, None)
    assert sweep().completed == 1
    run = the_run(result)
    assert (run.step, run.output, effects.count()) == (3, "all done", 2)


def test_a_session_is_read_as_djangos_own_converters_read_it() -> None:
    result = run_turns({"tools": [call("lookup", number="A1")]}, {"tools": [call("refund", cents=5000)]})
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


class Wrapped:
    """A store of somebody else: `append`, `load` and the word whether it lasts."""

    durable = True

    def __init__(self) -> None:
        self.inner = DatabaseStore()
        self.append, self.load = self.inner.append, self.inner.load


def test_models_and_stores_are_two_small_interfaces(effects: Effects) -> None:
    agent = Agent("parrot", instructions="Echo.", tools=TOOLS, model=Parrot())
    result = run_agent(agent, "hi", "s1", store=Wrapped())
    assert (the_run(result).output, effects.count()) == ("posted", 1)


def counting(effects: Effects, steps: int) -> list[Any]:
    """Return turns that charge, and leave a line outside for each time the model is asked."""

    def turn(number: int) -> Any:
        def ask(request: Any) -> dict[str, Any]:
            effects.record("asked", tool=f"model {number}")
            return {"tools": [call("charge", cents=number)]}

        return ask

    return [turn(number) for number in range(steps)]


@pytest.mark.parametrize("point", ["after_reply", "before_tool", "after_tool", "after_result"])
def test_a_stored_decision_is_not_asked_for_again(point: str, effects: Effects) -> None:
    die_at(point, shop_agent("asked", *counting(effects, 2)))
    assert sweep().completed == 1
    assert [line["tool"] for line in effects.lines()] == ["model 0", "charge", "model 1", "charge"]


def test_a_crash_at_a_late_step_neither_restarts_nor_loses_the_run(effects: Effects) -> None:
    run = die_at("after_result", shop_agent("long", *counting(effects, 12)), nth=10)
    assert sweep().completed == 1
    expected = [name for number in range(12) for name in (f"model {number}", "charge")]
    assert [line["tool"] for line in effects.lines()] == expected
    assert Run.objects.get(pk=run.pk).step == 13


def test_what_is_a_function_of_the_log_is_not_stored() -> None:
    """The conversation is built from the rows each time; instructions stand once, in the definition."""
    asked: list[Any] = []
    turn = {"tools": [call("post", text="hi")]}
    last = [lambda request: asked.append(request) or {"text": "done"}]
    agent = Agent("derived", instructions="Be brief.", tools=TOOLS, model=ScriptedModel([turn, *last]))
    result = run_agent(agent, "do it", "s1", idempotency_key="k")
    run = the_run(result)
    assert asked[0].system == "Be brief."
    assert asked[0].messages == result.messages[:-1]
    assert load("default", run.session_id, run.pk).conversation.settled_messages() == result.messages
    rows = str([row.payload for row in Message.objects.all()])
    assert ("Be brief." in rows, "role" in rows) == (False, False)
