"""The tables of standing rules: they change in the transaction of the journal's rows that say why."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.utils.translation import gettext as _

from agentruns.exceptions import JournalConflictError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.fold import Call
from agentruns.journal.rules import Match
from agentruns.models import ApprovalRule, RuleChange, RuleDecision
from agentruns.models.statuses import ApprovalStatus, Orphan, Outcome
from agentruns.utils.db import in_transaction

DOUBTFUL = (Orphan.HELD, Orphan.SURFACED)


@dataclass(slots=True)
class Ruling:
    """A rule's decision about a card of a batch; `refused` explains why the database did not let it."""

    match: Match
    call_id: str
    approval_id: str
    effect: str
    run_id: UUID | None = None  # of the card, if that is in a child run
    refused: str = ""


def concerns(batch: Batch) -> bool:
    """Check whether a batch changes tables of standing rules, without a query."""
    return bool(batch.rulings or _calls(batch))


def project(alias: str, batch: Batch) -> None:
    """Record the rulings of a batch; give back what counts for calls that never start; stop rules in doubt.

    Raises JournalConflictError if an active rule may not decide as the batch says. Its ruling then says why,
    and the writer builds another batch without it.
    """
    run, is_refused = batch.state.run, False
    for ruling in sorted(batch.rulings, key=lambda each: str(each.match.rule.pk)):  # one order of locks
        rule, amounts = ruling.match
        about: dict[str, Any] = {"call_id": ruling.call_id, "approval_id": ruling.approval_id}
        about["run_id"] = ruling.run_id or run.run_id
        why = RuleDecision.record(alias, rule, ruling.effect, amounts, **about)
        if why and rule.status == ApprovalRule.Status.ACTIVE:
            ruling.refused, is_refused = why, True
    if is_refused:
        raise JournalConflictError(f"Run {run.run_id}: a standing rule does not decide as it was read.")
    calls = _calls(batch)
    if unused := [call.id for call, rule_id in calls if _is_unused(call)]:
        RuleDecision.release(alias, run.run_id, unused)
    why = _("A call that the rule approved is in doubt: run %(run)s.") % {"run": run.run_id}
    for rule_id in sorted({rule_id for call, rule_id in calls if _is_doubted(call)}):
        stop(alias, rule_id, why)


def stop(alias: str, rule_id: UUID | str, why: str) -> None:
    """Stop the active version of a rule; `rule_id` may be an earlier version. Needs an open transaction."""
    rules, status = ApprovalRule.objects.using(alias), ApprovalRule.Status
    rule = rules.get(pk=rule_id)
    versions = rules.filter(scope=rule.scope, name=rule.name, status=status.ACTIVE)
    # Look again after each attempt: another version may have been activated while this one was locked.
    while active := versions.first():
        move(alias, active.pk, [status.ACTIVE], status.STOPPED, why)


def outdated(alias: str, rule: ApprovalRule) -> None:
    """Put a live rule back to a draft, because it was written for other parameters of its tool."""
    why = _("The parameters of %(tool)s have changed since the rule was written.") % {"tool": rule.tool}
    live, draft = ApprovalRule.LIVE, ApprovalRule.Status.DRAFT
    in_transaction(alias, lambda: move(alias, rule.pk, live, draft, why))


def move(
    alias: str,
    rule_id: UUID | str,
    before: Collection[str],
    status: str,
    why: str,
    actor: Any = None,
    **columns: Any,
) -> bool:
    """Change a rule's status if it is one of `before`, and log the change; return whether it was.

    Needs an open transaction.
    """
    rules = ApprovalRule.objects.using(alias).filter(pk=rule_id, status__in=before)
    if rules.update(status=status, why=why, **columns) != 1:
        return False
    who = events.actor_ref(actor) or events.PROGRAM
    change = RuleChange(rule_id=rule_id, status=status, why=why, actor_id=who["id"], actor_name=who["name"])
    RuleChange.objects.using(alias).bulk_create([change])
    return True


def _calls(batch: Batch) -> list[tuple[Call, str]]:
    """List the calls with rows in a batch about which a rule decided last, each with the rule's id."""
    changed = batch.changed_approvals()
    return [(call, approval.rule) for call, approval, _before in changed if approval.rule]


def _is_unused(call: Call) -> bool:
    """Check whether a call can never start by the rule's decision: it has a result, or people are asked.

    People are also asked after a start that was rolled back.
    """
    is_asked = call.approval is not None and call.approval.status == ApprovalStatus.PENDING
    return not call.may_be_lost and (is_asked or not (call.attempt or call.is_open))


def _is_doubted(call: Call) -> bool:
    return call.orphan in DOUBTFUL or call.in_doubt or call.outcome == Outcome.UNKNOWN
