"""Random runs, random clicks, random deaths: after every append the fold equals the folded columns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from agentruns import (
    run_agent,
    start_run,
)
from agentruns.journal.verify import problems
from agentruns.models import Run
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.helpers import GO_ON, kill
from tests.effects import Effects
from tests.properties.faults import (
    CLICKS,
    DEATHS,
    NUMBER,
    TURNS,
    at_each_append,
    clear,
    click,
    surviving,
    tried_on,
)
from tests.registry import isolated_registry
from tests.shop.agents import shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was found wrong with chain, fold and projections after any single append."""
    found: list[str] = []
    at_each_append(monkeypatch, after=lambda batch: found.extend(problems(batch.state.session_id)))
    return found


@tried_on(60, brief=20, long=1000)
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
        check_messages([*again.messages, GO_ON])
    once = [line["key"] for line in effects.lines() if line["tool"] in ("post", "refund", "broken")]
    confirmed = clicks.count("not_occurred")
    assert len(once) <= len(set(once)) + confirmed, "a tool that declares nothing acted twice"
