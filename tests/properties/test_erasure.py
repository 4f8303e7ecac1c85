"""Random runs, of which rows are erased: what they said is nowhere, and all that is left is sound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from agentruns import erase_payload, fork_run, run_agent, start_run
from agentruns.journal.fold import fold
from agentruns.journal.store import SessionState
from agentruns.journal.verify import problems
from agentruns.management import timeline
from agentruns.models import Message, Run, Session
from agentruns.services.runs.control import cancel_run
from agentruns.services.runs.lifecycle import result_of
from agentruns.testing import check_messages
from tests.db.helpers import GO_ON, everywhere
from tests.properties.faults import CLICKS, NUMBER, TURNS, live, tried_on
from tests.registry import isolated_registry
from tests.rows import row_of
from tests.shop.agents import shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

# Of a fold, what no erasure may change.
KEPT = ("status", "version", "definition_id", "step", "usage", "pending_calls")


@tried_on(25, brief=10, long=300)
@given(turns=TURNS, clicks=CLICKS, data=st.data())
def test_an_erased_row_is_nowhere(turns: list[Any], clicks: list[str], data: Any) -> None:
    session = f"gone-{next(NUMBER)}"
    Order.objects.get_or_create(number="A1", customer="Ada", total_cents=100)
    marked = [
        {**turn, "content": [{"type": "text", "text": f"MARK-{at}-{session}"}, *turn["content"]]}
        for at, turn in enumerate(turns)
    ]
    with isolated_registry():
        agent = shop_agent("random", *marked, {"text": f"MARK-end-{session}"})
        run = start_run(agent, f"MARK-task-{session}", session, idempotency_key=session)
        live(run, clicks)
        rows = list(Message.objects.filter(run=run).order_by("seq"))
        fork = fork_run(run.pk, data.draw(st.sampled_from(rows)).seq, text="go on", session=f"{session}-fork")
        cancel_run(fork.pk)
    row = data.draw(st.sampled_from([row for row in rows if row.content]), label="erased")
    text, kept = str(row.content), {one.pk: one.hash for one in Message.objects.all()}
    erase_payload(run.pk, row.seq, None, "asked for")
    left = everywhere()
    for mark in [f"MARK-{at}-{session}" for at in (*range(len(turns)), "end", "task")]:
        assert mark not in text or mark not in left, f"{mark} of a row {row.kind} is still there"
    assert kept == {one.pk: one.hash for one in Message.objects.filter(pk__in=kept)}
    for one in Session.objects.filter(key__startswith=session):
        assert problems(one.pk) == []
    for one in Run.objects.filter(session__key__startswith=session):
        check_messages([*result_of(one.pk).messages, GO_ON])


@tried_on(40, brief=15, long=500)
@given(turns=TURNS, clicks=CLICKS, data=st.data())
def test_any_rows_may_be_erased(turns: list[Any], clicks: list[str], data: Any) -> None:
    session = f"erased-{next(NUMBER)}"
    Order.objects.get_or_create(number="A1", customer="Ada", total_cents=100)
    with isolated_registry():
        run = start_run(shop_agent("random", *turns), "do it", session, idempotency_key=session)
        live(run, clicks)
        run_agent(shop_agent("next"), "and now?", session, idempotency_key=f"{session}-2")
    stored = list(Message.objects.filter(session_id=run.session_id).order_by("seq"))
    gone = data.draw(st.sets(st.sampled_from([message.seq for message in stored])), label="erased")
    whole = [*map(row_of, stored)]
    for message in stored:
        if message.seq in gone:
            message.content = message.content_salt = None
    left = [*map(row_of, stored)]
    for run_id in {row.run_id for row in whole}:
        before, after = fold(run_id, whole), fold(run_id, left)
        for name in KEPT:
            assert before.columns()[name] == after.columns()[name], name
        assert [one.digest for one in before.calls.values()] == [one.digest for one in after.calls.values()]
        state = SessionState(run.session_id, run_id)
        for row in left:
            state.apply(row)
            timeline.line(row)
        check_messages([*state.conversation.settled_messages(), GO_ON])
