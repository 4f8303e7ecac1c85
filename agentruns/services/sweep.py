"""The sweep: expire approvals, deliver notifications, drive every runnable run that this process serves."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Literal
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections
from django.db.models import Count, Q

from agentruns.agents.agent import registered
from agentruns.conf import settings
from agentruns.engine import leases, turns
from agentruns.engine.wakeup import notify_on_commit
from agentruns.engine.worker import advance, block
from agentruns.exceptions import JournalLockedError, JournalUnreadableError, RunStateError, SessionBusyError
from agentruns.journal import telemetry, timeline
from agentruns.journal.connection import own_alias, own_connection, require_no_transaction, rest
from agentruns.journal.events import Program
from agentruns.journal.outbox import deliver_due
from agentruns.models import Control, Draft, Run
from agentruns.models.run import RunQuerySet
from agentruns.services.approvals import decisions
from agentruns.services.events import settle_due
from agentruns.services.runs.control import hold_run
from agentruns.services.runs.lifecycle import surface_orphans
from agentruns.utils.db import in_transaction, later, reading, uptime, working
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.sweep")

LATE = 600  # seconds without a sweep after which something is wrong
STAMPED = 5  # seconds for which a sweep's stamp counts as new
BATCH = 100
RENEWED = 60  # seconds after which a sweep updates the reason of a blocked run, and deletes old drafts
SEVERAL = 10
FRESH = 1.0  # seconds for which a list of runs counts as new
MOMENT = 0.02  # the same of a list without runs
HELD = "held for staff: every unfinished run was, after a restore"
FAILED_OVER = (
    "{rewound}: the server was on timeline {known} and is on {timeline}, at position {position}: a replica "
    "that no commit had waited for took over, or a copy was restored. Rows may be lost. "
    "See docs/databases.md, 'Rows that vanish'."
)


@dataclass(slots=True)
class Swept:
    """The counts of one sweep.

    `completed`, `waiting`, `failed` (or cancelled) and `queued` count the driven runs by their status after
    the drive. `notified` counts the runs announced to workers, `settled` the events that were due, `reminded`
    the reminders and escalations, `surfaced` the runs whose model was told that the outcome of calls is
    unknown. `left` has the ids of the runs that wait, or that an error paused.
    """

    found: int = 0
    driven: int = 0
    notified: int = 0
    surfaced: int = 0
    expired: int = 0
    reminded: int = 0
    settled: int = 0
    blocked: int = 0
    errors: int = 0
    completed: int = 0
    waiting: int = 0
    failed: int = 0
    queued: int = 0
    left: list[UUID] = field(default_factory=list)

    def add(self, other: Swept) -> None:
        """Add the counts of another sweep to these."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def as_dict(self) -> dict[str, int]:
        """Build a dict of the counts by name, without `left`."""
        return {name: value for name, value in asdict(self).items() if name != "left"}


def candidates(run_id: UUID | str | None = None, limit: int | None = None) -> list[Run]:
    """List at most `limit` (or BATCH) runs that this process can claim and serve now, in order of turns."""
    runs, served = _runnable(run_id)
    ids = turns.in_turn(runs.filter(served), limit or BATCH, turns.room_of(settings.DATABASE))
    found = runs.in_bulk(ids) if ids else {}
    return [found[pk] for pk in ids if pk in found]


def unserved(run_id: UUID | str | None = None) -> list[Run]:
    """List at most BATCH claimable runs that this process does not serve; the sweep records the reason.

    A run is not served if its agent is switched off, or the agent or its definition is not registered here.
    Runs without a recorded reason come first, then runs whose reason is older than RENEWED seconds.
    """
    runs, served = _runnable(run_id)
    blocked = runs.exclude(served)
    blank = list(blocked.filter(blocked_reason="")[:BATCH])
    old = Q(blocked_at=None) | Q(blocked_at__lt=later(-RENEWED))
    return blank + list(blocked.exclude(blocked_reason="").filter(old)[: BATCH - len(blank)])


def _runnable(run_id: UUID | str | None) -> tuple[RunQuerySet, Q]:
    """Select the runs that some process can claim, and build the condition "this process serves the run"."""
    runs = Run.objects.using(settings.DATABASE).runnable().select_related("session").order_by("created_at")
    runs = runs.defer("usage", "pending_calls")  # an altered value must not stop the other runs
    # In the query and not after it: runs of a retired definition must never fill the whole batch.
    served = Q(pk__in=[])
    for agent in registered():
        if leases.why_off(settings.DATABASE, "agent", agent.name):
            continue
        served |= Q(agent=agent.name, version=agent.version, definition_id=agent.definition_hash)
    return runs if run_id is None else runs.filter(pk=run_id), served


def sweep(
    *,
    name: str = "resume_runs",
    run_id: UUID | str | None = None,
    limit: int | None = None,
    drives: bool = True,
    tell_model: bool = False,
    seconds: float = math.inf,
    should_stop: Callable[[], bool] = lambda: False,
    crew: Crew | None = None,
) -> Swept:
    """Do one sweep: deliver notifications, drive the runs that this process serves, and expire approvals.

    Also records why unserved runs wait, and deletes drafts that nobody watches. Logs and counts the error of
    a run, and goes on with the others. A draining process drives no run. `crew` drives in its own threads.
    If `drives` is False, notifies workers instead. `run_id` and `limit` restrict the runs. `tell_model` also
    takes runs that wait for a verdict, and tells the model that the outcome of their calls is unknown.
    After `seconds`, a sweep that has driven a run begins no further run, so that other due work need not
    wait. `name` is the actor, and names the sweep's stamp. Raises NotDurableError inside a transaction.
    """
    alias, until = settings.DATABASE, time.monotonic() + seconds
    require_no_transaction(alias)
    swept, seen, claims = Swept(), set[UUID](), not drives or not leases.is_draining(alias)
    # Each stamp is a commit, which wakes workers; a sweep that drives nothing must not look like a worker.
    if claims and not Control.objects.using(alias).filter(name=name, seen_at__gte=later(-STAMPED)).exists():
        with _put_off("The stamp of this sweep"):
            in_transaction(alias, lambda: Control.objects.using(alias).stamp(name))
    _compare_server(alias)
    for run in unserved(run_id):
        with _put_off(f"The reason why run {run.pk} waits"):
            swept.blocked += block(run, alias)
    only = {} if run_id is None else {"pk": run_id}
    held = Run.objects.using(alias).filter(status=Run.Status.ORPHANED, **only)
    for held_id in list(held.values_list("pk", flat=True)[:BATCH]) if tell_model else ():
        try:
            surface_orphans(held_id, Program(name))
            swept.surfaced += 1
        except (RunStateError, SessionBusyError):  # somebody else was faster
            continue
        except (DatabaseError, InterfaceError):
            raise
        except Exception:
            logger.exception("Not surfaced run=%s", held_id)
            swept.errors += 1
    watched = Draft.objects.using(alias).filter(watched_until__lt=later(-RENEWED))
    if watched.exists():  # only then, because each write wakes workers
        with _put_off("The drafts that nobody watches"):
            in_transaction(alias, watched.delete)
    with _put_off("The delivery of notifications"):
        deliver_due(alias, should_stop)

    def go_on() -> None:
        if crew is not None:
            crew.fill((math.inf if limit is None else limit) if claims else 0)
            return
        runs = [run for run in candidates(run_id, limit) if run.pk not in seen] if claims else []
        seen.update(run.pk for run in runs)
        for run in runs:
            if should_stop() or (swept.driven and time.monotonic() > until):
                return
            swept.found += 1
            if drives:
                _advance(run, alias, swept, should_stop)
            else:
                notify_on_commit(alias, run.pk)
                swept.notified += 1

    with own_connection(alias):  # one for all the drives
        go_on()
        swept.expired = decisions.expire_due()  # afterwards: a card of a locked session keeps no run waiting
        swept.reminded = decisions.remind_due()
        swept.settled = settle_due()
        if swept.expired or swept.settled:
            go_on()
    telemetry.event("sweep", {"name": name, **swept.as_dict()})
    return swept


class Crew:
    """The threads of a worker that drive runs, at most `size` at once.

    A thread drives one run after the other, in the order of `candidates`, and ends when no run is left.
    """

    def __init__(self, size: int, should_stop: Callable[[], bool], run_id: UUID | str | None = None) -> None:
        self.size, self.should_stop, self.run_id = size, should_stop, run_id
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._driven: set[UUID] = set()
        self._refused: set[UUID] = set()  # since the last `fill`
        self._runs: deque[Run] = deque()
        self._listed_at = 0.0
        self._left: float = math.inf
        self._swept = Swept()

    def fill(self, limit: float = math.inf, *, more: bool = False) -> None:
        """Start threads for the runs that can go on now.

        They begin at most `limit` runs until the next call, or with `more`, what the call before left of it.
        """
        with self._lock:
            self._listed_at, self._left = 0.0, self._left if more else limit
            self._refused.clear()
        while len(self._threads) < self.size and (run := self._next()):
            thread = threading.Thread(target=self._work, args=[run], name="agentruns-drive", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left
                self._threads.discard(thread)
                self._driven.discard(run.pk)
                raise

    def take(self) -> Swept:
        """Return the counts of the drives that have ended since the last call, and count from zero again."""
        with self._lock:
            swept, self._swept = self._swept, Swept()
        return swept

    def join(self) -> None:
        """Wait until each thread has ended."""
        for thread in [*self._threads]:
            thread.join()

    def _next(self) -> Run | None:
        """Take the next run to drive; read the list of runs again if it is old or empty."""
        with self._lock:
            if self.should_stop() or self._left <= 0:
                return None
            age = uptime() - self._listed_at
            if age > FRESH or (not self._runs and age > MOMENT):
                runs = candidates(self.run_id, min(BATCH, len(self._driven) + SEVERAL * self.size))
                self._runs, self._listed_at = deque(runs), uptime()
            while self._runs:
                run = self._runs.popleft()
                if run.pk not in self._driven | self._refused:
                    self._driven.add(run.pk)
                    self._left -= 1
                    return run
            return None

    def _work(self, run: Run | None) -> None:
        """Drive `run` in this thread, and then one run after the other, until none is left."""
        alias = settings.DATABASE
        try:
            with working(), own_connection(alias):
                while run is not None:
                    swept = Swept(found=1)
                    try:
                        _advance(run, alias, swept, self.should_stop)
                    finally:
                        rest(alias)
                        with self._lock:
                            self._driven.discard(run.pk)
                            self._swept.add(swept)
                            if not swept.driven:  # locked, or it fails before its claim: not again and again
                                self._refused.add(run.pk)
                    run = self._next()
        except Exception:  # such as no database; the next sweep tries again
            logger.exception("A thread of the worker ends; the next sweep starts another")
        finally:
            connections.close_all()
            self._threads.discard(threading.current_thread())


def crew_of(size: int, should_stop: Callable[[], bool], run_id: UUID | str | None = None) -> Crew | None:
    """Build a crew; None if `size` is 1, or if the database allows no second connection."""
    alias = settings.DATABASE
    with own_connection(alias):
        return None if size == 1 or own_alias(alias) == alias else Crew(size, should_stop, run_id)


@contextmanager
def _put_off(what: str) -> Iterator[None]:
    """Log a JournalLockedError of the block instead of raising it, because the next sweep tries again."""
    try:
        yield
    except JournalLockedError as error:
        logger.warning("%s: %s", what, error)


def _compare_server(alias: str) -> None:
    """Hold every unfinished run if the server may have lost rows; otherwise note a server that has changed.

    Rows may be lost if PostgreSQL's timeline changed while replication was asynchronous, or if its log became
    shorter. No process can claim a run until the new timeline is noted (see journal.timeline).
    """
    before = timeline.positions.get(alias, 0)  # read first, as another thread may raise it after the query
    if (server := timeline.server(alias)) is None:
        return
    has_moved, went_back = server.known != server.timeline, server.position < before
    # A replica that takes over may lack commits that did not wait for it.
    if server.known and (server.was == "asynchronous" if has_moved else went_back):
        reason = FAILED_OVER.format(rewound=Run.REWOUND, **server._asdict())
        logger.critical("%s Every unfinished run is held for staff.", reason)
        with suppress(JournalUnreadableError):
            hold_all(reason)
        return
    timeline.positions[alias] = max(before, server.position)
    if has_moved or server.was != server.replication:
        with _put_off("The note of the server's timeline"):
            in_transaction(alias, lambda: Control.objects.using(alias).note(server))


def hold_all(reason: str = HELD) -> int:
    """Hold every unfinished run for staff, then note the server's timeline; return how many were held.

    Raises the error of a run after trying all. After an error that may pass, such as a lock, notes nothing.
    """
    alias = settings.DATABASE
    server, held, failed = timeline.server(alias), 0, list[Exception]()
    unfinished = Run.objects.using(alias).unfinished().order_by("created_at")
    for run_id in list(unfinished.values_list("pk", flat=True)):
        try:
            hold_run(run_id, Program("resume_runs"), reason=reason)
            held += 1
        except RunStateError:  # held already, or it ended in between
            continue
        except (DatabaseError, InterfaceError):
            raise
        except Exception as error:
            logger.exception("Not held run=%s", run_id)
            failed.append(error)
    # A run that cannot be read cannot go on either. A locked run could: the next sweep holds it.
    if left := [error for error in failed if not isinstance(error, JournalUnreadableError)]:
        raise left[0]
    if server is not None:
        in_transaction(alias, lambda: Control.objects.using(alias).note(server))
        timeline.positions[alias] = server.position
    if failed:
        raise failed[0]
    return held


def _advance(run: Run, alias: str, swept: Swept, should_stop: Callable[[], bool]) -> None:
    """Drive a run, and count its result or its error in `swept`; raise it if the database is unreachable."""
    try:
        if not advance(run, alias, should_stop=should_stop):
            return
    except Exception:
        is_paused: bool | None = None
        with suppress(DatabaseError, InterfaceError):
            paused = Run.objects.using(alias).filter(pk=run.pk, status=Run.Status.PAUSED)
            is_paused = reading(alias, paused.exists)
        if is_paused is None:  # the database is unreachable, so the other runs would fail as well
            raise
        swept.errors += 1
        logger.exception("Drive failed run=%s agent=%s", run.pk, run.agent)
        if is_paused:
            swept.left.append(run.pk)
        return
    swept.driven += 1
    status = Run.objects.using(own_alias(alias)).values_list("status", flat=True).filter(pk=run.pk).first()
    group = {"completed": "completed", "failed": "failed", "cancelled": "failed", "queued": "queued"}
    name = group.get(status, "waiting") if status else "failed"  # gone: the journal was rewound
    setattr(swept, name, getattr(swept, name) + 1)
    if name == "waiting":
        swept.left.append(run.pk)


def sweeper(alias: str) -> Literal["ok", "never", "late"]:
    """Check whether sweeps happen: "ok", "never" or "late". An old sweep is "ok" while a run is driven."""
    recent = Count("name", filter=Q(seen_at__gte=later(-LATE)))
    seen = Control.objects.using(alias).sweepers().aggregate(ever=Count("name"), lately=recent)
    if seen["lately"] or (seen["ever"] and leases.driven_runs(alias)):
        return "ok"
    return "late" if seen["ever"] else "never"
