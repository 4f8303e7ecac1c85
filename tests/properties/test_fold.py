"""Random runs, random clicks, random deaths: after every append the fold equals the folded columns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from agentruns.journal.verify import problems
from agentruns.models import Approval, Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.helpers import kill
from tests.effects import Effects
from tests.properties.faults import (
    CALLS,
    POINTS,
    Death,
    at_each_append,
    at_each_point,
    clear,
    scripts,
    surviving,
)
from tests.rebuild import examples
from tests.registry import isolated_registry
from tests.shop.agents import shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

TURNS = scripts(CALLS)
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
DEATHS = st.lists(st.tuples(st.sampled_from(POINTS), st.integers(1, 4)), max_size=3)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Points at which the drive dies, without giving its lease back."""
    armed: list[tuple[str, int]] = []

    def reached(point: str) -> None:
        for index, (at, left) in enumerate(armed):
            if at == point:
                armed[index] = (at, left - 1)
                if left == 1:
                    del armed[index]
                    raise Death(point)

    at_each_point(monkeypatch, reached)
    return armed


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was found wrong with chain, fold and projections after any single append."""
    found: list[str] = []
    at_each_append(monkeypatch, after=lambda batch: found.extend(problems(batch.state.session_id)))
    return found


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


NUMBER = itertools.count()


@settings(
    max_examples=examples(60, brief=20, long=1000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(turns=TURNS, clicks=CLICKS, dying=DEATHS)
def test_random_runs(
    turns: list[Any],
    clicks: list[str],
    dying: list[Any],
    effects: Effects,
    deaths: list[Any],
    wrong: list[str],
) -> None:
    session = f"random-{next(NUMBER)}"
    Order.objects.get_or_create(number="A1", customer="Ada", total_cents=100)
    effects.path.unlink(missing_ok=True)
    wrong.clear()
    with isolated_registry():
        agent = shop_agent("random", *turns)
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
        assert wrong == []
        check_messages([*again.messages, {"role": "user", "content": [{"type": "text", "text": "go"}]}])
    once = [line["key"] for line in effects.lines() if line["tool"] in ("post", "refund", "broken")]
    confirmed = clicks.count("not_occurred")
    assert len(once) <= len(set(once)) + confirmed, "a tool that declares nothing acted twice"
