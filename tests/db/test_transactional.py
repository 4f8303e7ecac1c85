"""A transactional tool commits its ORM writes and its result together, or neither."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection, transaction

from agentruns import RunResult, ToolContext, cancel_run, run_agent, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.models import Message
from tests.db.helpers import outcomes, payloads, the_run
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def make(number: str, **fields: object) -> Order:
    return Order.objects.create(number=number, customer="Ada", total_cents=100, **fields)


@tool(transactional=True)
def write_and(number: str, then: str, ctx: ToolContext) -> str:
    """Write an order, then meet a fate."""
    make(number)
    if then == "raise":
        raise ValueError("no")
    if then == "not know":
        raise ToolDurabilityError("who knows")
    if then == "swallow":
        try:
            with transaction.atomic(durable=False, savepoint=False):
                make(number)
        except IntegrityError:
            pass
    if then == "write elsewhere":
        Order.objects.using("other").create(number=number, customer="Eve", total_cents=1)
    if then == "read elsewhere":
        Order.objects.using("other").count()
    if then == "hook raises":
        transaction.on_commit(lambda: 1 / 0)
    if then == "be cancelled":
        cancel_run(ctx.run_id)
    return "written"


def do(then: str) -> RunResult:
    agent = shop_agent("writer", {"tools": [call("write_and", number="A1", then=then)]}, tools=[write_and])
    return run_agent(agent, "do it", "s1", idempotency_key="k")


@pytest.mark.parametrize("then", ["raise", "not know", "swallow", "write elsewhere"])
def test_what_fails_leaves_no_write_and_an_error_result(then: str, agents: None) -> None:
    run = the_run(do(then))
    assert (run.status, outcomes(run)) == ("completed", ["error"])
    assert (Order.objects.count(), Order.objects.using("other").count()) == (0, 0)
    told = payloads(run, "tool_result")[0]["content"]
    assert ("journal's database" in told) == (then == "write elsewhere")


@pytest.mark.parametrize("then", ["end well", "read elsewhere", "hook raises"])
def test_what_goes_well_is_written_once_with_its_result(then: str, agents: None) -> None:
    run = the_run(do(then))
    assert (run.status, outcomes(run), Order.objects.count()) == ("completed", ["ok"], 1)
    assert Message.objects.filter(kind="tool_started").count() == 1


def test_a_click_during_the_block_costs_neither_write_nor_result(agents: None) -> None:
    run = the_run(do("be cancelled"))
    assert (run.status, outcomes(run), Order.objects.count()) == ("cancelled", ["ok"], 1)


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite has one isolation level")
def test_the_block_reads_committed_whatever_the_project_set(agents: None) -> None:
    levels = []

    @tool(transactional=True)
    def look() -> str:
        """Look at the isolation level."""
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])
        return "seen"

    agent = shop_agent("looker", {"tools": [call("look")]}, tools=[look])
    run_agent(agent, "do it", "s1", idempotency_key="k")
    assert levels == ["read committed"]
