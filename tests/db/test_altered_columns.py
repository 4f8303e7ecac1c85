"""Columns that somebody altered by SQL, triggers in place: they are found and mended, and give no right."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import Model
from django.utils import timezone

from agentruns import ToolContext, approve, deny, fork_run, run_agent, tool
from agentruns.journal.verify import check, problems
from agentruns.models import Approval, Definition, Run, Session
from agentruns.services.repair import repair_session
from agentruns.services.sweep import sweep
from tests.commands.running import run as command
from tests.db.helpers import user
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

# Every other column of the three is compared. The reasons why the rows do not determine these:
CLOCK = "a clock's word from before or after the row was written, for order and display"
WORKER = "about the worker that drives it, and no part of the history"
CHAIN = "compared as the end of the chain, before anything is folded"
NAMES_THE_ROW = "names the row: one of another id, run or session is one too many, and one is missing"
NOT_DETERMINED: dict[type[Model], dict[str, str]] = {
    Session: {
        "id": NAMES_THE_ROW,
        "secret": "random, and destroyed by an erasure",
        "next_seq": CHAIN,
        "head": CHAIN,
        "created_at": CLOCK,
        "imported_at": "said by the import, which adds no row to a finished record",
    },
    Run: {
        "id": NAMES_THE_ROW,
        "session_id": NAMES_THE_ROW,
        "lease_owner": WORKER,
        "lease_epoch": WORKER,
        "lease_expires_at": WORKER,
        "not_before": WORKER,
        "attempts": WORKER,
        "blocked_reason": WORKER,
        "blocked_at": WORKER,
        "created_at": CLOCK,
        "updated_at": CLOCK,
    },
    Approval: {
        "id": NAMES_THE_ROW,
        "run_id": NAMES_THE_ROW,
        "call_id": NAMES_THE_ROW,
        "same_call": "keyed by SECRET_KEY, which may be rotated",
    },
}
COMPARED = [
    (model, field.attname)
    for model, left_out in NOT_DETERMINED.items()
    for field in model._meta.concrete_fields
    if field.attname not in left_out
]
# Where a value must fit more than its type.
VALUES = {"status": "failed", "risk": "low", "arguments": '{"cents":1}', "usage": '{"x":1}'}
VALUES |= {"context": '{"tenant":8}', "pending_calls": '["x"]', "definition_id": "f" * 64}
VALUES |= {"origin_id": "0" * 32}


@tool(requires_approval=True, approvers="requester")
def close_account(ctx: ToolContext, number: str) -> str:
    """Close the account of whoever asks."""
    return act("close_account", ctx, number=number)


@pytest.fixture
def ann() -> Any:
    return user("ann")


@pytest.fixture
def mallory() -> Any:
    return user("mallory")


@pytest.fixture
def asked(ann: Any) -> Approval:
    """A call that only Ann confirms."""
    agent = shop_agent("closer", {"tools": [call("close_account", number="A1")]}, tools=[close_account])
    return run_agent(agent, "Close my account.", "chat", actor=ann).pending[0]


@pytest.fixture
def forked(ann: Any) -> Run:
    """A fork, in its own session, with a call that Bob allowed; no column of it is empty."""
    refund = {"tools": [call("refund", cents=5000)]}
    first = run_agent(shop_agent("shop", refund), "go", "s1", actor=ann)
    deny(first.pending[0].pk, None, "no")
    sweep()
    last = Session.objects.get(key="s1").next_seq - 1
    shop_agent("shop", refund, refund, refund)
    fork = fork_run(
        first.run_id, last, text="Go on!", idempotency_key="k", context={"tenant": 7},
        actor=user("cyd", "fork_run", "view_run"),
    )  # fmt: skip
    sweep()
    (card,) = Approval.objects.pending().filter(run=fork)
    approve(card.pk, user("bob", "decide_approval"), reason="looks right")
    sweep()
    assert Run.objects.get(pk=fork.pk).status == "completed"
    return fork


def alter(row: Any, **columns: Any) -> None:
    """Change columns as somebody does who can write to these tables, and to nothing else."""
    fields = [row._meta.get_field(name) for name in columns]
    sets = ", ".join(f"{connection.ops.quote_name(field.column)} = %s" for field in fields)
    table, pk = connection.ops.quote_name(row._meta.db_table), row._meta.pk
    with connection.cursor() as cursor:
        values = [*columns.values(), pk.get_db_prep_value(row.pk, connection)]
        cursor.execute(f"UPDATE {table} SET {sets} WHERE {pk.column} = %s", values)
        assert cursor.rowcount == 1


def other_value(model: type[Model], name: str) -> Any:
    field: Any = model._meta.get_field(name)
    kind = field.target_field.get_internal_type() if field.is_relation else field.get_internal_type()
    numbers = ("IntegerField", "PositiveIntegerField", "BigIntegerField", "DecimalField", "AutoField")
    if name in VALUES:
        return VALUES[name]
    if kind == "DateTimeField":
        return timezone.now() + timedelta(days=300)
    return 77 if kind in (*numbers, "BigAutoField") else "altered"


def everything() -> list[Any]:
    return [list(model._default_manager.order_by("pk").values()) for model in (Session, Run, Approval)]


@pytest.mark.parametrize(("model", "name"), COMPARED)
def test_each_column_that_the_rows_determine_is_compared_and_mended(
    forked: Run, model: Any, name: str
) -> None:
    session = Session.objects.get(pk=forked.session_id)
    assert problems(session.pk) == []
    before = everything()
    row = {Session: session, Run: forked, Approval: Approval.objects.filter(run=forked).first()}[model]
    if name == "definition_id":
        Definition.objects.create(hash=VALUES[name], body={})
    old, value = getattr(model._default_manager.get(pk=row.pk), name), other_value(model, name)
    alter(row, **{name: value})

    (found,) = check(session.pk)
    assert (found.column, found.model) == (name, model)
    assert (found.run is not None, found.approval is not None) == (model is not Session, model is Approval)
    if name != "arguments":
        assert f"{name} is " in str(found) and ", the journal says " in str(found)
    told = command("verify_journal", "--repair")
    assert (told.code, f"{name} rewritten" in told.out) == (0, True)
    assert getattr(model._default_manager.get(pk=row.pk), name) == old
    assert (problems(session.pk), everything()) == ([], before)


def test_the_columns_that_are_not_compared_are_there_and_each_has_a_reason() -> None:
    for model, left_out in NOT_DETERMINED.items():
        assert {*left_out} <= {field.attname for field in model._meta.concrete_fields}
        assert all(left_out.values())


def test_a_user_with_another_name_or_none_is_no_problem(forked: Run, ann: Any) -> None:
    ann.username = "ann-the-second"
    ann.save()
    run_agent(shop_agent("shop"), "Once more.", "s1", actor=ann)
    sessions = [*Session.objects.values_list("pk", flat=True)]
    assert [problems(pk) for pk in sessions] == [[], []]
    ann.delete()
    assert [problems(pk) for pk in sessions] == [[], []]


def test_keys_of_two_sessions_that_were_swapped_are_named_and_left(asked: Approval, forked: Run) -> None:
    chat, fork = Session.objects.get(key="chat"), Session.objects.get(pk=forked.session_id)
    alter(chat, key="between")
    alter(fork, key="chat")
    (left,) = repair_session("default", chat.pk).left
    assert (left.column, left.folded) == ("key", "chat")
    assert [one.column for one in repair_session("default", fork.pk).changed] == ["key"]
    assert [one.column for one in repair_session("default", chat.pk).changed] == ["key"]
    assert problems(chat.pk) == problems(fork.pk) == []
