"""Each write is committed before its effect, and is all or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError

from agentruns import ToolContext, run_agent, start_run, tool
from agentruns.journal.store import Batch, DatabaseStore, load
from agentruns.models import Message, Run, Session
from tests.db.dying import elsewhere
from tests.db.helpers import payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@tool
def look_at_the_journal(ctx: ToolContext) -> str:
    """Tell what another process would read while this handler is at work."""
    kinds = elsewhere(lambda: list(Message.objects.order_by("seq").values_list("kind", flat=True)))
    keys = elsewhere(lambda: [row["key"] for row in payloads(Run.objects.get(), "tool_started")])
    Effects.from_environment().record(ctx.idempotency_key, kinds=kinds, keys=keys)
    return "seen"


def test_the_intent_and_the_start_are_committed_before_the_handler(effects: Effects, agents: None) -> None:
    agent = shop_agent("looker", {"tools": [call("look_at_the_journal")]}, tools=[look_at_the_journal])
    run_agent(agent, "look", "s1", idempotency_key="k")
    (seen,) = effects.lines()
    assert seen["kinds"] == ["run_started", "user", "assistant", "tool_started"]
    assert seen["keys"] == [seen["key"]]


def test_a_write_that_fails_half_way_leaves_nothing(
    effects: Effects, agents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are in when the folded columns fail; a reader sees neither, and no time stamp moved."""
    run = start_run(shop_agent("halved"), "do it", "s1", idempotency_key="k")

    def everything() -> list[Any]:
        tables = (Session, Run, Message)
        return [list(table.objects.order_by("pk").values()) for table in tables]

    def fail(*arguments: object) -> None:
        assert Message.objects.count() == 4, "the rows were inserted first"
        raise DatabaseError("the disk is full")

    before = everything()
    batch = Batch(load("default", run.session_id, run.pk))
    batch.add("run_pause_requested", {"reason": "one"})
    batch.add("run_paused", {"reason": "two"})
    monkeypatch.setattr("agentruns.journal.store.project", fail)
    with pytest.raises(DatabaseError, match="disk is full"):
        DatabaseStore().append(batch)
    assert everything() == before


def test_one_unbroken_sequence_for_a_session_and_all_its_runs(effects: Effects, agents: None) -> None:
    for number in range(3):
        agent = shop_agent(f"turn-{number}", {"tools": [call("post", text=str(number))]})
        run = the_run(run_agent(agent, f"task {number}", "s1", idempotency_key=str(number)))
    rows = Message.objects.filter(session=run.session)
    assert list(rows.order_by("seq").values_list("seq", flat=True)) == list(range(1, 22))
    times = list(rows.order_by("seq").values_list("created_at", flat=True))
    assert times == sorted(times)


def test_ids_names_and_blocks_come_back_as_they_were_said(effects: Effects, agents: None) -> None:
    block = {"type": "tool_use", "id": "call-7", "name": "lookup", "input": {"number": "A1"}}
    content = [{"type": "thinking", "thinking": "hm", "signature": "c2ln"}, block]
    result = run_turns({"content": content, "stop_reason": "tool_use"})
    run = the_run(result)
    (reply, _) = payloads(run, "assistant")
    assert reply["content"] == content
    (intent,) = reply["calls"]
    assert (intent["provider_id"], intent["tool"]) == ("call-7", "lookup")
    rows = Message.objects.filter(run=run, call_id=intent["id"]).values_list("kind", "tool_name")
    assert set(rows) == {("tool_started", "lookup"), ("tool_result", "lookup")}
    assert result.messages[2]["content"][0]["tool_use_id"] == "call-7"


@pytest.mark.parametrize(("kind", "acted"), [("assistant", 0), ("tool_started", 0), ("tool_result", 1)])
def test_a_write_that_fails_for_good_stops_the_run_aloud(
    kind: str, acted: int, effects: Effects, agents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = DatabaseStore.append

    def refuse(store: DatabaseStore, batch: Batch, **options: Any) -> None:
        if any(row.kind == kind for row in batch.rows):
            raise RuntimeError("the database says no")
        append(store, batch, **options)

    monkeypatch.setattr(DatabaseStore, "append", refuse)
    agent = shop_agent("stopped", {"tools": [call("post", text="hi")]})
    with pytest.raises(RuntimeError, match="the database says no"):
        run_agent(agent, "do it", "s1", idempotency_key="k")
    assert effects.count() == acted
    monkeypatch.undo()
    assert Run.objects.get().status not in Run.ENDED
