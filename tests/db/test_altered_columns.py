"""Columns that somebody altered by SQL, triggers in place: they are found and mended, and give no right."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
from django.db import connection
from django.db.models import Model
from django.utils import timezone

from agentruns import (
    Policy,
    ToolContext,
    approve,
    deny,
    exceptions as errors,
    fork_run,
    run_agent,
    send_message,
    start_run,
    tool,
)
from agentruns.journal.verify import check, problems
from agentruns.models import Approval, Definition, Run, Session
from agentruns.services import api_tokens
from agentruns.services.approvals.decisions import extend
from agentruns.services.data.repair import repair_session
from agentruns.services.runs.control import adopt_definition, cancel_run
from agentruns.services.runs.forks import run_again
from agentruns.services.runs.lifecycle import get_run
from agentruns.services.sweep import sweep
from tests.admin.pages import url
from tests.admin.people import browser, user as person
from tests.api.http import Api, make_user
from tests.commands.running import run as command
from tests.db.helpers import payloads, user
from tests.effects import Effects
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

# Every other column of the three is compared. Ids name the row, times are for display, the secret of a
# session is random, the end of its chain is compared first, most other columns of a run are about its worker,
# and `same_call` is keyed by SECRET_KEY, which may be rotated.
NOT_DETERMINED: dict[type[Model], set[str]] = {
    Session: {"id", "secret", "next_seq", "head", "created_at", "imported_at"},
    Run: {
        *("id", "session_id", "created_at", "updated_at", "blocked_reason", "blocked_at"),
        *("lease_owner", "lease_epoch", "lease_expires_at", "not_before", "attempts"),
    },
    Approval: {"id", "run_id", "call_id", "same_call"},
}
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
    cyd, more = user("cyd", "fork_run", "view_run"), {"idempotency_key": "k", "context": {"tenant": 7}}
    fork = fork_run(first.run_id, last, text="Go on!", actor=cyd, **more)
    sweep()
    approve(Approval.objects.pending().get(run=fork).pk, user("bob", "decide_approval"), reason="looks right")
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


def other_value(field: Any) -> Any:
    kind = field.target_field.get_internal_type() if field.is_relation else field.get_internal_type()
    if kind == "DateTimeField":
        return timezone.now() + timedelta(days=300)
    number = kind.endswith(("IntegerField", "DecimalField", "AutoField"))
    return VALUES.get(field.attname, 77 if number else "altered")


def everything() -> list[Any]:
    return [list(model._default_manager.order_by("pk").values()) for model in (Session, Run, Approval)]


def test_each_column_that_the_rows_determine_is_compared_and_mended(forked: Run, ann: Any) -> None:
    session = Session.objects.get(pk=forked.session_id)
    assert problems(session.pk) == []
    before = everything()
    Definition.objects.create(hash=VALUES["definition_id"], body={})
    for row in (session, forked, Approval.objects.filter(run=forked).first()):
        model: Any = type(row)
        fields = {field.attname: field for field in model._meta.concrete_fields}
        assert NOT_DETERMINED[model] < {*fields}
        for name in sorted({*fields} - NOT_DETERMINED[model]):
            alter(row, **{name: other_value(fields[name])})
            (found,) = check(session.pk)
            assert (found.column, found.model) == (name, model)
            assert (found.run is None, found.approval is None) == (model is Session, model is not Approval)
            if name != "arguments":
                assert f"{name} is " in str(found) and ", the journal says " in str(found)
            told = command("verify_journal", "--repair")
            assert (told.code, f"{name} rewritten" in told.out) == (0, True)
            assert (problems(session.pk), everything()) == ([], before), name
    # A user with another name or none is no problem.
    ann.username = "ann-the-second"
    ann.save()
    run_agent(shop_agent("shop"), "Once more.", "s1", actor=ann)
    sessions = [*Session.objects.values_list("pk", flat=True)]
    for change in (lambda: None, ann.delete):
        change()
        assert [problems(pk) for pk in sessions] == [[], []]


def test_rows_that_name_another_session_or_run_are_named_and_left(asked: Approval, forked: Run) -> None:
    chat, fork = Session.objects.get(key="chat"), Session.objects.get(pk=forked.session_id)
    alter(chat, key="between")
    alter(fork, key="chat")
    (left,) = repair_session("default", chat.pk).left
    assert (left.column, left.folded) == ("key", "chat")
    for session in (fork, chat):
        assert [one.column for one in repair_session("default", session.pk).changed] == ["key"]
    assert problems(chat.pk) == problems(fork.pk) == []

    there, moved = (key.hex if connection.vendor == "sqlite" else key for key in (forked.pk, fork.pk))
    alter(asked, run_id=there)
    assert "is missing" in " ".join(problems(chat.pk))
    with pytest.raises(errors.ApprovalStateError, match="nothing to decide"):
        approve(asked.pk, None)
    alter(Run.objects.get(pk=forked.pk), status="failed")
    alter(asked.run, session_id=moved)
    with pytest.raises(errors.JournalUnreadableError, match="has no row in its session"):
        cancel_run(asked.run_id)


# Who decides


def test_an_altered_owner_confirms_nothing_at_any_door(asked: Approval, ann: Any, effects: Effects) -> None:
    mallory = user("mallory")
    alter(asked.run, owner_id=mallory.pk, requesters=f" {mallory.pk} ")
    for decide in (approve, lambda pk, who: deny(pk, who, "no")):
        with pytest.raises(errors.PermissionDeniedError, match="confirmed by the requester, not by mallory"):
            decide(asked.pk, mallory)
    body, hers = {"digest": asked.digest, "reason": "no"}, Api(mallory)
    status, problem = hers.post(f"/approvals/{asked.pk}/approve", body)
    assert (status, problem["type"]) == (403, "urn:agentruns:permission-denied")
    assert hers.post(f"/runs/{asked.run_id}/cancel", {"reason": "mine"})[0] == 403
    columns = [one.column for one in check(asked.run.session_id)]
    assert columns == ["requesters", "owner_id"]

    staff = make_user("staff-with-a-token", "decide_approval", "view_run")
    alter(asked.run, owner_id=staff.pk)
    bearer = "Bearer " + api_tokens.create_token(staff, ["approvals:own"])[1]
    status, problem = Api().post(f"/approvals/{asked.pk}/deny", body, Authorization=bearer)
    assert (status, problem["scopes"]) == (403, ["approvals:decide"])

    alter(asked.run, owner_id=person("decider").pk)
    answer = browser("decider").post(url(asked, "approve"), {"digest": asked.digest, "reason": ""})
    assert (answer.status_code, "not by decider" in answer.content.decode()) == (403, True)
    sweep()
    assert (effects.count(), Approval.objects.get().status) == (0, "pending")
    approve(asked.pk, ann)
    repair_session("default", asked.run.session_id)
    sweep()
    assert effects.count() == 1


def refunding(ann: Any, *cents: int, session: str = "s1") -> list[Approval]:
    agent = shop_agent("shop", {"tools": [call("refund", cents=each) for each in cents or [5000]]})
    return run_agent(agent, "go", session, actor=ann, context={"tenant": 7}).pending


class Interrupted(Policy):
    """Lets everybody decide; while it is asked, something else happens."""

    happens: Callable[[], Any]

    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        type(self).happens()
        return True


def test_who_asked_may_not_decide_whatever_the_column_says(settings: Any, ann: Any) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    boss = user("boss", "decide_approval", "fork_run", "view_run", "start_run")
    (card,) = refunding(boss)
    alter(card.run, owner_id=None, requesters="")
    with pytest.raises(errors.PermissionDeniedError, match="requested this run"):
        approve(card.pk, boss)
    deny(card.pk, None, "no")
    sweep()
    again = run_again(card.run_id, user("colleague", "fork_run", "view_run"))
    assert again.owner_id == boss.pk
    cancel_run(again.pk)
    alter(card.run, requesters="", owner_id=None)
    fork = fork_run(card.run_id, 2, actor=user("third", "fork_run", "view_run"))
    for run in (again, fork):
        assert str(boss.pk) in payloads(run, "run_started")[-1]["requesters"]
    # Nor who asks between the rules and the decision.
    (card,) = refunding(ann, session="hers")
    Interrupted.happens = lambda: send_message(card.run.session, "One more.", owner=ann, actor=boss)
    settings.AGENTRUNS_POLICY = f"{__name__}.Interrupted"
    with pytest.raises(errors.PermissionDeniedError, match="requested this run"):
        approve(card.pk, boss)
    card.refresh_from_db()
    assert card.status == "pending"


CARD = {"title": "Refund 1 cent", "arguments": '{"cents":1}', "risk": "low", "approvers": "requester"}
CARD |= {"required": 2, "approved_count": 1, "tool_name": "lookup"}
CARD |= {"expires_at": timezone.now() + timedelta(days=300)}


def test_nothing_is_decided_on_a_card_that_is_not_the_journals(ann: Any, effects: Effects) -> None:
    (card,) = refunding(ann)
    decisions = (
        lambda: approve(card.pk, None),
        lambda: deny(card.pk, None, "no"),
        lambda: extend(card.pk, None, timedelta(hours=1)),
    )
    for column, value in CARD.items():
        alter(card, **{column: value})
        for decide in decisions:
            with pytest.raises(errors.ApprovalStateError, match=rf"\({column} were altered\)"):
                decide()
        repair_session("default", card.run.session_id)
    approve(card.pk, None)
    sweep()
    assert effects.count() == 1


class Tenants(Policy):
    """Lets people decide for their own tenant, and tells whose a run is by its context."""

    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        return user.username == f"tenant-{approval.run.context.get('tenant')}"


def test_a_rule_reads_the_context_of_the_journal_at_the_decision_and_before_the_call(
    settings: Any, ann: Any, effects: Effects
) -> None:
    first, second = refunding(ann, 5000, 6000)
    settings.AGENTRUNS_POLICY = f"{__name__}.Tenants"
    seven, eight = (user(f"tenant-{number}", "decide_approval") for number in (7, 8))
    alter(first.run, context='{"tenant":8}')
    with pytest.raises(errors.PermissionDeniedError, match="policy does not let tenant-8"):
        approve(first.pk, eight)
    approve(first.pk, seven)
    sweep()
    assert effects.count() == 1
    approve(second.pk, seven)
    eight.delete()
    type(seven).objects.filter(pk=seven.pk).update(username="tenant-8")
    alter(first.run, context='{"tenant":8}')
    sweep()
    second.refresh_from_db()
    assert (effects.count(), second.status) == (1, "pending")


# Whose a session is, and what a run goes on with


def test_a_session_takes_nothing_for_whom_its_columns_only_name(asked: Approval, ann: Any) -> None:
    agent, text, mallory = shop_agent("shop"), "What is my secret?", user("mallory")
    run = get_run(run_agent(agent, "My secret is 4711.", "hers", actor=ann).run_id)
    for column, value, key, scope, whose in (
        ("owner_id", mallory.pk, "hers", "", mallory),
        ("scope", "theirs", "hers", "theirs", ann),
        ("key", "theirs", "theirs", "", ann),
    ):
        alter(run.session, **{column: value})
        for write, who in product((start_run, run_agent), ("actor", "owner")):
            with pytest.raises(errors.SessionAccessDeniedError):
                write(agent, text, key, scope=scope, **{who: whose})
        with pytest.raises((errors.SessionAccessDeniedError, errors.PermissionDeniedError)):
            send_message(key, text, actor=whose, scope=scope)
        assert Run.objects.count() == 2
        repair_session("default", run.session_id)
    assert run_agent(agent, "Again.", "hers", actor=ann).status == "completed"
    # An open run takes no message of another, and a user's session no visitor.
    for row in (asked.run.session, asked.run):
        alter(row, owner_id=mallory.pk)
    with pytest.raises((errors.SessionAccessDeniedError, errors.PermissionDeniedError)):
        send_message("chat", "Close it.", actor=mallory)
    with pytest.raises(errors.SessionAccessDeniedError, match="verify_journal --repair"):
        send_message("chat", "Close it.", owner=mallory)
    assert asked.run.messages.filter(kind="user").count() == 1
    for row in (asked.run.session, asked.run):
        alter(row, owner_id=None)
    with pytest.raises(errors.SessionAccessDeniedError, match="belongs to a user"):
        api_tokens.session_token("chat", timedelta(minutes=5))


def test_a_run_goes_on_with_the_task_the_context_and_the_agent_of_the_journal(ann: Any) -> None:
    agent = shop_agent("shop")
    run = get_run(run_agent(agent, "Greet.", "s1", owner=ann, context={"tenant": 7}).run_id)
    alter(run, input="Delete everything.", context='{"tenant":8}')
    again = run_again(run.pk)
    assert (again.input, again.context) == ("Greet.", {"tenant": 7})
    sweep()
    alter(again, context='{"tenant":8}')
    again = send_message("s1", "And again.", owner=ann)
    assert again.context == {"tenant": 7}
    shop_agent("other")
    alter(again, agent="other")
    with pytest.raises(errors.RunStateError, match="has this definition of 'shop' already"):
        adopt_definition(again.pk)
