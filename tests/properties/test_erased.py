"""Random runs, of which any rows are erased: what is left folds, and the provider takes the conversation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentruns import run_agent, start_run
from agentruns.journal import read
from agentruns.journal.fold import fold
from agentruns.journal.store import SessionState
from agentruns.management import timeline
from agentruns.models import Message
from agentruns.testing import check_messages
from tests.db.helpers import GO_ON
from tests.properties.faults import CLICKS, NUMBER, TURNS, live, tried_on
from tests.registry import isolated_registry
from tests.shop.agents import shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

# Of a fold, what no erasure may change.
KEPT = ("status", "version", "definition_id", "step", "usage", "pending_calls")


def without(message: Message) -> Any:
    """Return a stored row as it is read once its content is erased."""
    values = {name: getattr(message, name) for name in read.COLUMNS}
    return read.row_of([*(values | {"content": None, "content_salt": None}).values()])


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
    whole = [read.row_of([getattr(message, name) for name in read.COLUMNS]) for message in stored]
    left = [
        without(message) if message.seq in gone else row for message, row in zip(stored, whole, strict=True)
    ]
    for run_id in {row.run_id for row in whole}:
        before, after = fold(run_id, whole), fold(run_id, left)
        assert {name: before.columns()[name] for name in KEPT} == {
            name: after.columns()[name] for name in KEPT
        }
        assert [call.digest for call in before.calls.values()] == [
            call.digest for call in after.calls.values()
        ]
        state = SessionState(run.session_id, run_id)
        for row in left:
            state.apply(row)
            timeline.line(row)
        check_messages([*state.conversation.settled_messages(), GO_ON])
