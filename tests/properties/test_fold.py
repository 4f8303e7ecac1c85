"""Random runs, random clicks, random deaths: after every append the fold equals the folded columns."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentruns.engine
import agentruns.executor
from agentruns import (
    answer,
    approve,
    cancel_run,
    deny,
    pause_run,
    resolve_orphan,
    resume_run,
    run_agent,
    start_run,
)
from agentruns.agents import isolated_registry
from agentruns.exceptions import AgentRunsError
from agentruns.journal.verify import problems
from agentruns.leases import Lease
from agentruns.models import Approval, Run
from agentruns.runs import result_of
from agentruns.stores import DatabaseStore
from agentruns.sweep import sweep
from agentruns.testing import check_messages
from tests.db.helpers import forget_backoff, kill
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

CALLS = st.sampled_from(
    [
        call("post", text="hi"),
        call("post", text="hi"),
        call("post", wrong=1),
        call("lookup", number="A1"),
        call("search", query="x"),
        call("search", query="y"),
        call("annotate", number="A1", note="seen"),
        call("charge", cents=500),
        call("refund", cents=5000),
        call("refund", cents=5),
        call("broken"),
        call("unknown_tool"),
    ]
)
STOPS = st.sampled_from(["tool_use"] * 6 + ["max_tokens", "refusal", "pause_turn", None])
TURNS = st.lists(st.tuples(st.lists(CALLS, min_size=1, max_size=4), STOPS), max_size=3)
CLICKS = st.lists(
    st.sampled_from(
        [
            "approve",
            "deny",
            "answer",
            "edit",
            "occurred",
            "not_occurred",
            "unknown",
            "cancel",
            "pause",
            "resume",
            "run",
        ]
    ),
    max_size=6,
)
POINTS = [
    "before_model", "after_model", "after_reply", "before_tool", "after_tool", "before_result_commit",
    "after_result", "before_finish", "after_repair",
]  # fmt: skip
DEATHS = st.lists(st.tuples(st.sampled_from(POINTS), st.integers(1, 4)), max_size=3)


class Death(BaseException):
    """Stands for SIGKILL inside this process; tests/crash sends the real one."""


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """Points at which the drive dies, without giving its lease back."""
    armed: list[tuple[str, int]] = []

    def reached(point: str) -> None:
        for index, (at, left) in enumerate(armed):
            if at == point:
                armed[index] = (at, left - 1)
                if left == 1:
                    del armed[index]
                    raise Death(point)

    release = Lease.release

    def release_unless_dead(lease: Lease, **how: Any) -> None:
        if not how.get("failed"):
            release(lease, **how)

    monkeypatch.setattr(agentruns.engine, "reached", reached)
    monkeypatch.setattr(agentruns.executor, "reached", reached)
    monkeypatch.setattr(Lease, "release", release_unless_dead)
    yield armed


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check chain, fold and projections after every single append."""
    append = DatabaseStore.append

    def append_and_check(store: DatabaseStore, batch: Any, **options: Any) -> None:
        append(store, batch, **options)
        assert problems(batch.state.session_id) == []

    monkeypatch.setattr(DatabaseStore, "append", append_and_check)


def surviving(action: Callable[[], object]) -> None:
    with contextlib.suppress(AgentRunsError, Death):
        action()


def click(word: str, run: Run) -> None:
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


def clear(run: Run) -> None:
    """Whatever waits is decided, so that the run ends without anybody touching the database."""
    for _ in range(40):
        run = Run.objects.get(pk=run.pk)
        if run.is_ended:
            return
        if run.lease_expires_at is not None:
            kill(run)
        forget_backoff(run)
        for card in Approval.objects.pending().filter(run=run):
            surviving(lambda card=card: deny(card.pk, None, "closing"))
        surviving(sweep)
        if Run.objects.get(pk=run.pk).status in ("orphaned", "paused"):
            surviving(lambda run=run: resume_run(run.pk))
    raise AssertionError(f"run {run.pk} never ends: {Run.objects.values().get(pk=run.pk)}")


NUMBER = itertools.count()


@settings(
    max_examples=1000 if os.environ.get("AGENTRUNS_LONG") else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(turns=TURNS, clicks=CLICKS, dying=DEATHS)
def test_random_runs(
    turns: list[Any], clicks: list[str], dying: list[Any], effects: Effects, deaths: list[Any], checked: None
) -> None:
    session = f"random-{next(NUMBER)}"
    Order.objects.get_or_create(number="A1", customer="Ada", total_cents=100)
    effects.path.unlink(missing_ok=True)
    script = [
        {
            "content": [{"type": "tool_use", **one} for one in calls],
            "stop_reason": stop,
        }
        for calls, stop in turns
        if stop is not None
    ]
    with isolated_registry():
        agent = shop_agent("random", *script)
        run = start_run(agent, "do it", session, idempotency_key=session)
        deaths[:] = dying
        surviving(sweep)
        for word in clicks:
            current = Run.objects.get(pk=run.pk)
            if current.lease_expires_at is not None:
                kill(current)
            click(word, current)
            surviving(sweep)
        deaths.clear()
        clear(run)
        again = run_agent(shop_agent("next"), "and now?", session, idempotency_key=f"{session}-2")
        check_messages([*again.messages, {"role": "user", "content": [{"type": "text", "text": "go"}]}])
    once = [line["key"] for line in effects.lines() if line["tool"] in ("post", "refund", "broken")]
    confirmed = clicks.count("not_occurred")
    assert len(once) <= len(set(once)) + confirmed, "a tool that declares nothing acted twice"
