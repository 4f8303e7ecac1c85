"""Signals after a commit, and the outbox of notifications, which are tried at most MAX_ATTEMPTS times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import connections, transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.dispatch import Signal
from django.urls import NoReverseMatch, reverse
from django.utils.module_loading import import_string

from agentruns.conf import settings
from agentruns.exceptions import AgentRunsError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.connection import has_foreign_blocks
from agentruns.journal.events import Row
from agentruns.journal.masking import mask_of
from agentruns.models import Approval, Control, Message, Notification, Run
from agentruns.models.statuses import ApprovalStatus, Orphan
from agentruns.tools.card import one_line
from agentruns.utils import clock, json as canonical
from agentruns.utils.calls import arity_mistake
from agentruns.utils.db import in_transaction, later
from agentruns.utils.redaction import get_logger, redact

logger = get_logger("agentruns.notifications")

EVENTS: dict[str, tuple[str, Signal]] = {
    kind: kind.announced for kind in events.KINDS.values() if kind.announced
}
MAX_ATTEMPTS = 10
CLAIM_SECONDS = 60  # after which a delivery whose process died is tried again
FIRST_PAUSE, FACTOR = 10, 3  # seconds, growing: the tenth attempt is a day after the first
PER_SWEEP = 50
REST_SECONDS = 60  # after a failure this process leaves the notifier to the sweep for so long

ASKING = ("approval.requested", "approval.reminded", "approval.escalated")  # for a decision
BLOCKED = "run.blocked"  # an event that no row of the journal has
ONCE = 24 * 3600  # seconds in which one notice says that runs of a definition are blocked
AT_ONCE = 10  # seconds after which a process leaves its other deliveries to the sweep

SHARED = ("run_id", "event", "approval_id", "notifier", "created_at")  # columns of all rows of one event

ANCHOR = "agentruns.journal.anchor.AnchorNotifier"

DUE = Q(sent_at=None, attempts__lt=MAX_ATTEMPTS) & (Q(not_before=None) | Q(not_before__lte=Now()))

resting: dict[str, float] = {}  # failed notifier -> time until which this process leaves it to the sweep


class UndeliverableError(AgentRunsError):
    """Raised by a notifier if a notification can never be delivered, so that it is not retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An event, and the present `status` of its approval (for `approval.` events) or else of its run.

    The `id` is the same at every attempt, so that the receiver recognises a repetition.
    """

    id: UUID
    type: str
    timestamp: datetime
    run_id: UUID
    session: str
    agent: str
    status: str
    requester: str
    approval_id: UUID | None
    title: str
    tool: str
    risk: str
    expires_at: datetime | None
    url: str
    group: str = ""  # of an escalation: the group or permission whose people are told
    recipient: str = ""  # the key of the user whom the notifier named; "" if it named none

    @property
    def is_settled(self) -> bool:
        """Check whether the notice asks for a decision about a card that is no longer pending."""
        return self.type in ASKING and self.status != ApprovalStatus.PENDING

    def payload(self) -> dict[str, Any]:
        """Build the JSON body that a webhook carries, without the call's arguments."""

        def iso(moment: datetime) -> str:
            return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")

        data = {
            "run_id": str(self.run_id),
            "session": self.session,
            "agent": self.agent,
            "status": self.status,
            "approval_id": str(self.approval_id) if self.approval_id else None,
            "title": self.title or None,
            "tool": self.tool or None,
            "risk": self.risk or None,
            "expires_at": iso(self.expires_at) if self.expires_at else None,
            **({"url": self.url} if self.url else {}),
            **({"escalated_to": self.group} if self.group else {}),
        }
        return {"type": self.type, "timestamp": iso(self.timestamp), "data": data}


def is_announced(batch: Batch) -> bool:
    """Check whether a notifier or a signal receiver may want a batch's events, without a query."""
    wanted = [] if batch.quiet else [EVENTS[row.kind][1] for row in batch.rows if row.kind in EVENTS]
    return bool(wanted and (notifiers() or any(signal.receivers for signal in wanted)))


def announce(alias: str, batch: Batch) -> None:
    """Store notifications in the open transaction; after the commit send signals and try to deliver."""
    notifications = []
    for (name, approval_id), row in (_events(batch) if is_announced(batch) else {}).items():
        about: dict[str, Any] = {"run_id": row.run_id, "event": name}
        about |= {"approval_id": approval_id} if approval_id else {}

        def send(signal: Signal = EVENTS[row.kind][1], about: dict[str, Any] = about) -> None:
            signal.send_robust(sender=Run, **about)

        if EVENTS[row.kind][1].has_listeners(Run):
            transaction.on_commit(send, using=alias, robust=True)
        for path in notifiers():
            if _wants(path, name):
                notifications.append(Notification(notifier=path, created_at=row.created_at, **about))
    _store(alias, notifications)


def announce_blocked(alias: str, run: Run) -> None:
    """Store notifications that runs of a run's definition are blocked; at most once in ONCE per definition.

    Needs an open transaction.
    """
    controls, name = Control.objects.using(alias), Control.BLOCKED + run.definition_id
    never = Control(name=name, seen_at=datetime(1970, 1, 1, tzinfo=UTC))
    controls.bulk_create([never], ignore_conflicts=True)
    if controls.filter(name=name, seen_at__lt=later(-ONCE)).update(seen_at=Now()):
        about: dict[str, Any] = {"run_id": run.pk, "event": BLOCKED, "created_at": clock.now(alias)}
        _store(alias, [Notification(notifier=path, **about) for path in notifiers() if _wants(path, BLOCKED)])


def _store(alias: str, notifications: list[Notification]) -> None:
    """Store notifications in the open transaction, and try to deliver them after the commit."""
    Notification.objects.using(alias).bulk_create(notifications)

    def deliver() -> None:
        if any(map(has_foreign_blocks, connections.all(initialized_only=True))):
            return  # the network must not keep a caller's transaction open: the next sweep delivers
        began = time.monotonic()
        for notification in notifications:
            if time.monotonic() > began + AT_ONCE:
                return
            is_resting = time.monotonic() < resting.get(notification.notifier, 0)
            if not is_resting and _deliver(settings.DATABASE, notification) is False:
                resting[notification.notifier] = time.monotonic() + REST_SECONDS

    if notifications:
        transaction.on_commit(deliver, using=alias, robust=True)


def notifiers() -> list[str]:
    """List the dotted paths of the notifiers: AGENTRUNS_NOTIFIERS, and ANCHOR if AGENTRUNS_ANCHOR is set."""
    return [*settings.NOTIFIERS, *([ANCHOR] if settings.ANCHOR else [])]


def _events(batch: Batch) -> dict[tuple[str, UUID | None], Row]:
    """Map each event of a batch that is to be announced, as (name, approval's id or None), to its row."""
    rows: dict[tuple[str, UUID | None], Row] = {}
    for row in batch.rows:
        if row.kind not in EVENTS or events.COPIED in row.payload:  # a copy was announced for its own run
            continue
        name = EVENTS[row.kind][0]
        call = batch.state.run.calls.get(row.call_id) if name.startswith("approval.") else None
        approval = call.approval if call else None
        if row.kind == events.ORPHAN_FOUND and row.payload["action"] != Orphan.HELD:
            continue
        is_pending = approval is not None and approval.status == ApprovalStatus.PENDING
        if row.kind in (events.APPROVAL_REQUESTED, events.APPROVAL_VOIDED) and not is_pending:
            continue  # among them a card that a standing rule has decided at once
        if row.kind == events.APPROVAL_DECIDED and (approval is None or is_pending):
            continue  # more people have to approve
        rows[name, approval.id if approval else None] = row
    return rows


def _wants(path: str, event: str) -> bool:
    """Check whether a notifier wants an event; True if it has no `events` or cannot be imported."""
    try:
        wanted = getattr(import_string(path), "events", None)
    except Exception:
        return True  # a notifier that cannot be imported loses no notification; its delivery logs the error
    return wanted is None or event in wanted


def deliver_due(alias: str, should_stop: Callable[[], bool] = lambda: False) -> int:
    """Deliver due notifications, oldest first, an equal share per notifier; return the number delivered."""
    sent, paths = 0, notifiers()
    for path in paths:
        due = Notification.objects.using(alias).filter(DUE, notifier=path).order_by("pk")
        for notification in due[: max(1, PER_SWEEP // len(paths))]:
            if should_stop():
                return sent
            if (delivered := _deliver(alias, notification)) is False:
                break
            sent += delivered is True
    return sent


def _deliver(alias: str, notification: Notification) -> bool | None:
    """Try once to deliver a notification, or to store one for each user whom its notifier names.

    Returns True, False after an error, and None if it was not due or can never be delivered.
    """
    unsent = Notification.objects.using(alias).filter(pk=notification.pk, sent_at=None)
    due = unsent.filter(DUE, attempts=notification.attempts)
    until = Now() + timedelta(seconds=CLAIM_SECONDS)
    if in_transaction(alias, lambda: due.update(attempts=F("attempts") + 1, not_before=until)) != 1:
        return None
    shares: list[Notification] = []
    try:
        notifier, notice = load_notifier(notification.notifier), notice_of(alias, notification)
        names = None if notification.recipient else getattr(notifier, "recipients", None)
        if (people := names(notice) if names else None) is None:
            notifier(notice)
        for person in people or ():
            about = {name: getattr(notification, name) for name in SHARED}
            shares.append(Notification(recipient=str(person.pk), **about))
    except Exception as error:
        attempt = notification.attempts + 1
        pause = FIRST_PAUSE * FACTOR ** (attempt - 1)
        gives_up = attempt >= MAX_ATTEMPTS or isinstance(error, UndeliverableError)
        columns: dict[str, Any] = {"attempts": MAX_ATTEMPTS} if gives_up else {}
        columns["not_before"] = Now() + timedelta(seconds=pause)
        in_transaction(alias, lambda: unsent.filter(attempts=attempt).update(**columns))
        logger.log(
            logging.ERROR if gives_up else logging.WARNING,
            "Notification %s (%s run=%s) did not go through %s, attempt %s of %s; %s",
            notification.pk, notification.event, notification.run_id, notification.notifier, attempt,
            MAX_ATTEMPTS, "given up" if gives_up else f"again in {pause} s",
            exc_info=error,
        )  # fmt: skip
        return None if isinstance(error, UndeliverableError) else False

    def finish() -> None:
        if unsent.update(sent_at=Now()):
            _store(alias, shares)

    in_transaction(alias, finish)
    return True


def load_notifier(path: str) -> Callable[[Notice], object]:
    """Import the notifier at a dotted path; instantiate a class. Raises ImportError or TypeError."""
    made = import_string(path)
    notifier: Callable[[Notice], object] = made() if isinstance(made, type) else made
    if not callable(notifier):
        raise TypeError(f"{path} cannot be called.")
    if wrong := arity_mistake(notifier, "notice"):
        raise TypeError(f"{path} {wrong}.")
    return notifier


def notice_of(alias: str, notification: Notification) -> Notice:
    """Build the notice of a notification, redacted and masked; raises DoesNotExist if its run is gone."""
    url, model, pk = settings.BASE_URL.rstrip("/"), "run", notification.run_id
    if notification.approval_id:
        model, pk = "approval", notification.approval_id
    try:
        url = url and url + reverse(f"admin:agentruns_{model}_change", args=[pk])
    except NoReverseMatch:
        url = ""
    runs = Run.objects.using(alias).select_related("session")
    run = runs.defer("input", "output", "error").get(pk=notification.run_id)
    status, title, tool, risk, expires_at, group = run.status, "", "", "", None, ""
    if notification.approval_id:
        approvals = Approval.objects.using(alias).filter(pk=notification.approval_id)
        columns = approvals.values_list("status", "title", "tool_name", "risk", "expires_at", "escalate_to")
        status, title, tool, risk, expires_at, group = columns.get()
        # The title of a tool without `describe` is its arguments, and those stay inside.
        if title and not title.startswith(f"{tool}("):
            title = str(canonical.legal(one_line(redact(mask_of(run).tool_text(tool, title)))))
        else:
            title = tool
    elif notification.event == BLOCKED:
        unfinished = Run.objects.using(alias).unfinished().filter(definition_id=run.definition_id).count()
        why = one_line(redact(str(mask_of(run).json(run.blocked_reason))))
        title = f"{unfinished} unfinished with this definition. {why}" if why else ""
    elif notification.event == "budget.low":
        rows = Message.objects.using(alias).filter(run_id=run.pk, kind=events.BUDGET_LOW).order_by("-seq")
        for low in rows.values_list("facts", flat=True)[:1]:
            title = "{budget}: {used} of {limit} used".format(**low)
    elif notification.event == "run.orphaned":
        rows = Message.objects.using(alias).filter(run_id=run.pk, kind=events.ORPHAN_FOUND).order_by("-seq")
        doubted = rows.values_list("tool_name", "facts")
        tool = next((tool for tool, facts in doubted if facts["action"] == Orphan.HELD), "")
    return Notice(
        id=notification.pk,
        type=notification.event,
        timestamp=notification.created_at,
        run_id=notification.run_id,
        session=redact(run.session.key),
        agent=run.agent,
        status=status,
        requester=redact(run.owner_name),
        approval_id=notification.approval_id,
        title=title,
        tool=tool,
        risk=risk,
        expires_at=expires_at,
        url=url,
        group=group if notification.event == "approval.escalated" else "",
        recipient=notification.recipient,
    )
