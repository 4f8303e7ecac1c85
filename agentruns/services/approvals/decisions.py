"""Decisions of people on calls that need approval. They are only recorded here; the engine runs the calls."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DatabaseError, InterfaceError
from django.db.models import Q, QuerySet
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from agentruns.agents.agent import get_agent, registered
from agentruns.conf import settings
from agentruns.engine.driver import Driver
from agentruns.engine.gate import call_digest, misfit
from agentruns.engine.holds import Held, held
from agentruns.exceptions import ApprovalStateError, JournalLockedError, NotFoundError, PermissionDeniedError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.cards import CallApproval
from agentruns.journal.deciders import lapsed, void, why_own, withdrawn
from agentruns.journal.fold import Call
from agentruns.journal.masking import carries_mask, mask_of
from agentruns.journal.policy import visible_approvals
from agentruns.journal.read import read_rows
from agentruns.journal.store import DatabaseStore, card_columns
from agentruns.models import Approval, Message, Run, SessionBearer
from agentruns.models.approval import HELD
from agentruns.models.kinds import Kind, P
from agentruns.models.statuses import ApprovalStatus, Verb
from agentruns.services import permissions
from agentruns.services.runs.write import write
from agentruns.tools import InvalidArguments, to_jsonable
from agentruns.tools.builtin import choices_of, takes_text
from agentruns.tools.card import MASK, call_text, in_time, one_line
from agentruns.tools.options import REQUESTER
from agentruns.utils.db import readable, reading
from agentruns.utils.failpoints import reached
from agentruns.utils.redaction import Secrets, get_logger, redacted

logger = get_logger("agentruns.approvals")

SHOWN = 50  # characters of a malformed id
LONGEST_EXTENSION = timedelta(days=366)
DUE_AT_ONCE = 200  # in one sweep, so that a thousand expiries at once delay no run
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
    """Approve a call. If edited `arguments` are given, these are shown, hashed and run instead.

    If several people must approve, the last approval lets the call run. An edit voids earlier approvals.
    `digest` is the digest that the actor saw; `channel` tells the journal where the actor decided. Raises
    ApprovalStateError if the approval is not pending, has expired or is a question; if the actor approved it
    already; if the arguments are invalid or contain a mask; if `digest` is not the present digest, or is
    missing after an edit; or if the run has ended or is being cancelled. Raises NotFoundError,
    PermissionDeniedError.
    """
    approval = find_approval(approval_id)
    edit = _edited(actor, approval, arguments) if arguments is not None else None
    if edit is None:
        permissions.require_decide(actor, approval)
    # Before the transaction, as `lapsed` calls users' code; an edit voids other approvals in any case.
    givers = permissions.givers([approval]).get(approval.pk, {}) if edit is None else {}
    why = unfit(approval) if edit is None else ""
    lost = lapsed(approval, givers, approval.arguments, givers)

    def payload_of(run: Run, batch: Batch, call: Call, pending: CallApproval) -> events.ApprovalDecided:
        if pending.only_answers:
            text = _(
                "Approval %(id)s is a question of %(tool)s: there is nothing to execute. "
                "Answer it, or deny it with a reason."
            )
            raise ApprovalStateError(text % {"id": approval_id, "tool": call.tool})
        if why:
            raise ApprovalStateError(why)
        gone = lost | withdrawn(settings.DATABASE, pending)
        void(batch, call, gone)
        if edit is None and pending.editor in gone:  # the actor saw no word of it on the card
            text = _("%(why)s The arguments are that person's edit: edit them yourself, or deny the call.")
            raise ApprovalStateError(text % {"why": gone[pending.editor]})
        who = events.actor_ref(actor) or events.PROGRAM
        payload = _decided(Verb.APPROVE, pending, actor, channel, reason=reason)
        if edit is not None:
            shown = mask_of(run).arguments(call.tool, call.arguments)
            for name, value in edit["arguments"].items():  # the mask of a value is not the value
                given = call.arguments.get(name)
                if value in (MASK, shown.get(name)) and value != given != shown.get(name):
                    text = _(
                        "The edited %(name)s is only the mask of the real value. "
                        "Give the value, or leave it as it is."
                    )
                elif carries_mask(value, name, call.arguments):
                    text = _(
                        "The edited %(name)s holds the mask that AGENTRUNS_REDACT puts in place of a real "
                        "value. Give the value, or leave it as it is."
                    )
                else:
                    continue
                raise ApprovalStateError(text % {"name": name})
            payload |= {"arguments": edit["arguments"], "edited": edit["edited"]}
            payload |= {"title": edit["title"], "preview": edit["preview"]}
            payload["digest"] = call_digest(batch.state.secret, call.tool, edit["arguments"])
            if (held := edit["holds"]) is not None:
                payload["holds"], payload["held"] = held.value, held.digest
        elif {who["id"], who.get("by")} & {*pending.given, *pending.by.values()}:
            # An earlier giver may still deny, answer or edit.
            text = _("%(name)s approved %(id)s already; it takes %(required)d people.")
            facts = {"name": who["name"], "id": approval_id, "required": pending.required}
            raise ApprovalStateError(text % facts)
        count = 1 if edit is not None else len(pending.given) + 1  # an edit voids what others approved
        if pending.settles and count >= pending.required:
            payload["settles"] = pending.settles
        return payload

    return _decide(events.APPROVAL_DECIDED, actor, approval, digest, payload_of)


def deny(
    approval_id: UUID | str, actor: Any, reason: str, *, digest: str | None = None, channel: str = "service"
) -> Approval:
    """Deny a call that needs approval. The model gets the reason as the call's result.

    Raises ApprovalStateError without a reason, else as `approve`.
    """
    if not reason.strip():
        text = _("A denial needs a reason: it is passed to the model, so that it does not repeat the call.")
        raise ApprovalStateError(text)
    approval = permissions.require_decide(actor, find_approval(approval_id), verb=Verb.DENY)

    def payload_of(run: Run, batch: Batch, call: Call, pending: CallApproval) -> events.ApprovalDecided:
        return _decided(Verb.DENY, pending, actor, channel, reason=reason)

    return _decide(events.APPROVAL_DECIDED, actor, approval, digest, payload_of)


def answer(
    approval_id: UUID | str, actor: Any, text: str, *, digest: str | None = None, channel: str = "service"
) -> Approval:
    """Answer a call: `text` becomes its result, and the call is not executed.

    Raises ApprovalStateError for an empty text, and for a text that is none of the choices if a question
    accepts only its choices; PermissionDeniedError if a user answers a call that the requester confirms and
    that is no question; else as `approve`.
    """
    if not text.strip():
        raise ApprovalStateError(_("An answer needs a text: the model gets it as the result of its call."))
    approval = permissions.require_decide(actor, find_approval(approval_id), verb=Verb.ANSWER)

    def payload_of(run: Run, batch: Batch, call: Call, pending: CallApproval) -> events.ApprovalDecided:
        if approval.approvers == REQUESTER and actor is not None and not pending.only_answers:
            why = _("%(tool)s is confirmed as it is, or denied: %(name)s may not give its result.")
            raise PermissionDeniedError(why % {"tool": call.tool, "name": actor.get_username()})
        choices = choices_of(call.arguments)
        if pending.only_answers and not takes_text(call.arguments) and text not in choices:
            named = one_line(", ".join(map(repr, choices)))
            raise ApprovalStateError(_("The question takes only one of its choices: %s.") % named)
        return _decided(Verb.ANSWER, pending, actor, channel, text=text, reason="")

    return _decide(events.APPROVAL_DECIDED, actor, approval, digest, payload_of)


def extend(
    approval_id: UUID | str,
    actor: Any,
    by: timedelta,
    *,
    digest: str | None = None,
    seen: datetime | None = None,
    reason: str = "",
    channel: str = "service",
) -> Approval:
    """Extend a pending approval: it expires `by` later than before.

    A user who may decide may extend, except a call that the requester confirms. `seen` is the expiry that the
    actor saw. Raises ApprovalStateError if `by` is not positive or over LONGEST_EXTENSION, or if the approval
    never expires or expires at another time than `seen`; else as `approve`.
    """
    if not timedelta() < by <= LONGEST_EXTENSION:
        raise ApprovalStateError(_("The extension must be positive and at most 366 days."))
    approval = permissions.require_decide(actor, find_approval(approval_id), verb="extend")

    def payload_of(run: Run, batch: Batch, call: Call, pending: CallApproval) -> events.ApprovalExtended:
        if pending.expires_at is None:
            text = _("Approval %(id)s never expires; there is nothing to extend.")
            raise ApprovalStateError(text % {"id": approval_id})
        if seen is not None and seen != pending.expires_at:
            text = _("Approval %(id)s was given more time already: it expires at %(when)s.")
            raise ApprovalStateError(text % {"id": approval_id, "when": readable(pending.expires_at)})
        return {
            "from": events.timestamp(pending.expires_at),
            "expires_at": events.timestamp(pending.expires_at + by),
            "actor": events.actor_ref(actor),
            "reason": reason,
            "channel": channel,
        }

    return _decide(events.APPROVAL_EXTENDED, actor, approval, digest, payload_of)


def expire_due() -> int:
    """Expire up to DUE_AT_ONCE pending approvals that are due by the database's clock; return how many."""

    def expire(batch: Batch, call: Call, pending: CallApproval) -> None:
        batch.add(events.APPROVAL_DECIDED, _decided(Verb.EXPIRE, pending, None, "expiry"), call=call)

    due = Approval.objects.using(settings.DATABASE).expired().filter(run__status__in=Run.UNFINISHED)
    return _each_due(due, "expires_at", expire)


def remind_due() -> int:
    """Write up to DUE_AT_ONCE reminders and escalations that are due; return how many.

    A card whose reminder and escalation are both due is only escalated. The cards of a paused run, or of a
    run with a call in doubt, wait until the run goes on.
    """

    def remind(batch: Batch, call: Call, pending: CallApproval) -> None:
        if batch.state.run.status in HELD:
            return
        if pending.escalate_at is not None and pending.escalate_at <= batch.at:
            due = events.timestamp(pending.escalate_at)
            escalated = events.ApprovalEscalated(due=due, to=pending.escalate_to)
            batch.add(events.APPROVAL_ESCALATED, escalated, call=call)
        elif pending.remind_at is not None:
            reminded = events.ApprovalReminded(due=events.timestamp(pending.remind_at))
            batch.add(events.APPROVAL_REMINDED, reminded, call=call)

    return _each_due(Approval.objects.using(settings.DATABASE).due().filter(IN_TIME), "due_at", remind)


def _each_due(due: QuerySet[Approval], column: str, act: Callable[[Batch, Call, CallApproval], None]) -> int:
    """Let `act` add rows about each of the approvals whose time in `column` is over; return how many had one.

    Leaves out an approval that was decided, or got another time, since it was found. Goes on after an error
    that concerns one approval.
    """
    acted, locked = set[UUID](), set[UUID]()
    for approval in list(due.only("run_id", "call_id", column)):
        if approval.run_id in locked:  # each further approval of the run would wait for the lock again
            continue
        if len(acted) == DUE_AT_ONCE:  # those that fail are not counted, or they would fill every sweep
            break

        def change(run: Run, batch: Batch, approval: Approval = approval) -> None:
            acted.discard(approval.pk)  # if the previous try was rolled back
            call = batch.state.run.calls.get(approval.call_id)
            if call is None or call.approval is None or call.approval.status != ApprovalStatus.PENDING:
                return
            if getattr(call.approval, column) != getattr(approval, column):  # such as more time, meanwhile
                return
            if run.is_ended or batch.state.run.cancel_requested:
                return
            act(batch, call, call.approval)
            if batch.rows:
                acted.add(approval.pk)

        try:
            write(approval.run_id, change, guard=Q(**{f"{column}__lte": Now()}))
        except (DatabaseError, InterfaceError):
            raise
        except Exception as error:  # locked, or a journal that was altered: no other approval waits for it
            logger.warning("Due %s put off approval=%s", column, approval.pk, exc_info=True)
            acted.discard(approval.pk)
            if isinstance(error, JournalLockedError):
                locked.add(approval.run_id)
    return len(acted)


class SeenApproval(NamedTuple):
    """An approval as one person may see it: masked and redacted, and never to be saved.

    Its `run` has only the agent, the version and the status.
    """

    approval: Approval
    preview: Any  # made when the model asked, or by the last edit; None if there is none
    asked_by: str  # who owns the run; "" for the program
    may_decide: bool  # whether the person may approve it now


def get_approval(approval_id: UUID | str, user: Any) -> SeenApproval:
    """Find an approval as a user may see it, for a project's page; NotFoundError if the policy hides it."""
    approval = find_approval(approval_id, visible_approvals(user))
    waits = [approval] if approval.status == Approval.Status.PENDING else []
    may_decide, mask = any(permissions.decidable(user, waits)), mask_of(approval.run)
    rows = Message.objects.using(settings.DATABASE).filter(run_id=approval.run_id, call_id=approval.call_id)
    rows = rows.filter(kind__in=(events.APPROVAL_REQUESTED, events.APPROVAL_DECIDED)).order_by("seq")
    cards = [mask.row(row).payload for row in read_rows(rows)]
    run = approval.run
    shown = mask.approval(approval)
    for name in ("title", "why", "reason", "arguments", "holds", "decided_by_name"):
        setattr(shown, name, redacted(getattr(shown, name)))
    preview = [card["preview"] for card in cards if "preview" in card][-1:]
    by = "" if isinstance(user, SessionBearer) else redacted(run.owner_name)
    if not permissions.reads_all(user, approval):  # as in the API
        shown.reason, shown.decided_by, shown.decided_by_name = "", None, ""
        if shown.approvers != REQUESTER:
            shown.why, shown.approvers, shown.holds, preview = "", "", None, []
    # Neither the run's context nor its session's secret comes within reach of a template.
    shown._state.fields_cache["run"] = Run(pk=None, agent=run.agent, version=run.version, status=run.status)
    return SeenApproval(shown, redacted(preview[0]) if preview else None, by, may_decide)


def find_approval(approval_id: UUID | str, among: QuerySet[Approval] | None = None) -> Approval:
    """Find an approval, with its run, `among` those that a user may see (None: all); raises NotFoundError."""
    among = Approval.objects.using(settings.DATABASE) if among is None else among
    try:
        return among.select_related("run__session").get(pk=UUID(str(approval_id)))
    except (Approval.DoesNotExist, ValueError):
        raise NotFoundError(_("There is no approval %(id)s.") % {"id": str(approval_id)[:SHOWN]}) from None


def _decided(
    verb: Verb, pending: CallApproval, actor: Any, channel: str, **texts: str
) -> events.ApprovalDecided:
    about = {"verb": verb, "digest": pending.digest, "actor": events.actor_ref(actor), "channel": channel}
    return {**about, **texts}  # type: ignore[typeddict-item]


def _decide(
    kind: Kind[P],
    actor: Any,
    approval: Approval,
    digest: str | None,
    payload_of: Callable[[Run, Batch, Call, CallApproval], P],
) -> Approval:
    """Add the row of a decision to the journal, and return the approval as it is then.

    `payload_of` builds the payload in the transaction. Raises ApprovalStateError if nothing is to decide, or
    `digest` is not the present digest; PermissionDeniedError if the actor is a requester by now.
    """

    def change(run: Run, batch: Batch) -> None:
        call = batch.state.run.calls.get(approval.call_id)
        pending = call.approval if call is not None else None
        now = find_approval(approval.pk)
        is_closed = pending is None or {pending.status, approval.status} != {ApprovalStatus.PENDING}
        if is_closed and now.status != Approval.Status.PENDING:
            by = now.decided_by_name or _("nobody")
            by = by if permissions.reads_all(actor, now) else _("somebody")
            when = readable(now.decided_at) if now.decided_at else _("when its run ended")
            text = _(
                "Approval %(id)s is closed (%(status)s): decided by %(name)s, %(when)s. Nothing was changed."
            )
            facts = {"id": now.pk, "status": now.get_status_display(), "name": by, "when": when}
            raise ApprovalStateError(text % facts)
        if batch.state.run.ended or batch.state.run.cancel_requested:
            text = _("Run %(run)s is being cancelled or has ended; there is nothing to decide.")
            raise ApprovalStateError(text % {"run": run.pk})
        if call is None or pending is None or pending.id != approval.pk:
            text = _("Approval %(id)s is not about a call of the run's last reply.")
            raise ApprovalStateError(text % {"id": approval.pk})
        # People read the columns, and the policy judged them, so they must equal the rows. `why` decides
        # nothing. If the rows contradict each other, the engine runs nothing in any case.
        folded = card_columns(call, pending) if pending.digest == call.digest else {}
        folded.pop("why", None)
        if altered := [name for name, value in folded.items() if getattr(now, name) != value]:
            text = _(
                "Approval %(id)s is not what its journal says (%(columns)s were altered). Nothing was "
                "decided. Run manage.py verify_journal --repair, then look at it again."
            )
            raise ApprovalStateError(text % {"id": approval.pk, "columns": ", ".join(altered)})
        expired = Approval.objects.using(settings.DATABASE).expired().filter(pk=approval.pk)
        if pending.expires_at is not None and expired.exists():
            text = _("Approval %(id)s expired at %(when)s. Nothing was changed.")
            raise ApprovalStateError(text % {"id": approval.pk, "when": readable(pending.expires_at)})
        if actor is not None and pending.approvers != REQUESTER and (why := why_own(actor, run)):
            raise PermissionDeniedError(why)  # the actor has become a requester since the check before
        if pending.shown != digest and (digest is not None or call.edited or pending.is_held_anew):
            text = _("The arguments of approval %(id)s were edited since you looked. Look at it again.")
            if pending.is_held_anew:
                text = _("What approval %(id)s relies on has changed since you looked. Look at it again.")
            raise ApprovalStateError(text % {"id": approval.pk})
        batch.add(kind, payload_of(run, batch, call, pending), call=call)

    write(approval.run_id, change, guard=IN_TIME)
    reached("after_decision")
    return reading(settings.DATABASE, lambda: find_approval(approval.pk))


def unfit(approval: Approval) -> str:
    """Explain why a pending call does not fit the run's definition; "" if it fits or this code lacks that."""
    agent = next((each for each in registered() if each.definition_hash == approval.run.definition_id), None)
    name, arguments = approval.tool_name, approval.arguments
    if agent is None or approval.status != Approval.Status.PENDING:
        return ""
    if not (why := misfit(agent, name, arguments)):
        return ""
    hidden = agent.tools[name].sensitive if name in agent.tools else ()
    why = Secrets([*map(arguments.get, hidden)]).hide(why, short=True)
    text = _("%(tool)s cannot run this call as it is: %(why)s. Edit the arguments, or deny the call.")
    return text % {"tool": name, "why": why}


def _edited(actor: Any, approval: Approval, arguments: dict[str, Any]) -> dict[str, Any]:
    """Build the members of an edit's payload: the new arguments, and title, preview and holds made of them.

    `describe`, `preview` and `holds` are the project's own code, and are waited for only a short time. Raises
    PermissionDeniedError if the actor may not decide about the new arguments, ApprovalStateError if the tool
    is not registered here or refuses them.
    """
    agent = get_agent(approval.run.agent, approval.run.version)
    tool = agent.tools.get(approval.tool_name)
    if tool is None:
        permissions.require_decide(actor, approval, verb="edit")
        text = _("Tool %(tool)s is not served here, so its arguments cannot be edited here.")
        raise ApprovalStateError(text % {"tool": approval.tool_name})
    try:
        edited = tool.effective(arguments)
    except InvalidArguments as error:
        permissions.require_decide(actor, approval, verb="edit")  # the error names parameters of the tool
        why = Secrets([arguments.get(name) for name in tool.sensitive]).hide(str(error), short=True)
        text = _("The edited arguments do not fit %(tool)s: %(why)s")
        raise ApprovalStateError(text % {"tool": tool.name, "why": why}) from error
    permissions.require_decide(actor, approval, edited, verb="edit")
    texts: dict[str, Any] = {"title": call_text(tool.name, tool.masked(edited)), "preview": None}
    texts["holds"] = None if tool.holds is None else Held()

    def describe() -> None:
        texts["title"] = tool.title(edited)
        texts["preview"] = tool.preview_of(edited)
        if tool.holds is not None:
            store, run = DatabaseStore(settings.DATABASE), approval.run
            driver = Driver(agent, store, store.load(run.session_id, run.pk), session_key=run.session.key)
            texts["holds"] = held(driver, tool, approval.call_id, edited)

    in_time(describe)
    return {"arguments": edited, **texts, "edited": to_jsonable(arguments)[0]}
