"""The keeper: one thread of a process that extends the leases of all runs that the process drives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from django.db import DatabaseError, InterfaceError, connections

from agentruns.conf import settings
from agentruns.engine.leases import Lease, extend_all
from agentruns.exceptions import JournalLockedError
from agentruns.journal import events
from agentruns.journal.connection import own_alias, own_connection
from agentruns.models import Message
from agentruns.utils.carry import State, carried, keep, state_of
from agentruns.utils.db import uptime
from agentruns.utils.forks import in_child
from agentruns.utils.redaction import bound, get_logger

logger = get_logger("agentruns.leases")

PATIENCE = 5.0  # seconds that the last drive waits for the keeper's connection to be closed
LOOK = 0.05  # seconds between two looks whether another drive needs the keeper meanwhile
SOONER = 8  # a lease that could not be extended is tried again after this part of HEARTBEAT_SECONDS


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
