"""The driver of one run: its lease, its folded state, and the commit that stores rows under this lease."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from functools import cache, cached_property, partial
from typing import Any, NoReturn

from django.db import DatabaseError, InterfaceError, InternalError, OperationalError, connections

from agentruns.agents.agent import Agent
from agentruns.conf import settings
from agentruns.engine.leases import Lease, keeper
from agentruns.exceptions import (
    JournalConflictError,
    JournalRewoundError,
    JournalUnreadableError,
    LeaseLostError,
    NotFoundError,
)
from agentruns.journal import events, telemetry
from agentruns.journal.batch import MOST_SEEN, Batch, LastRow, SessionState, seen_committed
from agentruns.journal.connection import journal_alias, mend_connection, own_alias
from agentruns.journal.events import Actor
from agentruns.journal.fold import Call, RunState
from agentruns.journal.payloads import Offload, instructions_of
from agentruns.journal.policy import user_of_key
from agentruns.journal.store import Store, commit_again
from agentruns.models import Message, Run
from agentruns.tools import Tool, ToolContext
from agentruns.tools.excerpts import Bounds
from agentruns.utils import clock
from agentruns.utils.carry import schema_of
from agentruns.utils.db import cannot_pass, close_stale, is_in_test_case, uptime
from agentruns.utils.lanes import Lane
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.driver")

# Errors of the database's circumstances, which may pass: unreachable, locked, read-only, out of space.
PASSING = (OperationalError, InterfaceError, InternalError)
SAME_STATE_RETRIES = 10
extending = Lane("agentruns-lease", threads=8)


@dataclass(eq=False)
class Driver:
    """The drive of one run in this process; `lease` is None for a stateless run."""

    agent: Agent
    store: Store
    state: SessionState
    _: KW_ONLY
    lease: Lease | None = None
    session_key: str | None = None
    should_stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        lease = self.lease
        self.schema = schema_of(own_alias(lease.alias)) if lease else ""  # stays for the drive
        self.attempts = lease.attempts if lease else 0
        self.last_error = ""  # of the drive before, if that failed
        self.released = False
        self.started: set[tuple[str, int]] = set()  # (call, attempt) journaled here, handler not entered yet
        # Handlers that this drive no longer waits for, by call and attempt.
        self.abandoned: dict[tuple[str, int], Future[Any]] = {}
        self.charged: list[int] = []  # rows of Spending that the request in progress counts toward
        self.ready: set[Any] = set()  # `ready` functions that had no objection in this drive
        self.caller: Any = None
        self.asked_about: set[tuple[str, int]] = set()  # (call, attempt) started before a caller's resume
        self.before = self.state.run  # the last state that is known to be stored
        self._acknowledge()

    @property
    def run(self) -> RunState:
        """The run's state with the rows of the last batch, even while that batch is not stored yet."""
        return self.state.run

    @cached_property
    def tools(self) -> dict[str, Tool]:
        """The agent's tools by name, or only the tools that were chosen for the run."""
        chosen = self.agent.tools if self.agent.tools_for is None else self.run.tools or ()
        return {name: tool for name, tool in self.agent.tools.items() if name in chosen}

    @cached_property
    def tool_schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools as the provider receives them."""
        return [tool.provider_schema() for tool in self.tools.values()]

    @cached_property
    def bounds(self) -> Bounds:
        """The bounds of the results in this run's requests."""
        return Bounds.of_tools(self.agent.tools, self.tools)

    @cached_property
    def instructions(self) -> str:
        """The agent's instructions, or those made for the run; raises PayloadError if they are unreadable."""
        declared = self.agent.instructions
        return declared if isinstance(declared, str) else instructions_of(self.run)

    @property
    def alias(self) -> str:
        """The alias of the journal's database."""
        return self.lease.alias if self.lease else settings.DATABASE

    def now(self) -> datetime:
        """Read the time from the journal's clock."""
        return clock.now(self.lease.alias if self.lease else None)

    def is_cancelled(self, call_id: str, attempt: int) -> bool:
        """Check whether a handler should stop: its run is cancelled or taken over, or its time is over."""
        if (call_id, attempt) in self.abandoned or self.released:
            return True
        lease = self.lease
        if lease is None:
            return False
        expired = uptime() >= max(lease.due, lease.deadline)  # it hung, and another worker may have the run
        return expired or lease.lost.is_set() or lease.cancelled.is_set()

    def heartbeat(self, call_id: str, attempt: int) -> None:
        """Let the lease be extended for another TOOL_TIMEOUT seconds, unless the attempt was given up."""
        if self.lease is not None and (call_id, attempt) not in self.abandoned:
            self.lease.allow(settings.TOOL_TIMEOUT)
            keeper.beat(self.lease)

    def context(self, call_id: str, tool_name: str, call: Call | None = None) -> ToolContext:
        """Build the context for a tool's function; there is no `call` yet when `requires_approval` runs."""
        attempt = call.attempt if call else 0
        return ToolContext(
            run_id=str(self.run.run_id),
            session_key=self.run.parent.get("deferred") or self.session_key,
            call_id=call_id,
            tool_name=tool_name,
            attempt=attempt,
            idempotency_key=call.idempotency_key(self.run.task) if call else "",
            scope=self.run.scope,
            context=deepcopy(self.run.context),
            actor=self.run.actor,
            approved_by=tuple(call.approval.names) if call and call.approval else (),
            _user=None if self.run.owner is None else cache(partial(user_of, self.run.owner)),
            _is_cancelled=partial(self.is_cancelled, call_id, attempt),
            _heartbeat=partial(self.heartbeat, call_id, attempt),
            _result=lambda id: self.state.conversation.result(id, self.bounds.readable),
            _covers=partial(self.covers, call),
        )

    def covers(self, call: Call | None, *, extend: bool = False) -> bool:
        """Check whether the worker may still act on a call; True if there is no call.

        False if the call was given up, or if the lease is lost or over. Without `extend` this needs no query,
        because a query could outlast the lease. With `extend`, first tries to extend the lease in the
        database if less than half of it is left. A transactional tool is not extended then: it needs only a
        lease that is not known to be lost, because its transaction is rolled back if the lease is lost.
        """
        lease = self.lease
        if call is None:
            return True
        if extend and lease is not None and self.agent.tools[call.tool].transactional:
            return not lease.lost.is_set()
        if extend and lease is not None and uptime() >= lease.deadline - settings.LEASE_SECONDS / 2:
            # In another thread: a handler may be async, or have a transaction open on its connection.
            with suppress(LeaseLostError, TimeoutError, DatabaseError, InterfaceError):
                lease.extend() if is_in_test_case() else extending(lease.extend, settings.LEASE_SECONDS)
        given_up = self.released or (call.id, call.attempt) in self.abandoned
        return not given_up and (lease is None or (not lease.lost.is_set() and uptime() < lease.deadline))

    def offload(self, call: Call) -> Offload | None:
        """Build the Offload for a large result of the call's attempt; None for a stateless run."""
        return None if self.lease is None else Offload(f"{self.lease.session_id}/{call.id}-{call.attempt}")

    def mend(self) -> None:
        """Roll back a transaction left open by user code, because its locks could block the journal."""
        if self.lease is not None:
            mend_connection(self.alias)

    def hold_lease(self) -> None:
        """Extend the lease if its time is over or it may be lost; raises LeaseLostError if it is lost."""
        self.mend()
        if self.lease is not None and (self.lease.lost.is_set() or uptime() >= self.lease.deadline):
            self.lease.extend()

    def allow(self, tool: Tool) -> None:
        """Let the keeper extend the lease for the tool's timeout, or without limit if transactional."""
        if self.lease is not None:
            # A transaction that outlives its lease is rolled back, so taking the run over would gain nothing.
            self.lease.allow(math.inf if tool.transactional else tool.timeout or settings.TOOL_TIMEOUT)

    def commit(self, build: Callable[[Batch], None], *, joined: bool = False) -> Batch:
        """Fill a batch with `build` and store it; repeat until it is stored or the lease is lost.

        `build` may run several times, each time on the newest state, and must only add rows. If it adds none,
        nothing is stored. `joined` appends inside the transaction of a transactional tool; the caller rolls
        back after an error. After an error that may pass, a batch with a reply or a result is tried without
        limit, and others for the length of a lease. Raises LeaseLostError, and errors of the database that no
        repetition can clear.
        """
        tried: list[Batch] = []
        tries, began = 0, uptime()
        give_up = began + settings.LEASE_SECONDS
        while True:
            if self.lease is not None and self.lease.lost.is_set():
                raise LeaseLostError(f"Run {self.run.run_id} went on without epoch {self.lease.epoch}.")
            epoch, owner = (self.lease.epoch, self.lease.owner) if self.lease else (0, "")
            batch = Batch(self.state, epoch, owner=owner, local=self.lease is None)
            try:
                build(batch)  # which may ask the database for the time
                if not batch.rows:
                    return batch
                tried.append(batch)
                if not joined:
                    self.mend()
                if self.lease is not None:
                    self.lease.ending = batch.releases
                self.store.append(batch, durable=not joined)
                break
            except (JournalConflictError, DatabaseError, InterfaceError) as error:
                if joined and not isinstance(error, JournalConflictError):
                    raise
                logger.info("Append refused run=%s: %s", self.run.run_id, error)
                stored = self.reread(tried, patient=batch.progressed, give_up=give_up)
                if stored is not None:
                    batch = stored
                    break
                tries = tries + 1 if self.state.next_seq == batch.first_seq else 0
                passing = isinstance(error, PASSING) and (batch.progressed or uptime() < give_up)
                if cannot_pass(error) or (tries > SAME_STATE_RETRIES and not passing):
                    raise
                if tries and not joined:
                    time.sleep(min(0.02 * 2 ** min(tries, 7), 2.0))
        self._stored(batch, began)
        if not joined:
            self._acknowledge()
        return batch

    def reread(self, tried: list[Batch], *, patient: bool, give_up: float) -> Batch | None:
        """Rebuild the state from the database; return the batch in `tried` that was stored in fact, or None.

        With `patient`, waits for an unreachable database without limit, so that an outage loses no known
        result and no paid reply; otherwise until `give_up`. Inside a transaction an error is raised at once.
        Raises LeaseLostError, JournalRewoundError, and LookupError for a stateless run.
        """
        lease, pause = self.lease, 0.05
        if lease is None:
            raise LookupError(f"Run {self.run.run_id} is stateless; nothing of it was stored.")
        alias = journal_alias(lease.alias)
        hashes = {batch.rows[0].hash: batch for batch in tried}
        while True:
            try:
                close_stale(alias)
                self.state = self.store.load(lease.session_id, lease.run_id)
                if self.state.is_rewound:
                    self._rewound(lease)
                # All of them: the server may commit a transaction long after its connection broke.
                rows = Message.objects.using(alias).filter(session_id=lease.session_id, hash__in=hashes)
                stored = next((hashes[each] for each in rows.values_list("hash", flat=True)), None)
                if stored is not None and stored.first_seq >= self.state.next_seq:  # committed after the load
                    self.state = self.store.load(lease.session_id, lease.run_id)
                columns = Run.objects.using(alias).values_list("lease_epoch", "lease_owner", "status")
                epoch, owner, status = columns.get(pk=lease.run_id)
                if epoch < lease.epoch:  # the claim itself is gone
                    self._rewound(lease)
                is_other = (epoch, owner) != (lease.epoch, lease.owner or owner)
                if (is_other or status in Run.ENDED) and (stored is None or not stored.releases):
                    lease.lost.set()  # even if it is stored, because the state may be that of a later reply
                if stored is not None:
                    commit_again(connections[alias], lease.session_id)  # before a handler relies on it
                    telemetry.stored(stored, alias)
                elif lease.lost.is_set():
                    raise LeaseLostError(
                        f"Run {lease.run_id} is {status} at epoch {epoch}; this process drove epoch "
                        f"{lease.epoch}."
                    )
                return stored
            except PASSING:
                inside = connections[lease.alias].in_atomic_block  # a broken block never heals
                if inside or (not patient and uptime() > give_up):
                    raise
                logger.warning("Database unreachable run=%s; trying again", lease.run_id, exc_info=True)
                time.sleep(pause)
                pause = min(2 * pause, 2.0)

    def _rewound(self, lease: Lease) -> NoReturn:
        lease.lost.set()
        raise JournalRewoundError(
            f"Run {lease.run_id}: the database lost rows that this process had seen committed. The run is "
            "held for staff; see docs/databases.md, 'Rows that vanish'."
        )

    def is_rewound(self) -> bool:
        """Check in the journal whether a row that this process saw committed is gone; False if unreadable."""
        lease = self.lease
        with suppress(JournalUnreadableError):
            return lease is not None and self.store.load(lease.session_id, lease.run_id).is_rewound
        return False

    def _acknowledge(self) -> None:
        """Remember the last row as committed, except inside a transaction, to notice later if it is gone."""
        self.before = self.state.run
        # A TestCase rolls back what its block holds.
        if self.lease is not None and self.state.at and not connections[self.alias].in_atomic_block:
            seen_committed.pop(self.lease.session_id, None)  # so that it is the newest
            last = LastRow(self.state.next_seq - 1, self.state.at, self.state.restored_at)
            seen_committed[self.lease.session_id] = last
            with suppress(RuntimeError):  # another drive of this process added one in this instant
                if len(seen_committed) > MOST_SEEN:
                    seen_committed.pop(next(iter(seen_committed)), None)

    def _stored(self, batch: Batch, sent: float) -> None:
        """Update the drive after a batch was stored; `sent` is the time from which the lease was extended."""
        self.started |= {(row.call_id, row.attempt) for row in batch.rows if row.kind == events.TOOL_STARTED}
        if batch.failed_drive:
            self.attempts += 1
        elif batch.progressed:
            self.attempts, self.last_error = 0, ""
        if self.lease is not None:
            self.lease.deadline = sent + settings.LEASE_SECONDS
            self.lease.due = uptime() + settings.TOOL_TIMEOUT  # for the next step
        self.released = batch.releases


def user_of(owner: Actor | None) -> Any:
    """Find the user who owns a run; None for the program. Raises NotFoundError if the user is gone."""
    if owner is None:
        return None
    user = user_of_key(owner["id"])
    if user is None:
        raise NotFoundError(f"The user {owner['name']!r} whose run it is, is not there any more.")
    return user
