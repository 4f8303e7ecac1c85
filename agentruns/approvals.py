"""Decisions of people on gated calls. Deciding records and rings; executing is the engine's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db.models import Q
from django.db.models.functions import Now

from agentruns import people, transitions
from agentruns.agents import get_agent
from agentruns.conf import settings
from agentruns.crashpoints import reached
from agentruns.exceptions import ApprovalStateError, DurableRunNotFoundError, PermissionDeniedError
from agentruns.gate import call_digest
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.calls import Call, Card
from agentruns.masking import carries_mask
from agentruns.models import Approval, Run
from agentruns.retries import reading
from agentruns.tools import InvalidArguments, to_jsonable
from agentruns.tools.card import MASK

LONGEST_EXTENSION = timedelta(days=366)
IN_TIME = Q(expires_at__isnull=True) | Q(expires_at__gt=Now())


def approve(
    approval_id: UUID | str,
    actor: Any,
    *,
    digest: str | None = None,
    arguments: dict[str, Any] | None = None,
    reason: str = "",
    channel: str = "service",
) -> Approval:
    """Approve a gated call, with other `arguments` if given; they become what is shown, hashed and run.

    `channel` is what the journal keeps of where it was decided, as for the other decisions.
    Raises ApprovalStateError when it is no longer pending, when `digest` is not the pending one, or when
    the arguments do not validate; PermissionDeniedError when the actor may not decide.
    """

    def add(run: Run, batch: Batch, call: Call, card: Card) -> None:
        if card.only_answers:
            raise ApprovalStateError(
                f"Approval {approval_id} is a question of {call.tool}: there is nothing to execute. "
                "Answer it, or deny it with a reason."
            )
        payload: dict[str, Any] = {"verb": "approve", "digest": card.digest}
        who = events.actor_ref(actor) or events.PROGRAM
        if arguments is not None:
            payload |= _edit(run, call, arguments)
        elif who["id"] in card.given:  # who changes their mind may still deny, answer or edit
            raise ApprovalStateError(
                f"{who['name']} approved {approval_id} already; it takes {card.required} people."
            )
        _record(batch, call, actor, reason, channel, payload)

    return _decide(approval_id, actor, digest, add)


def deny(
    approval_id: UUID | str,
    actor: Any,
    reason: str,
    *,
    digest: str | None = None,
    channel: str = "service",
) -> Approval:
    """Deny a gated call; the model is told that it was not executed, and why. Errors as `approve`."""
    if not reason.strip():
        raise ApprovalStateError(
            "A denial needs a reason: the model is told it, so that it does not repeat the call."
        )

    def add(run: Run, batch: Batch, call: Call, card: Card) -> None:
        _record(batch, call, actor, reason, channel, {"verb": "deny", "digest": card.digest})

    return _decide(approval_id, actor, digest, add)


def answer(
    approval_id: UUID | str,
    actor: Any,
    text: str,
    *,
    digest: str | None = None,
    channel: str = "service",
) -> Approval:
    """Give the model an answer in place of executing the call. Errors as `approve`."""
    if not text.strip():
        raise ApprovalStateError("An answer needs a text: the model gets it as the result of its call.")

    def add(run: Run, batch: Batch, call: Call, card: Card) -> None:
        payload = {"verb": "answer", "digest": card.digest, "text": text}
        _record(batch, call, actor, "", channel, payload)

    return _decide(approval_id, actor, digest, add)


def extend(
    approval_id: UUID | str,
    actor: Any,
    by: timedelta,
    *,
    digest: str | None = None,
    reason: str = "",
    channel: str = "service",
) -> Approval:
    """Give people more time: a pending approval expires `by` later than it would have.

    Who may decide may extend. Raises ApprovalStateError when it never expires; else as `approve`.
    """
    if not timedelta() < by <= LONGEST_EXTENSION:
        raise ApprovalStateError("An approval is extended by more than nothing and at most by 366 days.")

    def add(run: Run, batch: Batch, call: Call, card: Card) -> None:
        if card.expires_at is None:
            raise ApprovalStateError(f"Approval {approval_id} never expires; there is nothing to extend.")
        later = {
            "from": events.timestamp(card.expires_at),
            "expires_at": events.timestamp(card.expires_at + by),
        }
        who = {"actor": events.actor_ref(actor), "reason": reason, "channel": channel}
        batch.add(events.APPROVAL_EXTENDED, {**later, **who}, call=call)

    return _decide(approval_id, actor, digest, add)


def expire_due() -> int:
    """End every pending approval whose time is over, by the database clock; return how many."""
    alias, ended = settings.DATABASE, 0
    due = Approval.objects.using(alias).expired().filter(run__status__in=Run.UNFINISHED)
    for approval in list(due):

        def change(run: Run, batch: Batch, approval: Approval = approval) -> None:
            call = batch.state.run.calls.get(approval.call_id)
            if call is None or call.card is None or call.card.status != "pending":
                return
            if run.is_ended or batch.state.run.cancel_requested:
                return
            payload = {"verb": "expire", "digest": call.card.digest, "actor": None, "channel": "expiry"}
            batch.add(events.APPROVAL_DECIDED, payload, call=call)

        transitions.write(approval.run_id, change, guard=Q(expires_at__lte=Now()))
        ended += 1
    return ended


def find_approval(approval_id: UUID | str) -> Approval:
    """Return an approval with its run, or raise DurableRunNotFoundError."""
    approvals = Approval.objects.using(settings.DATABASE).select_related("run")
    try:
        return approvals.get(pk=UUID(str(approval_id)))
    except (Approval.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(f"There is no approval {approval_id}.") from None


def _decide(approval_id: UUID | str, actor: Any, digest: str | None, add: Any) -> Approval:
    approval = find_approval(approval_id)
    why_not = people.why_not_decide(actor, approval)
    if why_not:
        raise PermissionDeniedError(why_not)

    def change(run: Run, batch: Batch) -> None:
        call, card = _pending_card(find_approval(approval_id), run, batch)
        if card.digest != digest and (digest is not None or call.edited):
            raise ApprovalStateError(
                f"Approval {approval_id} now shows digest {card.digest}, not {digest}: its arguments were "
                "edited. Look at it again and decide on what it says now."
            )
        add(run, batch, call, card)

    transitions.write(approval.run_id, change, guard=IN_TIME)
    reached("after_decision")
    return reading(settings.DATABASE, lambda: find_approval(approval_id))


def _pending_card(approval: Approval, run: Run, batch: Batch) -> tuple[Call, Card]:
    """Return the call and card to decide, or raise ApprovalStateError that says what became of it."""
    if approval.status != Approval.Status.PENDING:
        by = approval.decided_by_name or "nobody"
        when = f"{approval.decided_at:%Y-%m-%d %H:%M:%S} UTC" if approval.decided_at else "when its run ended"
        raise ApprovalStateError(
            f"Approval {approval.pk} is {approval.status} already: decided by {by}, {when}. "
            "Nothing was changed."
        )
    if run.is_ended or batch.state.run.cancel_requested:
        raise ApprovalStateError(f"Run {run.pk} is being cancelled or has ended; there is nothing to decide.")
    expired = Approval.objects.using(settings.DATABASE).expired().filter(pk=approval.pk)
    if expired.exists():
        raise ApprovalStateError(
            f"Approval {approval.pk} expired at {approval.expires_at}. Nothing was changed."
        )
    call = batch.state.run.calls.get(approval.call_id)
    if call is None or call.card is None:
        raise ApprovalStateError(f"Approval {approval.pk} is not about a call of the run's last reply.")
    return call, call.card


def _edit(run: Run, call: Call, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return what an edit changes about a card: everything a person sees is made from the new arguments."""
    tool = get_agent(run.agent, run.version).tools.get(call.tool)
    if tool is None:
        raise ApprovalStateError(
            f"Tool {call.tool} is not served here, so its arguments cannot be edited here."
        )
    try:
        edited = tool.effective(arguments)
    except InvalidArguments as error:
        raise ApprovalStateError(f"The edited arguments do not fit {call.tool}: {error}") from error
    for name in tool.sensitive:
        if edited.get(name) == MASK != call.arguments.get(name):
            raise ApprovalStateError(
                f"The edited {name} is only the mask of the real value. Give the value, or leave it as it is."
            )
    for name, value in edited.items():
        if carries_mask(value, name, call.arguments):
            raise ApprovalStateError(
                f"The edited {name} holds the mask that AGENTRUNS_REDACT puts in place of a real value. "
                "Give the value, or leave it as it is."
            )
    return {
        "arguments": edited,
        "digest": call_digest(call.tool, edited),
        "title": tool.title(edited),
        "preview": tool.preview_of(edited),
        "edited": to_jsonable(arguments)[0],
    }


def _record(batch: Batch, call: Call, actor: Any, reason: str, channel: str, payload: dict[str, Any]) -> None:
    decided = {**payload, "actor": events.actor_ref(actor), "reason": reason, "channel": channel}
    batch.add(events.APPROVAL_DECIDED, decided, call=call)
