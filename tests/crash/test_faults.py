"""The database fails at each statement and each commit of a run, one after the other.

On PostgreSQL the backend is really terminated; SQLite has no backend, so there the statement raises. A lost
acknowledgement is a commit that went through, or did not, while the writer gets an error: a COMMIT, or an
append that is a transaction of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, OperationalError, connection

from agentruns import Agent, approve, resume_run, run_agent
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.dying import elsewhere
from tests.db.helpers import forget_backoff, kill
from tests.db.racing import decide
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order
from tests.statements import broken_commit, statement_wrapper

pytestmark = pytest.mark.django_db(transaction=True)

CALLS = (
    call("lookup", number="A1"), call("post", text="hello"), call("annotate", number="A1", note="seen"),
    call("charge", cents=700),
    call("search", query="x"), call("search", query="y"), call("post", text="again"),
)  # fmt: skip
TURNS = [{"tools": [*CALLS[:4]]}, {"tools": [*CALLS[4:]]}]


def terminate_backend(pid: int) -> None:
    """Kill a process of PostgreSQL."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])


class BrokenStatement:
    """An execute wrapper that breaks the connection at the nth statement, before or after it ran."""

    def __init__(self, nth: int, when: str) -> None:
        self.left, self.when = nth, when

    def __call__(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        self.left -= 1
        if self.left != 0:
            return execute(sql, params, many, context)
        if self.when == "after":
            execute(sql, params, many, context)
        if connection.vendor == "postgresql":
            pid = context["connection"].connection.info.backend_pid
            elsewhere(lambda: terminate_backend(pid))
            return execute("SELECT 1", None, False, context)
        raise OperationalError("the connection broke")


def attempt(agent: Agent, session: str) -> None:
    """Run, and survive what the database does."""
    with suppress(DatabaseError, InterfaceError):
        run_agent(agent, "do it", session, idempotency_key=session)
    connection.close()


def ends_well(session: str, effects: Effects, *, exactly: bool) -> None:
    """Whatever happened, nobody needs SQL to end the run, and nothing was done twice."""
    run = Run.objects.filter(session__key=session).first()
    if run is None:
        return
    if run.lease_expires_at is not None:
        kill(run)
    forget_backoff(run)
    sweep()
    if Run.objects.get(pk=run.pk).status == "orphaned":
        resume_run(run.pk)
    if Run.objects.get(pk=run.pk).status == "awaiting-approval":  # as a tool in doubt is
        decide(run.pk, "approve")
        sweep()
    run = Run.objects.get(pk=run.pk)
    assert run.status == "completed", (session, run.status, run.blocked_reason)
    assert problems(run.session_id) == []
    check_messages(result_of(run.pk).messages)
    done = [line["key"] for line in effects.lines() if line["tool"] in ("post", "charge")]
    assert len(done) == len(set(done)), session
    if exactly:
        assert len(done) == 3, session


@pytest.mark.parametrize("when", ["before", "after"])
def test_at_each_statement(when: str, effects: Effects) -> None:
    if connection.vendor == "sqlite" and when == "after":
        pytest.skip("SQLite runs in this process: a statement that ran has also answered")
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    agent = shop_agent("broken", *TURNS)
    for nth in itertools.count(1):
        effects.path.unlink(missing_ok=True)
        fault = BrokenStatement(nth, when)
        with statement_wrapper(fault):
            attempt(agent, f"{when}-{nth}")
        ends_well(f"{when}-{nth}", effects, exactly=False)
        if fault.left > 0:  # the whole run has fewer statements
            assert nth > 20
            return


@pytest.mark.parametrize("went_through", [True, False])
def test_at_each_commit(went_through: bool, effects: Effects) -> None:
    """No commit that is in doubt costs a result or an effect: the journal is read, nothing is assumed."""
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    agent = shop_agent("broken", *TURNS)
    for nth in itertools.count(1):
        effects.path.unlink(missing_ok=True)
        session = f"commit-{went_through}-{nth}"
        with broken_commit(nth, went_through) as left:
            attempt(agent, session)
        ends_well(session, effects, exactly=True)
        if left[0] > 0:
            assert nth > 10
            return


def test_a_decision_whose_acknowledgement_was_lost_is_not_called_somebody_elses(effects: Effects) -> None:
    agent = shop_agent("asked", {"tools": [call("refund", cents=5000)]})
    card = run_agent(agent, "do it", "s1", idempotency_key="k").pending[0]
    with broken_commit(1, went_through=True):
        assert approve(card.pk, None, digest=card.digest).status == "approved"
    assert Message.objects.filter(kind="approval_decided").count() == 1
    ends_well("s1", effects, exactly=False)
    assert effects.count() == 1
