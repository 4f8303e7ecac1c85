"""Random runs, of which any rows are erased: what is left folds, and the provider takes the conversation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentruns import run_agent, start_run
from agentruns.journal import read
from agentruns.journal.fold import fold
from agentruns.journal.store import SessionState
from agentruns.management import timeline
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.properties.faults import CLICKS, NUMBER, TURNS, clear, click, surviving
from tests.rebuild import examples
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


@settings(
    max_examples=examples(40, brief=15, long=500),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(turns=TURNS, clicks=CLICKS, data=st.data())
def test_any_rows_may_be_erased(turns: list[Any], clicks: list[str], data: Any) -> None:
    session = f"erased-{next(NUMBER)}"
    Order.objects.get_or_create(number="A1", customer="Ada", total_cents=100)
    with isolated_registry():
        run = start_run(shop_agent("random", *turns), "do it", session, idempotency_key=session)
        sweep()
        for word in clicks:
            click(word, Run.objects.get(pk=run.pk))
            surviving(sweep)
        clear(run)
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
        end = {"role": "user", "content": [{"type": "text", "text": "go"}]}
        check_messages([*state.conversation.settled_messages(), end])
