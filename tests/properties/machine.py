"""The world around random runs, and what has to be true of it after every step."""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Self
from uuid import UUID

import pytest

from agentruns import ToolContext, tool
from agentruns.conf import settings
from agentruns.engine.driver import Driver
from agentruns.engine.gate import call_digest
from agentruns.engine.leases import Lease, keeper
from agentruns.engine.loop import drive
from agentruns.engine.worker import advance
from agentruns.exceptions import DurableConfigMismatchError, ToolDurabilityError
from agentruns.journal.connection import journal_alias, own_alias
from agentruns.journal.store import Batch, DatabaseStore, load
from agentruns.journal.verify import problems
from agentruns.models import Approval, Event, Message, Run, Session
from agentruns.providers.base import Disposition, ModelRequest, ProviderError
from agentruns.services.sweep import sweep
from agentruns.testing import InvalidMessages, ScriptedModel, check_messages
from agentruns.tools import Tool
from agentruns.utils.db import uptime
from tests.db.helpers import GO_ON
from tests.effects import Effects
from tests.properties.faults import Unwell, Worker, at_each_point
from tests.shop.agents import TOOLS, act
from tests.shop.models import Order


@tool(transactional=True)
def book(ctx: ToolContext) -> str:
    """Write an order that says which call wrote it."""
    Order.objects.create(number=secrets.token_hex(10), customer=ctx.call_id, total_cents=1)
    return "booked"


@tool(requires_approval=True, approvals=2)
def wire(ctx: ToolContext, cents: int) -> str:
    """Wire money, if two people agree."""
    return act("wire", ctx, cents=cents)


@tool
def mumble(ctx: ToolContext) -> str:
    """Act, and not know whether it did."""
    act("mumble", ctx)
    raise ToolDurabilityError("the line is bad")


@tool(name="post", safe_to_retry=True)
def post_again(ctx: ToolContext, text: str) -> str:
    """Post to the channel, as often as you like."""
    return act("post", ctx, text=text)


OLD_TOOLS = [*TOOLS, book, wire, mumble]
NEW_TOOLS = [post_again, *OLD_TOOLS[1:]]
ACTING = (
    "post",
    "lookup",
    "search",
    "charge",
    "refund",
    "wire",
    "invoice",
)  # they leave a line in the ledger

KEPT = ("tool_result", "late_result", "event_awaited")  # what is stored of a handler that has returned
NOT_EXECUTED = ("denied", "answered", "expired", "cancelled")


class World:
    """What is outside of the database: the provider, the ledger, and the clocks and threads of workers."""

    def __init__(self, patch: pytest.MonkeyPatch, effects: Effects) -> None:
        self.effects = effects
        self.outage: Exception | None = None  # what the provider says to the next request
        self.leases: dict[tuple[str, int], Lease] = {}  # by run and epoch
        self.slept = 0.0  # seconds
        self.entered: list[tuple[str, int]] = []
        self.wrong: list[str] = []
        self.sound: set[tuple[str, ...]] = set()  # what was verified before, by head and statuses
        self.excused = 0  # drives that may fail
        at_each_point(patch, Worker.reached)
        for module in ("driver", "tool_calls", "leases", "handler"):
            patch.setattr(f"agentruns.engine.{module}.uptime", self._uptime)
        patch.setattr("agentruns.services.runs.submit.uptime", self._uptime)
        patch.setattr(keeper, "keeping", self._heartbeat)
        patch.setattr("agentruns.engine.handler.in_thread", _in_this_thread)
        append, invoke, propose = DatabaseStore.append, Tool.invoke, ScriptedModel.propose

        def watched_append(store: DatabaseStore, batch: Batch, **options: Any) -> None:
            _reach("before", batch)
            append(store, batch, **options)
            self._appended(batch)

        def watched_drive(driver: Driver, **options: Any) -> None:
            if driver.agent.definition_hash != driver.run.definition:
                self.wrong.append("a run was driven under another definition than its own")
            drive(driver, **options)

        def watched_advance(run: Run, alias: str, **options: Any) -> bool:
            try:
                return advance(run, alias, **options)
            except (Unwell, DurableConfigMismatchError):
                self.excused += 1
                raise

        def watched_invoke(tool: Tool, ctx: ToolContext, arguments: dict[str, Any]) -> Any:
            self._entering(tool, ctx, arguments)
            Worker.reached("handler_entered")
            output = invoke(tool, ctx, arguments)
            Worker.provoke("handler")
            worker = Worker.current()
            if worker is not None and not tool.transactional:  # what is rolled back is not known
                worker.returned.append((ctx.call_id, ctx.attempt))
            Worker.reached("handler_left")
            return output

        def watched_propose(model: ScriptedModel, request: ModelRequest) -> Any:
            self._asking(request)
            Worker.provoke("model")
            return propose(model, request)

        patch.setattr(DatabaseStore, "append", watched_append)
        patch.setattr("agentruns.engine.loop.drive", watched_drive)
        patch.setattr("agentruns.services.sweep.advance", watched_advance)
        patch.setattr(Tool, "invoke", watched_invoke)
        patch.setattr(ScriptedModel, "propose", watched_propose)

    def begin(self) -> None:
        """Forget the example before."""
        self.effects.path.unlink(missing_ok=True)
        self.outage = None
        self.leases.clear()
        self.entered.clear()
        self.wrong.clear()

    def break_model(self, how: str) -> None:
        """Let the next request to the model fail, or none."""
        dispositions: dict[str, Disposition] = {"busy": "retry", "no_key": "pause", "bad_request": "fail"}
        if how in dispositions:
            self.outage = ProviderError(how, disposition=dispositions[how], type=how)
        else:
            self.outage = Unwell(how) if how else None

    def sweep(self, **options: Any) -> None:
        """Sweep, and see that no drive fails but by what its model raises, or a deploy meanwhile."""
        before = self.excused
        assert sweep(**options).errors <= self.excused - before, "a drive failed"

    def let_leases_end(self) -> None:
        """Let every worker find, when it looks at its clock again, that it slept through its lease."""
        self.slept += 2 * settings.LEASE_SECONDS

    def _uptime(self) -> float:
        return uptime() + self.slept

    def _heartbeat(self, lease: Lease) -> _NoHeartbeat:
        self.leases[str(lease.run_id), lease.epoch] = lease
        return _NoHeartbeat()

    def _appended(self, batch: Batch) -> None:
        alias = journal_alias("default")  # the thread's own may be one that user code has spoilt
        self.wrong += problems(batch.state.session_id, alias)
        epoch = Run.objects.using(alias).values_list("lease_epoch", flat=True).get(pk=batch.state.run.run_id)
        if batch.epoch and batch.epoch != epoch - batch.releases:
            self.wrong.append(f"epoch {batch.epoch} wrote, the lease is of {epoch}")
        _reach("after", batch)

    def _entering(self, tool: Tool, ctx: ToolContext, arguments: dict[str, Any]) -> None:
        self.entered.append((ctx.call_id, ctx.attempt))
        rows = Message.objects.using(own_alias("default"))
        rows = rows.filter(kind="tool_started", call_id=ctx.call_id, attempt=ctx.attempt)
        started = [row.payload for row in rows]
        secret = Run.objects.using(own_alias("default")).values_list("session__secret", flat=True)
        due = [(ctx.idempotency_key, call_digest(secret.get(pk=ctx.run_id), tool.name, arguments))]
        if [(payload["key"], payload["digest"]) for payload in started] != due:
            self.wrong.append(f"{tool.name} was entered with {arguments}, the journal says {started}")
        leases = [self.leases[ctx.run_id, row.epoch] for row in rows]
        if any(lease.deadline <= self._uptime() for lease in leases):
            self.wrong.append(f"{tool.name} was entered by a worker that slept through its lease")

    def _asking(self, request: ModelRequest) -> None:
        try:
            check_messages(request.messages)
        except InvalidMessages as error:
            self.wrong.append(f"a request that the provider refuses: {error}")
        if self.outage is not None:
            outage, self.outage = self.outage, None
            raise outage


def _reach(when: str, batch: Batch) -> None:
    for kind in dict.fromkeys(row.kind for row in batch.rows):
        Worker.reached(f"{when} {kind}")


class _NoHeartbeat:
    """Time does not pass by itself here, and a thread that is frozen beats no more."""

    def __enter__(self) -> Self:
        Worker.reached("claimed")
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def _in_this_thread(alias: str, tool: Tool, work: Callable[[], Any]) -> Future[Any]:
    """Enter parallel handlers one after the other: what threads do first would not happen again."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


class View:
    """What the database says of the sessions of one example."""

    def __init__(self, prefix: str) -> None:
        self.roots = list(Session.objects.filter(key__startswith=prefix).order_by("key"))
        found = family = Run.objects.filter(session__in=self.roots)
        while found := Run.objects.filter(
            parent__in=list(found)
        ):  # the sessions of child runs have other keys
            family |= found
        self.runs = list(family.order_by("created_at", "pk"))
        self.sessions = list(Session.objects.filter(runs__in=self.runs).distinct().order_by("key"))
        self.unfinished = [run for run in self.runs if not run.is_ended]
        cards = Approval.objects.filter(run__in=self.runs).order_by("requested_at", "pk")
        self.pending = [card for card in cards if card.status == "pending"]
        self.decided = [card for card in cards if card.status != "pending"]
        self.rows: dict[UUID, list[Message]] = defaultdict(list)
        for row in Message.objects.filter(session__in=self.sessions).order_by("session_id", "seq"):
            self.rows[row.run_id].append(row)
        newest = {run.session_id: run.pk for run in self.runs}
        self.states = [load("default", session, run) for session, run in newest.items()]
        self.doubtful = list(self._doubtful())
        self.waits = list(Event.objects.unsettled().filter(run__in=self.runs).order_by("created_at", "pk"))

    def _doubtful(self) -> Iterator[tuple[UUID, str]]:
        """Yield run and call of what staff may give a verdict on."""
        for state in self.states:
            yield from ((state.run.run_id, one.id) for one in state.run.open_calls() if one.orphan == "held")
            yield from ((row.run_id, call) for call, row in state.in_doubt.open.items())


def check(view: View, world: World, known: list[tuple[str, int]]) -> None:
    """Assert what is promised of every session, run, call, approval and effect at any time.

    `known` are the attempts whose result a worker has seen that is alive and not at work any more.
    """
    assert world.wrong == [], world.wrong
    busy = [run.session_id for run in view.unfinished]
    assert len(busy) == len(set(busy)), "two unfinished runs in a session"
    for session in view.sessions:
        stands = (session.head, *(run.status for run in view.runs if run.session_id == session.pk))
        if stands not in world.sound:
            assert problems(session.pk) == []
            world.sound.add(stands)
    for state in view.states:
        if not state.run.open_calls():
            check_messages([*state.conversation.settled_messages(), GO_ON])
    for run in view.runs:
        assert (run.status == "running") == (run.lease_expires_at is not None), run.status
        rows = view.rows[run.pk]
        _requests_are_honoured(rows)
        epochs = [row.epoch for row in rows if row.epoch]
        assert epochs == sorted(epochs), "a zombie wrote"
        _starts_are_approved(rows)
        _attempts_are_justified(rows)
    everything = [row for rows in view.rows.values() for row in rows]
    _effects_are_journaled(everything, world)
    kept = {(row.call_id, row.attempt) for row in everything if row.kind in KEPT}
    assert set(known) <= kept, "a known result was lost"


def _requests_are_honoured(rows: list[Message]) -> None:
    """Nothing starts after a request to cancel or to pause, and nothing but evidence follows the end."""
    stopping, ended = "", ""
    for row in rows:
        is_late = row.kind in ("late_result", "orphan_resolved") or row.payload.get("late")
        assert not ended or is_late, f"{row.kind} after {ended}"
        if row.kind == "tool_started":
            assert not stopping, f"{row.tool_name} started after {stopping}"
        if row.kind in ("run_cancel_requested", "run_pause_requested", "run_paused"):
            stopping = stopping if stopping == "run_cancel_requested" else row.kind
        elif row.kind == "run_resumed" and row.payload.get("unpause") and stopping != "run_cancel_requested":
            stopping = ""
        elif row.kind in ("run_completed", "run_failed", "run_cancelled"):
            ended = row.kind


def _starts_are_approved(rows: list[Message]) -> None:
    """What starts is what enough people approved, and each approval is used once."""
    required: dict[str, int] = {}
    given: dict[str, list[tuple[str, str]]] = defaultdict(list)  # by call: who approved which digest
    used: list[UUID] = []
    for row in rows:
        if row.kind == "approval_requested":
            required[row.call_id] = row.payload["required"]
        elif row.kind == "approval_decided" and row.payload["verb"] == "approve":
            who = (row.payload["actor"] or {"id": ""})["id"]
            given[row.call_id].append((who, row.payload["digest"]))
        elif row.kind == "tool_started":
            used += [row.consumes] if row.consumes else []
            if row.call_id in required:
                digest = row.payload["digest"]
                people = {who for who, seen in given[row.call_id] if seen == digest}
                assert len(people) >= required[row.call_id], f"{row.tool_name} started, approved by {people}"
                assert given[row.call_id][-1][1] == digest, "an edit after it was approved"
                assert bool(row.consumes) == (row.attempt == 1)
    assert len(used) == len(set(used)), "an approval was used twice"


def _attempts_are_justified(rows: list[Message]) -> None:
    """A call whose tool declared nothing starts again only after somebody said that it did not happen."""
    started: dict[str, str] = {}  # by call: what its last attempt declared
    late: set[str] = set()
    for row in rows:
        if row.kind == "tool_started":
            again = started.get(row.call_id)
            assert again != "nothing", f"{row.tool_name} started again, and nobody said that it may"
            started[row.call_id] = row.payload["declares"]
        elif row.kind == "tool_result":
            started.pop(row.call_id, None)
        elif row.kind == "late_result" and not row.payload.get("is_error"):
            late |= set() if row.payload.get("never_entered") else {row.call_id}
        elif row.kind == "orphan_resolved" and row.payload["verdict"] == "not_occurred":
            if row.call_id in started and row.payload["channel"] == "service":
                assert row.call_id not in late, "said not to have happened, against the evidence"
            if row.call_id in started:
                started[row.call_id] = "resolved"


def _effects_are_journaled(rows: list[Message], world: World) -> None:
    starts = [row for row in rows if row.kind == "tool_started"]
    results = {row.call_id: row for row in rows if row.kind == "tool_result"}
    begun = {(row.call_id, row.attempt) for row in starts}
    assert len(world.entered) == len(set(world.entered)), "an attempt was entered twice"
    assert set(world.entered) <= begun, "a handler was entered without its row"
    lines = [(line["key"], line["attempt"]) for line in world.effects.lines()]
    assert len(lines) == len(set(lines)), "an attempt acted twice"
    assert set(lines) <= {(row.payload["key"], row.attempt) for row in starts}
    resolved = [row for row in rows if row.kind == "orphan_resolved"]
    verdicts = Counter(row.call_id for row in resolved if row.payload["verdict"] == "not_occurred")
    _at_most_once(starts, verdicts, Counter(key for key, _ in lines))
    acted, booked = {key for key, _ in lines}, Counter(Order.objects.values_list("customer", flat=True))
    for row in starts:
        result = results.get(row.call_id)
        outcome = result.payload["outcome"] if result else ""
        did = row.payload["key"] in acted
        if row.tool_name == "book":
            assert booked[row.call_id] == (outcome == "ok"), "a transactional tool did not act exactly once"
        elif outcome == "ok" and row.tool_name in ACTING and result and "actor" not in result.payload:
            assert did, f"{row.tool_name} is said to be done and was not"
        elif outcome in NOT_EXECUTED and not verdicts[row.call_id]:
            assert not did, f"{row.tool_name} is said to be {outcome}, and it acted"


def _at_most_once(starts: list[Message], verdicts: Counter[str], acted: Counter[str]) -> None:
    declared: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in starts:
        declared[row.call_id, row.payload["key"]].add(row.payload["declares"])
    for (call_id, key), declares in declared.items():
        if declares == {"nothing"}:
            assert acted[key] <= 1 + verdicts[call_id], "a tool that declares nothing acted twice"
