"""Random runs, of which a random row is erased: what it said is nowhere, and all that is left is sound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentruns import erase_payload, fork_run, start_run
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session
from agentruns.services.control import cancel_run
from agentruns.services.runs import result_of
from agentruns.testing import check_messages
from tests.db.helpers import GO_ON, everywhere
from tests.properties.faults import CLICKS, NUMBER, TURNS, live, tried_on
from tests.registry import isolated_registry
from tests.shop.agents import shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


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
