"""Replays of the model's traces on the real engine: the same actions, and the same to be seen after each."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db.models.functions import Now

from agentruns import (
    NotOccurred,
    Occurred,
    Pending,
    ToolContext,
    Unknown,
    approve,
    cancel_run,
    deliver_event,
    deny,
    resolve_orphan,
    resume_run,
    start_run,
    stop_waiting,
    tool,
)
from agentruns.conf import settings
from agentruns.engine.worker import advance
from agentruns.journal.verify import problems
from agentruns.models import Approval, Event, Message, Run
from agentruns.services.approvals.decisions import expire_due
from agentruns.services.events import settle_due
from agentruns.testing import EffectsLedger
from agentruns.tools import Tool as RealTool
from tests.db.helpers import kill, run_out
from tests.model.explore import rows_of
from tests.model.processes import Process
from tests.model.runs import Row, Tool
from tests.model.world import NO_EVENTS, Event as ModelEvent, Scenario, Step, World
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

VERBS = {"approve": "approved", "deny": "denied", "expire": "expired"}
NUMBERS = itertools.count()


def real_tool(model: Tool) -> RealTool:
    """Declare a tool of the engine that does what a tool of the model does."""
    name = "_".join(
        [model.declares, *(word for word in ("gated", "parallel", "awaits") if getattr(model, word))]
    )

    def handler(ctx: ToolContext, place: int) -> str | Pending:
        """Act once."""
        if model.declares == "transactional":
            Order.objects.create(number=secrets.token_hex(10), customer=ctx.call_id, total_cents=1)
            return "done"
        if model.declares == "nothing":
            Process.stop("act")
        EffectsLedger.from_environment().record(ctx.idempotency_key, place=place)
        if model.awaits:
            key = ctx.session_key if model.awaits == "other" else None
            return Pending(key=key, timeout=timedelta(days=1))
        return "done"

    def ask(ctx: ToolContext, args: dict[str, object]) -> Occurred | NotOccurred | Unknown:
        if not model.sure:
            return Unknown("nobody knows")
        happened = EffectsLedger.from_environment().count(ctx.idempotency_key)
        return Occurred("done") if happened else NotOccurred()

    options: dict[str, Any] = {"requires_approval": True} if model.gated else {}
    options |= {"parallel": True} if model.parallel else {}
    options |= {"awaits": "payment"} if model.awaits else {}
    options |= {
        "nothing": {}, "retry": {"safe_to_retry": True}, "reconcile": {"reconcile": ask},
        "transactional": {"transactional": True},
    }[model.declares]  # fmt: skip
    made: RealTool = tool(name=name, **options)(handler)
    return made


@dataclass
class Replay:
    """One trace on the engine."""

    scenario: Scenario
    effects: EffectsLedger
    said: list[str] = field(default_factory=list)  # the steps so far

    def __post_init__(self) -> None:
        self.processes = [Process() for _ in range(self.scenario.drivers)]
        self.places = [""] * self.scenario.drivers
        self.deliverer, self.post = Process(), ""
        tools = {made.name: made for made in map(real_tool, self.scenario.tools)}
        names = [real_tool(each).name for each in self.scenario.tools]
        calls = [call(name, place=place) for place, name in enumerate(names)]
        self.key = key = f"model-{next(NUMBERS)}"
        shop_agent(key, {"tools": calls}, tools=[*tools.values()])
        self.effects.path.unlink(missing_ok=True)
        Order.objects.all().delete()
        self.calls: list[str] = []
        self.run = start_run(key, "do it", key)
        self.seq = Message.objects.filter(run_id=self.run.pk).count()

    def follow(self, trace: list[Step]) -> None:
        """Do each step, and compare what can be seen after it."""
        try:
            for step in trace:
                self.said.append(f"{len(self.said) + 1}. {step.text}{rows_of(step)}")
                self._do(step)
                self._compare(step)
            assert problems(self.run.session_id) == []
        finally:
            for number, process in enumerate(self.processes):
                if self.places[number]:
                    process.die()
            if self.post:
                self.deliverer.die()

    def _do(self, step: Step) -> None:
        if step.number >= 0:
            process = self.processes[step.number]
            if step.what == "dies":
                process.die()
                self.places[step.number] = ""
            elif step.what in ("claims", "takes over"):
                self.places[step.number] = process.begin(lambda: advance(self._now(), "default"))
            else:
                self.places[step.number] = process.go()
            return
        ACTIONS[step.what](self, step)

    def _now(self) -> Run:
        return Run.objects.select_related("session").get(pk=self.run.pk)

    def _compare(self, step: Step) -> None:
        world, where = step.world, "\n".join(self.said)
        rows = [_row(row, self._calls()) for row in self._new_rows() if row.kind != "approval_extended"]
        assert rows == [_told(row) for row in step.rows], where
        status = Run.objects.values_list("status", flat=True).get(pk=self.run.pk)
        assert status == self.scenario.status_of(world), where
        places = ["doubt" if driver.at == "unsure" else driver.at for driver in world.drivers]
        assert self.places == places, where
        acted = Counter(line["place"] for line in self.effects.lines())
        if any(each.declares == "transactional" for each in self.scenario.tools):
            acted.update(self._calls().index(each.customer) for each in Order.objects.all())
        assert [acted[place] for place in range(len(world.tolls))] == [t.effects for t in world.tolls], where
        if self.scenario.waiter >= 0:
            assert self.post == world.post[0], where
            assert [self._event(key) for key in range(2)] == [_seen(event) for event in world.events], where

    def key_of(self, which: int) -> str:
        """Find the key of an event: the call's own, or that of its handler."""
        if which == 1:
            return self.key
        rows = Message.objects.filter(run_id=self.run.pk, call_id=self.call_id(self.scenario.waiter))
        return next((row.payload["key"] for row in rows.filter(kind="tool_started")), "none yet")

    def _event(self, which: int) -> tuple[bool, ...]:
        if which == 0 and not self._calls():
            return _seen(NO_EVENTS[0])
        event = Event.objects.filter(name="payment", key=self.key_of(which)).first()
        if event is None:
            return _seen(NO_EVENTS[0])
        return True, event.run_id is not None, event.delivered_at is not None, event.settled_at is not None

    def deliver(self, which: int) -> None:
        """Let a deliverer look for the waiter of an event."""
        key = self.key_of(which)
        self.post = self.deliverer.begin(lambda: deliver_event("payment", key, "paid"))

    def go_on_delivering(self) -> None:
        """Let the deliverer do its next step."""
        self.post = self.deliverer.go()

    def event_is_due(self, which: int) -> None:
        """Let the time of an event be over."""
        its_row = Event.objects.filter(name="payment", key=self.key_of(which))
        assert its_row.update(due_at=Now() - timedelta(seconds=1)) == 1

    def _new_rows(self) -> list[Message]:
        rows = list(Message.objects.filter(run_id=self.run.pk, seq__gt=self.seq).order_by("seq"))
        self.seq = rows[-1].seq if rows else self.seq
        return rows

    def _calls(self) -> list[str]:
        """List the ids of the calls of the first reply."""
        if not self.calls:
            replies = Message.objects.filter(run_id=self.run.pk, kind="assistant").order_by("seq")
            self.calls = [each["id"] for reply in replies[:1] for each in reply.payload["calls"]]
        return self.calls

    def card(self, place: int) -> Approval:
        """Find the approval of a call."""
        return Approval.objects.get(run_id=self.run.pk, call_id=self._calls()[place])

    def call_id(self, place: int) -> str:
        """Find the id of a call."""
        return self._calls()[place]

    def lease_runs_out(self, world: World) -> None:
        """Let the lease be over, for the database and for the driver that holds it."""
        kill(self.run)
        for process, driver in zip(self.processes, world.drivers, strict=True):
            if driver.holds:
                process.slept += 2 * settings.LEASE_SECONDS

    def cancel_by_force(self) -> None:
        """Cancel a second time, when the first request has been ignored for as long as a lease."""
        seconds = settings.LEASE_SECONDS
        settings.LEASE_SECONDS = 0
        try:
            cancel_run(self.run.pk)
        finally:
            settings.LEASE_SECONDS = seconds


def _seen(event: ModelEvent) -> tuple[bool, ...]:
    return event.is_there, event.is_mine, event.is_delivered, event.is_settled


def _row(row: Message, calls: list[str]) -> tuple[str, int, str]:
    payload, call_id = row.payload, row.call_id
    word = {
        "tool_result": lambda: payload["outcome"],
        "approval_decided": lambda: VERBS[payload["verb"]],
        "orphan_found": lambda: payload["action"],
        "orphan_resolved": lambda: payload["verdict"],
        "tool_started": lambda: f"attempt {row.attempt}",
        "event_delivered": lambda: "late" if payload.get("late") else "",
        "late_result": lambda: "never entered" if payload.get("never_entered") else "",
    }.get(row.kind, lambda: "")()
    return row.kind, calls.index(call_id) if call_id else -1, word


def _told(row: Row) -> tuple[str, int, str]:
    return row.kind, row.call, f"attempt {row.attempt}" if row.kind == "tool_started" else row.word


def _verdict(replay: Replay, step: Step) -> object:
    return resolve_orphan(replay.run.pk, replay.call_id(step.call), step.what, None, result="it did")


ACTIONS: dict[str, Callable[[Replay, Step], object]] = {
    "looks": lambda replay, step: replay.deliver(step.call),
    "stores": lambda replay, step: replay.go_on_delivering(),
    "delivers": lambda replay, step: replay.go_on_delivering(),
    "event is due": lambda replay, step: replay.event_is_due(step.call),
    "ends a wait": lambda replay, step: settle_due(),
    "settles": lambda replay, step: settle_due(),
    "forgets": lambda replay, step: settle_due(),
    "stops the wait": lambda replay, step: stop_waiting(replay.run.pk, replay.call_id(step.call), None),
    "lease runs out": lambda replay, step: replay.lease_runs_out(step.world),
    "card is due": lambda replay, step: run_out(replay.card(step.call)),
    "approved": lambda replay, step: approve(replay.card(step.call).pk, None),
    "denied": lambda replay, step: deny(replay.card(step.call).pk, None, "no"),
    "expired": lambda replay, step: expire_due(),
    "occurred": _verdict,
    "not_occurred": _verdict,
    "unknown": _verdict,
    "resumes": lambda replay, step: resume_run(replay.run.pk, drive=False),
    "cancels": lambda replay, step: cancel_run(replay.run.pk),
    "cancels by force": lambda replay, step: replay.cancel_by_force(),
}
