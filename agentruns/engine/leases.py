"""Leases of runs, from claim to release, their keeper, and draining, after which no more runs are claimed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections
from django.db.models import Exists, F, Q, QuerySet

from agentruns.conf import settings
from agentruns.engine import turns
from agentruns.exceptions import JournalLockedError, LeaseLostError
from agentruns.journal import events, timeline
from agentruns.journal.connection import OWN, own_alias, own_connection
from agentruns.journal.store import Claimed, claim_one, extend_many
from agentruns.models import Control, Message, Run, Session
from agentruns.models.run import FREE, RunQuerySet
from agentruns.utils import clock
from agentruns.utils.carry import State, carried, keep, schema_of, state_of
from agentruns.utils.db import RACES, close_stale, database_now, in_transaction, later, uptime
from agentruns.utils.forks import in_child
from agentruns.utils.ids import uuid7
from agentruns.utils.redaction import bound, get_logger

logger = get_logger("agentruns.leases")

SERVICE = "service"  # owner of a lease that is taken and given back in one transaction
DRAIN_CHECK_SECONDS = 5.0  # seconds between two queries while a run is driven
NEVER = datetime(1970, 1, 1, tzinfo=UTC)
PATIENCE = 5.0  # seconds that the last drive waits for the keeper's connection to be closed
LOOK = 0.05  # seconds between two looks whether another drive needs the keeper meanwhile
SOONER = 8  # a lease that could not be extended is tried again after this part of HEARTBEAT_SECONDS

_at_start: dict[tuple[str, str], datetime] = {}  # by alias and schema
# (alias, schema) -> time of the query, its result
_switches: dict[tuple[str, str], tuple[float, dict[str, Control]]] = {}


@dataclass(slots=True, eq=False)
class Lease:
    """The right to drive one run, until the time `deadline` (of `uptime`) or until the lease is `lost`."""

    alias: str
    run_id: UUID
    session_id: UUID
    epoch: int
    attempts: int = 0
    took_over: bool = False
    deadline: float = field(default_factory=lambda: uptime() + settings.LEASE_SECONDS)
    lost: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)  # a cancel was requested
    ending: bool = False  # whether this process is giving the lease back
    owner: str = ""  # unique to one claim, because a rewound database can give two claims the same epoch
    # The time (of `uptime`) at which the keeper stops to extend the lease if there is no progress.
    due: float = field(default_factory=lambda: uptime() + settings.TOOL_TIMEOUT)
    beats_at: float = 0.0  # the time (of `uptime`) of the next beat
    is_stalled: bool = False  # whether the keeper has stopped to extend it

    def allow(self, seconds: float) -> None:
        """Let the keeper extend the lease for at least `seconds` from now."""
        self.due = max(self.due, uptime() + seconds)

    def held(self, alias: str) -> QuerySet[Run]:
        """Select the run, provided that this lease still holds it."""
        owner = {"lease_owner": self.owner} if self.owner else {}
        rows = Run.objects.using(alias).filter(pk=self.run_id, status=Run.Status.RUNNING)
        return rows.filter(lease_epoch=self.epoch, **owner)

    def extend(self) -> None:
        """Extend the lease to LEASE_SECONDS from now; raises LeaseLostError if another process took it."""
        before, alias = uptime(), own_alias(self.alias)
        rows = self.held(alias)
        if in_transaction(alias, lambda: rows.update(lease_expires_at=later(settings.LEASE_SECONDS))) != 1:
            self.lost.set()
            raise LeaseLostError(f"Run {self.run_id}: another process took over from epoch {self.epoch}.")
        self.deadline = before + settings.LEASE_SECONDS

    def release(
        self,
        *,
        failed: bool = False,
        delay: float | None = None,
        why: str = "",
        status: str = Run.Status.QUEUED,
        next_seq: int | None = None,
    ) -> bool:
        """Give the lease back between two steps; a drive that `failed` counts as an attempt.

        Nobody claims the run again for `delay` seconds, unless a request to cancel is in the journal. `why`
        is stored as the reason why the run waits, and `status` as its status. Returns False, and keeps the
        lease, if the next row of the session is not `next_seq` any more. Does nothing if the lease is lost.
        """
        self.ending = True
        columns: dict[str, Any] = {"not_before": later(delay)} if delay else {}
        if failed:
            columns["attempts"] = F("attempts") + 1
        columns |= {
            "status": status,
            "blocked_reason": why,
            "lease_owner": "",
            "lease_expires_at": None,
            "lease_epoch": F("lease_epoch") + 1,
            "updated_at": clock.now(self.alias),
        }
        alias = own_alias(self.alias)
        mine, read = self.held(alias), Session.objects.using(alias).filter(pk=self.session_id)

        def give_back() -> bool:
            # The session first, as a service locks it before it changes the run.
            if next_seq is not None and not read.filter(next_seq=next_seq).update(next_seq=next_seq):
                return False
            mine.update(**columns)
            return True

        if not in_transaction(alias, give_back):
            self.ending = False
            return False
        rows = Message.objects.using(alias).own().filter(run_id=self.run_id)
        if delay and rows.filter(kind=events.RUN_CANCEL_REQUESTED).exists():
            released = Run.objects.using(alias).filter(pk=self.run_id, lease_epoch=self.epoch + 1)
            released = released.filter(status=Run.Status.QUEUED)  # a cancel during our lease closed no run
            in_transaction(alias, lambda: released.update(not_before=None))
        return True


def claim(alias: str, run_id: UUID, agent: str = "") -> Lease | None:
    """Lease a run; None if it is not `claimable` now, for example because another process drives it.

    None also if `agent`, the run's, has a limit of runs at once that is reached.
    """
    owner, before, own = uuid7().hex, uptime(), own_alias(alias)
    seconds = settings.LEASE_SECONDS

    def again() -> Claimed | None:
        # The first try may still be open on the server, and its acknowledgement be lost: wait for its end.
        runs = Run.objects.using(own).filter(pk=run_id)
        list(runs.select_for_update().values_list("pk"))
        mine = runs.filter(lease_owner=owner).values_list("session_id", "lease_epoch", "attempts").first()
        if mine or turns.is_full(own, agent):
            return (*mine, True) if mine else None
        return claim_one(claimable(own).filter(pk=run_id), owner, seconds)

    try:
        if turns.limit_of(agent):
            taken = in_transaction(own, again)
        else:
            taken = claim_one(claimable(own).filter(pk=run_id), owner, seconds)
    except RACES:
        close_stale(own)
        taken = in_transaction(own, again)
    return None if taken is None else Lease(alias, run_id, *taken, before + seconds, owner=owner)


def claimable(alias: str) -> RunQuerySet:
    """Select the runs this process may claim: none while it drains, or while the timeline is not as noted."""
    free = ~Exists(drain_requests(alias)), ~Exists(timeline.moved(alias))
    return Run.objects.using(alias).runnable().filter(*free)


def take(alias: str, run_id: UUID, *, by_force: bool = False) -> int:
    """Take the free lease of an unfinished run for a service, in the open transaction.

    Returns the new epoch, or 0 if the lease is not free or the run has ended. Unlike `claim`, takes the lease
    of a waiting run, too; with `by_force`, also the lease of a live worker. Because the epoch is new, the
    next append of an earlier worker is refused.
    """
    runs = Run.objects.using(alias).unfinished().filter(pk=run_id)
    taken = (runs if by_force else runs.filter(FREE)).update(
        lease_owner=SERVICE,
        lease_epoch=F("lease_epoch") + 1,
        lease_expires_at=later(settings.LEASE_SECONDS),
    )
    return Run.objects.using(alias).values_list("lease_epoch", flat=True).get(pk=run_id) if taken else 0


def extend_all(alias: str, leases: Collection[Lease]) -> tuple[set[Lease], set[Lease]]:
    """Extend leases by one UPDATE; return the set of extended leases and the set of lost leases.

    The UPDATE skips the locked rows of runs, so that it need not wait. Their leases are in neither set.
    """
    keys = {(each.run_id, each.epoch, each.owner): each for each in leases}
    names = "pk", "lease_epoch", "lease_owner"
    mine = Q(*(Q(**dict(zip(names, key, strict=True))) for key in keys), _connector=Q.OR)
    runs = Run.objects.using(alias).filter(mine, status=Run.Status.RUNNING).order_by()
    extended = extend_many(runs.values_list(*names), settings.LEASE_SECONDS)
    held = extended if len(extended) == len(keys) else {*runs.values_list(*names)}
    return {keys[key] for key in extended}, {keys[key] for key in {*keys} - held}


class Keeper:
    """Extends leases every HEARTBEAT_SECONDS, in one thread, which ends when no lease is left.

    One UPDATE on the keeper's own connection extends all leases of a database. The keeper stops to extend a
    lease after the lease's time `due`. It sets the lease's event `cancelled` if a cancel was requested.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._leases: dict[int, tuple[Lease, State]] = {}  # by id() of the lease
        self._thread: threading.Thread | None = None
        self._until = 0.0  # the time (of `uptime`) of the next beat
        self._is_connected = False

    @contextmanager
    def keeping(self, lease: Lease) -> Iterator[None]:
        """Extend a lease regularly until the end of the block; inside a TestCase, do nothing."""
        if connections[lease.alias].in_atomic_block:  # another connection would see nothing
            yield
            return
        lease.beats_at = uptime() + settings.HEARTBEAT_SECONDS
        try:
            with self._lock:
                self._leases[id(lease)] = lease, state_of(lease.alias)
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._run, name="agentruns-keeper", daemon=True)
                    self._thread.start()
                elif lease.beats_at < self._until:
                    self._wake.set()
            yield
        finally:
            with self._lock:
                self._leases.pop(id(lease), None)  # a forked process has none
                thread = None if self._leases or not self._is_connected else self._thread
            if thread is not None:  # so that no connection is left open, as at the end of a test
                self._wake.set()
                until = uptime() + PATIENCE
                while thread.is_alive() and not self._leases and uptime() < until:  # else it keeps another
                    thread.join(LOOK)

    def beat(self, lease: Lease) -> None:
        """Let the keeper extend a lease at once, and with it all the others."""
        lease.beats_at = 0.0
        self._wake.set()

    def _run(self) -> None:
        """Extend all leases, each time the earliest `beats_at` has come, until no lease is left."""
        with ExitStack() as own:
            own.callback(connections.close_all)  # after `own_connection` has ended
            while True:
                with self._lock:
                    leases = [*self._leases.values()]
                    if not leases:
                        self._thread, self._is_connected = None, False
                        return
                    now, self._until = uptime(), min(lease.beats_at for lease, _ in leases)
                if now < self._until:
                    self._wake.wait(self._until - now)
                    self._wake.clear()
                    continue  # other leases may have come, and some may have gone
                for place in {(lease.alias, state) for lease, state in leases}:
                    mine = [lease for lease, state in leases if (lease.alias, state) == place]
                    self._extend(*place, mine, own)

    def _extend(self, alias: str, state: State, leases: list[Lease], own: ExitStack) -> None:
        """Extend the leases of one database and `state`, such as a tenant; mark lost and cancelled ones."""
        began, seconds, moving = uptime(), settings.HEARTBEAT_SECONDS, list[Lease]()
        for lease in leases:
            lease.beats_at = began + seconds
            was_stalled, lease.is_stalled = lease.is_stalled, began >= lease.due
            if not lease.is_stalled and not lease.lost.is_set():
                moving.append(lease)
            elif lease.is_stalled and not was_stalled:  # a tool or a model hangs: others may have the run
                with bound(lease.run_id, lease.epoch):
                    text = "No progress, the lease is left to expire run=%s epoch=%s"
                    logger.warning(text, lease.run_id, lease.epoch)
        if not moving:
            return
        try:
            with carried(alias, state):
                self._is_connected = True
                if own_alias(alias) == alias:  # not at each beat, which the stack would remember
                    own.enter_context(own_connection(alias, pooled=False))
                keep(connections[own_alias(alias)], state)
                extended, lost = extend_all(own_alias(alias), moving)
                rows = Message.objects.using(own_alias(alias)).own()
                ids = [lease.run_id for lease in extended]
                requests = rows.filter(kind=events.RUN_CANCEL_REQUESTED, run_id__in=ids)
                cancelled = set(requests.values_list("run_id", flat=True))
        except Exception as error:  # busy or unreachable is not lost
            is_known = isinstance(error, DatabaseError | InterfaceError | JournalLockedError)
            level, runs = logging.INFO if is_known else logging.ERROR, [str(lease.run_id) for lease in moving]
            logger.log(level, "Heartbeat missed runs=%s", runs, exc_info=True)
            connections[own_alias(alias)].close()
            for lease in moving:
                lease.beats_at = began + seconds / SOONER
            return
        for lease in moving:
            if lease in extended:
                lease.deadline = max(lease.deadline, began + settings.LEASE_SECONDS)
                if lease.run_id in cancelled:
                    lease.cancelled.set()
            elif lease not in lost:  # its row is locked, most often by an append, which extends it
                lease.beats_at = began + seconds / SOONER
            else:
                lease.lost.set()
                if id(lease) in self._leases and not lease.ending:
                    with bound(lease.run_id, lease.epoch):
                        logger.warning("Lease lost run=%s epoch=%s", lease.run_id, lease.epoch)


keeper = Keeper()
in_child(keeper.__init__)  # type: ignore[misc]


def last_request(alias: str) -> datetime:
    """Read the time of the last request to drain; NEVER if there is none."""
    stamps = Control.objects.using(alias).filter(name=Control.DRAINING).values_list("seen_at", flat=True)
    return stamps.first() or NEVER


def request_at_start(alias: str) -> datetime:
    """Find the time of the last request to drain that this process does not obey.

    This is the last request at the process's first query. `is_draining` changes the time if the stored
    request was lost, or if a newer request came.
    """
    name = alias.removesuffix(OWN), schema_of(alias)
    return _at_start[name] if name in _at_start else _at_start.setdefault(name, last_request(alias))


def drain(alias: str) -> None:
    """Request all running processes to claim no more runs, and to stop driving after the current step."""

    def stamp() -> None:
        # Later than the request before, whatever the clock says: stamps are compared with stamps only.
        at = max(database_now(alias), last_request(alias) + timedelta(milliseconds=1))
        Control.objects.using(alias).put(name=Control.DRAINING, seen_at=at)

    in_transaction(alias, stamp)


def driven_runs(alias: str) -> dict[UUID, int]:
    """Map the runs that are being driven now to the epochs of their leases."""
    return dict(Run.objects.using(alias).live().values_list("pk", "lease_epoch"))


def drain_requests(alias: str) -> QuerySet[Control]:
    """Select the request to drain if this process has to obey it."""
    return Control.objects.using(alias).filter(name=Control.DRAINING, seen_at__gt=request_at_start(alias))


def is_draining(alias: str) -> bool:
    """Check whether this process was requested to drain."""
    known, last = request_at_start(alias), last_request(alias)
    if last != known:
        # Earlier than known: the database was restored, or a replica took over that lacks the request.
        # Later: NEVER makes this process obey the request even after such a loss.
        _at_start[alias.removesuffix(OWN), schema_of(alias)] = last if last < known else NEVER
    return last > known


def why_off(alias: str, kind: str, name: str, schema: str | None = None) -> str:
    """Explain who switched an "agent" or a "tool" off, and why; "" if it is on.

    A process queries the switches every `DRAIN_CHECK_SECONDS`. If the query fails, the last result
    counts, and the next call of this function queries again. `schema` is that of the connection, if known.
    """
    place = alias, schema_of(own_alias(alias)) if schema is None else schema
    asked, off = _switches.get(place, (-DRAIN_CHECK_SECONDS, dict[str, Control]()))
    if uptime() - asked >= DRAIN_CHECK_SECONDS:
        with suppress(DatabaseError, InterfaceError):  # the drive itself deals with that
            off = Control.objects.using(own_alias(alias)).switches().in_bulk()
            _switches[place] = uptime(), off
    switch = off.get(f"off:{kind}:{name}")
    if switch is None:
        return ""
    return f"The {kind} {name!r} is switched off by {switch.actor or 'the program'}: {switch.reason}"


def forget_switches() -> None:
    """Make the next `why_off` query the database, because this process has changed a switch."""
    _switches.clear()


class DrainCheck:
    """A function that checks whether a drive must stop after the current step.

    The drive must stop if `should_stop` returns True, if this process drains, or while the agent is off.
    Queries the request to drain every `DRAIN_CHECK_SECONDS`.
    """

    def __init__(self, alias: str, should_stop: Callable[[], bool] = lambda: False, agent: str = "") -> None:
        self.alias = alias
        self.agent = agent
        self.schema = schema_of(own_alias(alias))
        self.should_stop = should_stop
        self.is_draining = False
        self.looked = uptime()  # the claim has just looked: a draining process cannot claim

    def __call__(self) -> bool:
        if self.should_stop() or (self.agent and why_off(self.alias, "agent", self.agent, self.schema)):
            return True
        if not self.is_draining and uptime() - self.looked >= DRAIN_CHECK_SECONDS:
            self.looked = uptime()
            with suppress(DatabaseError, InterfaceError):  # the drive itself deals with that
                self.is_draining = is_draining(own_alias(self.alias))
        return self.is_draining
