"""What random runs are made of: what the model says, where a worker dies or freezes, how a run is ended."""

from __future__ import annotations

import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connection, connections
from django.db.models import Q
from hypothesis import HealthCheck, settings, strategies as st

from agentruns import (
    answer,
    approve,
    cancel_run,
    deny,
    pause_run,
    raise_budget,
    resolve_orphan,
    resume_run,
    run_agent,
    stop_waiting,
)
from agentruns.engine.leases import Lease
from agentruns.exceptions import AgentRunsError
from agentruns.journal.connection import _is_inside
from agentruns.models import Approval, Event, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from tests.db.helpers import forget_backoff, kill, run_out
from tests.hostile import HOSTILITIES, clean
from tests.rebuild import examples
from tests.shop.agents import call

CALLS = [
    call("post", text="hi"), call("post", text="hi"), call("post", wrong=1),
    call("lookup", number="A1"), call("search", query="x"), call("search", query="y"),
    call("annotate", number="A1", note="seen"), call("charge", cents=500), call("refund", cents=5000),
    call("refund", cents=5), call("broken"), call("unknown_tool"),
]  # fmt: skip
STOPS = ["tool_use"] * 12 + ["max_tokens", "refusal", "pause_turn"]
POINTS = [
    "before_model", "after_model", "after_reply", "before_tool", "after_tool", "before_result_commit",
    "after_result", "before_finish", "after_repair",
]  # fmt: skip
CLICKS = st.lists(
    st.sampled_from(
        ["approve", "deny", "answer", "edit", "occurred", "not_occurred", "unknown", "cancel", "pause",
         "resume", "run"]
    ),
    max_size=6,
)  # fmt: skip
DEATHS = st.lists(st.tuples(st.sampled_from(POINTS), st.integers(1, 4)), max_size=3)
DIES_NOW = ("dies", "", 1)
PATIENCE = 120  # seconds after which a worker counts as hung, on a machine however slow

Hostility = tuple[str, str]  # where, and the name of what user code does there
Fate = tuple[str, str, int]  # "dies" or "freezes", at a point or ANYWHERE, the nth time it gets there
ANYWHERE = "anywhere"


class Death(BaseException):
    """Stands for SIGKILL inside this process; tests/crash sends the real one."""


class Unwell(Exception):
    """What a model object itself raises."""


def at_each_point(patch: pytest.MonkeyPatch, reached: Callable[[str], None]) -> None:
    """Let `reached` hear of every named boundary; a Death it raises leaves the lease as it is."""
    for module in ("handler", "loop", "tool_calls"):
        patch.setattr(f"agentruns.engine.{module}.reached", reached)
    for module in ("approvals.decisions", "runs.submit", "runs.family"):
        patch.setattr(f"agentruns.services.{module}.reached", reached)
    release = Lease.release

    def release_unless_dead(lease: Lease, **how: Any) -> None:
        if not isinstance(sys.exc_info()[1], Death):
            release(lease, **how)

    patch.setattr(Lease, "release", release_unless_dead)


def surviving(action: Callable[[], object]) -> Any:
    """Run an action; None where it was refused, its model raised or its process died."""
    with contextlib.suppress(AgentRunsError, Unwell, Death):
        return action()
    return None


def surviving_hostility(action: Callable[[], object]) -> Any:
    """Do the same where user code spoils the connection, which its caller then meets, too."""
    try:
        with contextlib.suppress(DatabaseError, InterfaceError, RuntimeError):
            return surviving(action)
        return None
    finally:
        clean()


class Worker:
    """A process that drives, in a thread of its own: it can die, or freeze and be let go later.

    Nothing happens at the same time: whoever gives it something to do waits until it is done or frozen.
    """

    here = threading.local()  # the worker whose thread this is

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=self._live_here)
        self._news: queue.Queue[bool] = queue.Queue()  # true: frozen, false: done
        self._orders: queue.Queue[Fate | None] = queue.Queue()
        self._done: Future[Any] = Future()
        self._fate: Fate | None = None
        self.is_frozen = False
        self.met = ""  # its last fate, and where
        self.hostility: Hostility | None = None
        self.returned: list[tuple[str, int]] = []  # call and attempt of handlers whose result it has seen

    def _live_here(self) -> None:
        Worker.here.worker = self

    @classmethod
    def current(cls) -> Worker | None:
        """Find the worker whose thread this is; the main thread is none."""
        return getattr(cls.here, "worker", None)

    @classmethod
    def reached(cls, point: str) -> None:
        """Meet the fate of the worker whose thread this is, if it is to be met here."""
        worker = cls.current()
        if worker is not None:
            worker._reached(point)

    @classmethod
    def provoke(cls, place: str) -> None:
        """Let user code at a place do to the thread's connection what it is to do there."""
        worker = cls.current()
        if worker is not None and worker.hostility is not None and worker.hostility[0] == place:
            HOSTILITIES[worker.hostility[1]]()

    def do(self, action: Callable[[], Any], fate: Fate | None, hostility: Hostility | None = None) -> Any:
        """Run an action to its result; None if the worker died, was refused or froze on the way."""
        self._fate, self.hostility = fate, hostility
        self._done = self._thread.submit(surviving_hostility if hostility else surviving, action)
        self._done.add_done_callback(lambda done: self._news.put(False))
        return self._wait()

    def let_go(self, fate: Fate | None) -> Any:
        """Let a frozen worker go on, perhaps to another fate; returns as `do`."""
        self._orders.put(fate)
        return self._wait()

    def end(self) -> None:
        """Close the connection: the test database goes away."""
        self._thread.submit(connections.close_all).result(PATIENCE)
        self._thread.shutdown()

    def _wait(self) -> Any:
        self.is_frozen = self._news.get(timeout=PATIENCE)
        return None if self.is_frozen else self._done.result()

    def _reached(self, point: str) -> None:
        if self._fate is None or self._fate[1] not in (point, ANYWHERE):
            return
        how, place, nth = self._fate
        if how == "freezes" and _holds_locks(point):
            return
        if nth > 1:
            self._fate = (how, place, nth - 1)
            return
        self._fate, self.met = None, f"{how} at: {point}"
        if how == "freezes":
            self._news.put(True)
            self._fate = self._orders.get()
        if how == "dies" or self._fate == DIES_NOW:
            self.returned.clear()  # what it knew dies with it
            raise Death(point)


def _holds_locks(point: str) -> bool:
    """Whether others would wait for a worker that is frozen here, as they would for its database."""
    if not connection.in_atomic_block:
        return _is_inside(connections["default"])
    in_handler = point in ("handler_entered", "handler_left", "before_result_commit")
    return not in_handler or connection.vendor == "sqlite"


def _refuse(card: Approval) -> None:
    deny(card.pk, None, "closing", digest=card.digest)


def clear(*runs: Run, decide: Callable[[Approval], object] = _refuse) -> None:
    """Decide whatever waits, so that the runs and their child runs end, and nobody touches the database."""
    left = {run.pk for run in runs}
    for _ in range(60):
        unfinished = list(Run.objects.unfinished().filter(Q(pk__in=left) | Q(parent__in=left)))
        left |= {run.pk for run in unfinished}
        if not unfinished:
            return
        for run in unfinished:
            if run.lease_expires_at is not None:
                kill(run)
            forget_backoff(run)
            for card in Approval.objects.pending().filter(run=run):
                surviving(partial(decide, card))
            for wait in Event.objects.unsettled().filter(run=run).exclude(waits_since=None):
                surviving(partial(stop_waiting, run.pk, wait.call_id, None))
        surviving(sweep)
        for run in Run.objects.filter(pk__in=left, status__in=("orphaned", "paused")):
            if run.blocked_reason.startswith("budget_exhausted: max_steps"):
                surviving(partial(raise_budget, run.pk, max_steps=run.step + 1))
            else:
                surviving(partial(resume_run, run.pk))
    raise AssertionError(f"runs never end: {list(Run.objects.unfinished().filter(pk__in=left).values())}")


def tried_on(usually: int, *, brief: int, long: int) -> settings:
    """Set how many random runs a property is tried on; all of them share the fixtures of one test."""
    shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples(usually, brief=brief, long=long), suppress_health_check=shared)


def scripts(calls: list[Any], shortest: int = 0) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Build a strategy of what a model says in a run, before it is done."""
    use = [{"type": "tool_use", **one} for one in calls]
    content = st.lists(st.sampled_from(use), min_size=1, max_size=4)
    return st.lists(st.builds(_turn, content, st.sampled_from(STOPS)), min_size=shortest, max_size=3)


def _turn(content: list[Any], stop_reason: str) -> dict[str, Any]:
    return {"content": content, "stop_reason": stop_reason}


TURNS = scripts(CALLS)
NUMBER = itertools.count()


def click(word: str, run: Run) -> None:
    """Do what a word of CLICKS says, if the run is in a state for it."""
    card = Approval.objects.pending().filter(run=run).first()
    orphans = result_of(run.pk).orphans
    if word in ("approve", "deny", "answer", "edit") and card is not None:
        arguments = {"cents": 4000} if word == "edit" else None
        decide = {
            "approve": lambda: approve(card.pk, None, digest=card.digest),
            "edit": lambda: approve(card.pk, None, digest=card.digest, arguments=arguments),
            "deny": lambda: deny(card.pk, None, "no"),
            "answer": lambda: answer(card.pk, None, "it is 42"),
        }
        surviving(decide[word])
    elif word == "wait" and card is not None:
        run_out(card)
    elif word in ("occurred", "not_occurred", "unknown") and orphans:
        surviving(lambda: resolve_orphan(run.pk, orphans[0], word, None, result="it did"))
    elif word == "cancel":
        surviving(lambda: cancel_run(run.pk))
    elif word == "pause":
        surviving(lambda: pause_run(run.pk))
    elif word == "resume":
        surviving(lambda: resume_run(run.pk))
    elif word == "run":
        surviving(lambda: run_agent(run.agent, "do it", run.session.key, idempotency_key=run.session.key))


def drive(run: Run, clicks: list[str]) -> None:
    """Sweep, and let people click, with a sweep after each click; a worker that died is dead for good."""
    surviving(sweep)
    for word in clicks:
        current = Run.objects.get(pk=run.pk)
        if current.lease_expires_at is not None:
            kill(current)
        click(word, current)
        surviving(sweep)


def live(run: Run, clicks: list[str]) -> None:
    """Drive a run through clicks, and end it."""
    drive(run, clicks)
    clear(run)
