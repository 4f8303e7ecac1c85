"""The reasons why runs wait, and the runs that a deploy blocks, for all pages and commands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from operator import attrgetter
from typing import Any
from uuid import UUID

from django.db.models import Count, Min, Q, QuerySet, TextField
from django.db.models.functions import Cast, Now

from agentruns.agents.agent import registered
from agentruns.conf import settings
from agentruns.engine import turns
from agentruns.journal import doubts, events
from agentruns.journal.masking import Mask, mask_of, masks_of
from agentruns.journal.policy import is_narrowed
from agentruns.journal.read import UNREADABLE, definition_body, read_rows, readable_rows
from agentruns.models import Approval, Control, Message, Run
from agentruns.models.run import FREE, SERVED, TURN, RunQuerySet
from agentruns.models.statuses import ACTIVE, UNFINISHED, Orphan, Verdict
from agentruns.utils import clock
from agentruns.utils.bounds import OWN_EVENTS

STALLED = Q(status=Run.Status.RUNNING) & FREE
FOR_PEOPLE = (Run.Status.AWAITING_APPROVAL, Run.Status.ORPHANED, Run.Status.PAUSED)
ORPHAN, UNCLEARED, APPROVAL, PAUSED, EVENT = "orphan", "uncleared", "approval", "paused", "event"
SILENT, BACKOFF, SCHEDULED, BLOCKED, IN_TURN = "silent", "back-off", "scheduled", "blocked", "turn"
EXEMPT = ("safe_to_retry", "reconcile", "transactional")  # declarations of tools that need no person
# `events.leaves_doubt` for the database, which has the facts as their canonical text
LEAVES_DOUBT = Q(text__contains='"in_doubt":true') | Q(text__contains='"outcome":"unknown"')
LATELY = timedelta(days=7)  # age of the ended runs that are searched for doubts
MOST = 1000  # ended runs that are searched, and blocked runs that are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One reason why a run waits; `approval_id` or `call_id` names what a person can act on.

    `text` is not escaped, and is masked except by `orphans`. It is the evidence of a call in doubt, the error
    of a call that ended in doubt, the title of an approval, the key of an event, or why a run is paused or
    blocked.
    """

    kind: str
    run_id: UUID
    event: str = ""  # the name of the event that the call waits for
    call_id: str = ""
    tool: str = ""
    attempt: int = 0
    text: str = ""
    approval_id: UUID | None = None
    since: datetime | None = None  # of a wait for an event
    until: datetime | None = None  # of a back-off, a start at a later time, or a wait for an event
    is_harmless: bool = False  # when the wait for the event ends, nothing is in doubt
    gates_tool: bool = False  # further calls of the tool need approval until this call is cleared

    @property
    def is_own(self) -> bool:
        """Check whether only this package ends the wait, such as a wait for a time."""
        return self.event.startswith(OWN_EVENTS)

    def record(self) -> dict[str, Any]:
        """Build a JSON object of a wait for an event."""
        moments = {"since": self.since, "until": self.until}
        return {"call_id": self.call_id, "tool": self.tool, "name": self.event, "key": self.text, **moments}

    def masked(self, mask: Mask) -> Wait:
        """Copy the Wait, with the sensitive values in its text hidden."""
        return replace(self, text=mask.tool_text(self.tool, self.text))


def waits(
    alias: str, runs: Iterable[Run], masks: Mapping[UUID, Mask] | None = None
) -> dict[UUID, list[Wait]]:
    """Map each waiting run to the reasons why it waits, calls in doubt first, with masked texts.

    Leaves out runs that have ended, that a worker drives, or that are queued and next. `masks` has
    the masks by session; None builds them.
    """
    runs = list(runs)
    later = turns.reasons(alias, runs)
    stopped = [run for run in runs if run.status in FOR_PEOPLE]
    reasons: dict[UUID, list[Wait]] = defaultdict(list)
    if stopped:
        for wait in orphans(alias, stopped):
            reasons[wait.run_id].append(wait)
        pending = Approval.objects.using(alias).pending().filter(run_id__in=[run.pk for run in stopped])
        for card in pending.order_by("requested_at").only("run_id", "call_id", "tool_name", "title"):
            about = {"call_id": card.call_id, "tool": card.tool_name, "text": card.title}
            reasons[card.run_id].append(Wait(kind=APPROVAL, run_id=card.run_id, approval_id=card.pk, **about))
    unbegun = [run for run in runs if waits_for_time(run) and not run.step]
    starts = Message.objects.using(alias).own().filter(run__in=unbegun, kind=events.RUN_STARTED)
    firsts = dict(starts.values_list("run_id", "facts")) if unbegun else {}
    for run_id, awaited in events_of(alias, runs).items():
        reasons[run_id] += awaited
    for run in runs:
        if run.status == Run.Status.PAUSED:
            reasons[run.pk].append(Wait(kind=PAUSED, run_id=run.pk, text=run.blocked_reason))
        elif is_stalled(run):
            reasons[run.pk].append(Wait(kind=SILENT, run_id=run.pk))
        elif run.pk in later or (run.status == Run.Status.QUEUED and run.blocked_reason.startswith(TURN)):
            why = later.get(run.pk) or run.blocked_reason
            reasons[run.pk].append(Wait(kind=IN_TURN, run_id=run.pk, text=why))
        elif waits_for_time(run):
            due, until = firsts.get(run.pk, {}).get("not_before"), run.not_before
            timed = SCHEDULED if until is not None and due == events.timestamp(until) else BACKOFF
            reasons[run.pk].append(Wait(kind=timed, run_id=run.pk, until=run.not_before))
        elif run.status == Run.Status.QUEUED and run.blocked_reason:
            reasons[run.pk].append(Wait(kind=BLOCKED, run_id=run.pk, text=run.blocked_reason))
    if masks is None:
        masks = masks_of(run for run in runs if reasons.get(run.pk))
    for run in runs:
        if run.pk in reasons:
            reasons[run.pk] = [wait.masked(masks[run.session_id]) for wait in reasons[run.pk]]
    return reasons


def events_of(
    alias: str, runs: Iterable[Run], masks: Mapping[UUID, Mask] | None = None
) -> dict[UUID, list[Wait]]:
    """Map each run that waits to its calls that wait for an event, in order.

    Leaves out runs that are queued or that a worker drives. `masks` has the masks of the keys by session;
    None leaves the keys as they are.
    """
    its = {run.pk: run for run in runs if run.status in (Run.Status.WAITING, *FOR_PEOPLE)}
    open_calls = {(run.pk, call) for run in its.values() for call in run.pending_calls}
    rows = Message.objects.using(alias).filter(run_id__in=its, kind=events.EVENT_AWAITED)
    fields = ("run_id", "call_id", "tool_name", "facts", "created_at")
    waits: dict[UUID, list[Wait]] = defaultdict(list)
    for run_id, call, tool, facts, since in rows.order_by("seq").values_list(*fields) if its else ():
        if (run_id, call) in open_calls:
            about = {"call_id": call, "tool": tool, "event": facts.get("name", "")}
            about |= {"text": facts.get("key", ""), "is_harmless": bool(facts.get("harmless"))}
            until = events.moment(facts.get("until"))
            wait = Wait(kind=EVENT, run_id=run_id, since=since, until=until, **about)
            waits[run_id].append(wait if masks is None else wait.masked(masks[its[run_id].session_id]))
    return waits


def uncleared(
    alias: str, run: Run, mask: Mask | None = None, among: QuerySet[Run] | None = None
) -> list[Wait]:
    """List the calls of the run's session whose result leaves a doubt that no later row has cleared.

    Empty for an imported run, which accepts no verdict. `among` are runs that the reader sees (None: all).
    """
    rows = Message.objects.using(alias).filter(session_id=run.session_id, session__imported_at=None)
    results = uncleared_in(read_rows(rows.filter(kind__in=doubts.KINDS).order_by("seq")))
    if results and among is not None and is_narrowed(among):
        seen = {*among.filter(pk__in={row.run_id for row in results}).values_list("pk", flat=True)}
        results = [row for row in results if row.run_id in seen]
    if not results:
        return []
    tools = definition_body(alias, run.definition_id).get("tools", {})
    gating = {name for name, declared in tools.items() if not any(map(declared.get, EXEMPT))}
    mask = mask_of(run) if mask is None else mask
    return [replace(wait, gates_tool=wait.tool in gating).masked(mask) for wait in map(_uncleared, results)]


def ended_in_doubt(alias: str, runs: QuerySet[Run]) -> list[Wait]:
    """List the calls that ended runs left in doubt, oldest first, without texts.

    Searches those of `runs` that ended and changed in the last week, but at most the MOST newest. Leaves out
    damaged rows, calls that were cleared or got the verdict "unknown", and calls that a fork copied.
    Leaves out imported runs as well, because they accept no verdict.
    """
    ended = runs.filter(status__in=Run.ENDED, updated_at__gte=clock.now(alias) - LATELY)
    newest = ended.filter(session__imported_at=None).order_by("-updated_at", "-pk").values("pk")[:MOST]
    rows = Message.objects.using(alias).annotate(text=Cast("facts", TextField()))
    results = rows.filter(LEAVES_DOUBT, kind=events.TOOL_RESULT)
    left = dict(results.filter(run_id__in=newest).values_list("run_id", "session_id"))
    # No messages about deferred calls: the runs of these calls have the doubts themselves.
    others = {*doubts.KINDS} - {events.TOOL_RESULT, events.USER}
    about = results | rows.filter(kind__in=others)
    about = about.filter(session_id__in={*left.values()}).order_by("seq")
    # A copied row repeats a doubt of the fork's origin. Without copies each call belongs to one session.
    its = [row for row in readable_rows(about, contents=False) if events.COPIED not in row.payload]
    unknown = {row.call_id for row in its if row.payload.get("verdict") == Verdict.UNKNOWN}
    doubtful = [row for row in uncleared_in(its) if row.run_id in left and row.call_id not in unknown]
    return [replace(_uncleared(row), text="") for row in sorted(doubtful, key=attrgetter("created_at"))]


def _uncleared(row: events.Row) -> Wait:
    """Build the Wait for a result that leaves a doubt."""
    text = str(row.payload["content"]) if row.payload.get("in_doubt") else ""
    return Wait(kind=UNCLEARED, run_id=row.run_id, call_id=row.call_id, tool=row.tool_name, text=text)


def uncleared_in(rows: Iterable[events.Row]) -> list[events.Row]:
    """Find the results in `rows` that leave a doubt which no later row clears; skip damaged rows."""
    left = doubts.Doubts()
    for row in rows:
        with suppress(*UNREADABLE):
            left.apply(row)
    return list(left.open.values())


def is_live(run: Run) -> bool:
    """Check whether a worker holds the run's lease now, by the database's clock."""
    expires = run.lease_expires_at
    return run.status == Run.Status.RUNNING and expires is not None and expires > clock.now(settings.DATABASE)


def is_stalled(run: Run) -> bool:
    """Check whether the run has the status running and no worker holds its lease."""
    return run.status == Run.Status.RUNNING and not is_live(run)


def waits_for_time(run: Run) -> bool:
    """Check whether a queued run waits for its start time, or for the end of a back-off."""
    until = run.not_before
    return run.status == Run.Status.QUEUED and until is not None and until > clock.now(settings.DATABASE)


def cancel_requests(alias: str, runs: Collection[Run]) -> dict[UUID, tuple[str, datetime]]:
    """Map each run to its first request to cancel: name of the requester ("": the program) and time."""
    rows = Message.objects.using(alias).own().filter(run__in=runs, kind=events.RUN_CANCEL_REQUESTED)
    requests = rows.order_by("-seq").values_list("run_id", "facts", "created_at")
    return {run_id: ((facts.get("actor") or {}).get("name", ""), when) for run_id, facts, when in requests}


def pause_of(alias: str, run: Run) -> tuple[bool, tuple[str, datetime] | None]:
    """Check whether a run is paused, and find its open request to pause: (requester, time), or None."""
    kinds = (events.RUN_PAUSE_REQUESTED, events.RUN_PAUSED, events.RUN_RESUMED)
    rows = Message.objects.using(alias).own().filter(run_id=run.pk, kind__in=kinds).order_by("-seq")
    for kind, facts, at in rows.values_list("kind", "facts", "created_at"):
        if events.COPIED in facts or (kind == events.RUN_RESUMED and not facts.get("unpause")):
            continue
        if kind == events.RUN_PAUSE_REQUESTED:
            return False, ((facts.get("actor") or {}).get("name", ""), at)
        return kind == events.RUN_PAUSED, None
    return False, None


def is_refused(alias: str, run: Run) -> bool:
    """Check whether the run is paused because its provider refuses the conversation."""
    pauses = Message.objects.using(alias).own().filter(run_id=run.pk, kind=events.RUN_PAUSED).order_by("-seq")
    facts = pauses.values_list("facts", flat=True).first() if run.status == Run.Status.PAUSED else None
    return bool(facts and facts.get("refused"))


def own_limits(alias: str, run: Run) -> tuple[dict[str, Any], dict[str, Decimal]]:
    """Find the limits of a run in place of its definition's, and what its child runs have used; by name."""
    kinds = [events.RUN_STARTED, events.BUDGET_RAISED]
    if Run.objects.using(alias).filter(parent_id=run.pk).exists():
        kinds.append(events.TOOL_RESULT)
    rows = Message.objects.using(alias).own().filter(run_id=run.pk, kind__in=kinds).order_by("seq")
    limits: dict[str, Any] = {}
    spent: dict[str, Decimal] = {}
    for facts in rows.values_list("facts", flat=True):
        limits |= facts.get("limits", {})
        for name, amount in facts.get("spent", {}).items():
            spent[name] = spent.get(name, Decimal()) + Decimal(amount)
    return limits, spent


def unread(alias: str, run_ids: Collection[UUID]) -> dict[UUID | None, list[tuple[int, datetime]]]:
    """Map each run to the messages that no reply of the run has read, as (row number, time). One query."""
    unread_of: dict[UUID, list[tuple[int, datetime]]] = defaultdict(list)
    rows = Message.objects.using(alias).filter(run_id__in=run_ids, kind__in=(events.USER, events.ASSISTANT))
    fields = ("run_id", "seq", "facts", "created_at")
    for run_id, seq, facts, at in rows.order_by("seq").values_list(*fields) if run_ids else ():
        if facts.get("reason") == events.MESSAGE:
            unread_of[run_id].append((seq, at))
        elif "read" in facts:
            unread_of[run_id] = [each for each in unread_of[run_id] if each[0] > facts["read"]]
    return {run_id: messages for run_id, messages in unread_of.items() if messages}


def sweeper_seen(alias: str) -> datetime | None:
    """Find the time of the last sweep, except sweeps of draining processes; None if there was none."""
    seen = Control.objects.using(alias).sweepers().order_by("-seen_at").values_list("seen_at", flat=True)
    return seen.first()


def lacking() -> Q:
    """Build the condition for unfinished runs whose definition no agent of this process has."""
    hashes = [agent.definition_hash for agent in registered()]
    return Q(status__in=UNFINISHED, session__imported_at=None) & ~Q(definition_id__in=hashes)


def blocked() -> Q:
    """Build the condition for runs that nobody drives, and that this process or the last worker cannot."""
    rests = Q(status__in=(*FOR_PEOPLE, Run.Status.WAITING, Run.Status.QUEUED)) | STALLED
    is_recorded = Q(status=Run.Status.QUEUED) & ~SERVED
    return Q(status__in=UNFINISHED, session__imported_at=None) & ((rests & lacking()) | is_recorded)


def standing(alias: str, run_id: UUID | str | None = None) -> dict[str, Any]:
    """Count the runs that are leased, wait for events or people, or are unserved.

    Also finds when the first lease ends.
    """
    runs = Run.objects.using(alias).filter(**({} if run_id is None else {"pk": run_id}))
    leased = runs.filter(Q(status__in=ACTIVE), lease_expires_at__gte=Now())
    return {
        **leased.aggregate(leased=Count("pk"), leased_until=Min("lease_expires_at")),
        "for_events": runs.filter(status=Run.Status.WAITING).count(),
        "for_people": runs.filter(status__in=FOR_PEOPLE).count(),
        "unserved": unserved(runs).count(),
    }


def unserved(runs: RunQuerySet) -> RunQuerySet:
    """Select those queued `runs` that workers could not drive, by their recorded reason."""
    return runs.filter(status=Run.Status.QUEUED).exclude(SERVED)


def orphans(alias: str, runs: list[Run]) -> Iterator[Wait]:
    """Yield the calls in doubt of `runs` that wait for a person; their texts are not masked."""
    open_calls = {(run.pk, call_id) for run in runs for call_id in run.pending_calls}
    kinds = (events.ORPHAN_FOUND, events.ORPHAN_RESOLVED)
    rows = Message.objects.using(alias).filter(run_id__in=[run.pk for run in runs], kind__in=kinds)
    last = {(row.run_id, row.call_id): row for row in readable_rows(rows.order_by("seq"))}
    for (run_id, call_id), row in last.items():
        is_held = row.kind == events.ORPHAN_FOUND and row.payload.get("action") == Orphan.HELD
        if is_held and (run_id, call_id) in open_calls:
            about = {"tool": row.tool_name, "attempt": row.attempt, "text": row.payload.get("evidence", "")}
            yield Wait(kind=ORPHAN, run_id=run_id, call_id=call_id, **about)
