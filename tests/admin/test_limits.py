"""What a run may use, and the definition it goes by: shown as they are, and adopted as they were shown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from agentruns import Agent, run_agent, start_run
from agentruns.admin.runs.limits import judgement, meters
from agentruns.engine.budgets import exceeded
from agentruns.engine.leases import claim
from agentruns.journal.fold import RunState
from agentruns.models import Run
from agentruns.providers.names import model_identity
from agentruns.services.sweep import sweep
from agentruns.testing import DatabaseClock
from tests.admin.pages import page, read, snapshot, url
from tests.admin.people import browser
from tests.admin.world import TURN, World, drifted, seen
from tests.registry import isolated_registry
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def adopt(run: Run, form: dict[str, Any]) -> Any:
    return browser("superuser").post(url(run, "adopt"), {"reason": "", **form}, follow=True)


BUDGETS = {"max_steps": 10, "token_budget": 1000, "cost_budget": "2.5", "deadline": 3600.0}


@pytest.mark.parametrize(
    ("step", "tokens", "cost", "seconds", "percents"),
    [
        (0, 0, "0", 0, [0, 0, 0, 0]),
        (3, 999, "2.4999", 3599, [30, 99, 99, 99]),
        (10, 0, "0", 0, [100, 0, 0, 0]),
        (1, 1000, "0.1", 60, [10, 100, 4, 1]),
        (1, 10, "2.5", 60, [10, 1, 100, 1]),
        (1, 10, "0.1", 7200, [10, 1, 4, 100]),
        (1, 10, "0.1", -5, [10, 1, 4, 0]),
    ],
)
def test_the_meters_judge_as_the_engine_does(
    step: int, tokens: int, cost: str, seconds: float, percents: list[int]
) -> None:
    usage = {"input_tokens": tokens, "other": 5, "cost": cost}
    spent = timedelta(seconds=seconds)
    found = meters(BUDGETS, step, usage, spent)
    assert [each.percent for each in found] == percents
    state = RunState(run_id=None, step=step, usage=usage)  # type: ignore[arg-type]
    now = datetime.now(UTC)
    state.started_at = now - spent
    limits = {"cost_budget": Decimal("2.5"), "deadline": timedelta(hours=1)}
    error = exceeded(SimpleNamespace(**{**BUDGETS, **limits}), state, lambda: now)  # type: ignore[arg-type]
    used_up = [each.name for each in found if each.is_used_up]
    assert used_up[:1] == ([error.partition(":")[0]] if error else [])
    said = judgement(found, ended=False)
    assert said.startswith("Used up: ") == bool(error)
    if error:
        stopped = judgement(found, ended=True, error=f"BudgetExceededError: {error}")
        assert stopped.startswith("It was stopped by this limit: ")
    assert judgement(found, ended=True, error="ValueError: max_steps") == ""


def test_the_page_shows_how_much_of_each_budget_is_used(
    world: World, settings: Any, database_clock: DatabaseClock
) -> None:
    usage = {"input_tokens": 1500, "output_tokens": 500}
    agent = shop_agent(
        "priced",
        {"tools": [call("refund", cents=5000)], "usage": usage},
        max_steps=4,
        token_budget=10_000,
        cost_budget=1,
        deadline=timedelta(hours=2),
    )
    settings.AGENTRUNS_PRICES = {model_identity(agent.model): {"input": 300, "output": 300}}
    run = Run.objects.get(pk=run_agent(agent, "do it", "s1").run_id)
    database_clock.forward(hours=5)  # it waits for a person: that is free
    for known in (True, False):
        if known:
            shown = page(run)
        else:
            with isolated_registry():
                shown = page(run)
            assert "This web server does not know agent priced" in shown.text
        text = " ".join(shown.text.replace("\xa0", " ").split())
        assert "Model replies 1 of 4" in text
        assert "Tokens 2,000 of 10,000" in text
        assert "Cost 0.6 of 1" in text
        assert "Time, without waiting for people 0 s of 2 h" in text
        assert "Closest limit: Cost, 60 % used." in text
    html = browser("superuser").get(url(run)).content.decode()
    assert 'aria-valuenow="60" aria-valuetext="0.6 of 1"' in html
    Run.objects.filter(pk=run.pk).update(step=4)
    assert "Used up: Model replies. The run fails before its next request" in page(run).text


def test_a_run_that_a_limit_ended_says_which(world: World) -> None:
    agent = shop_agent("spender", TURN, max_steps=1)
    run = Run.objects.get(pk=run_agent(agent, "spend", "failed").run_id)
    shown = page(run)
    assert "It was stopped by this limit: Model replies." in shown.text
    assert "No limit is set for: tokens, cost, time." in shown.text
    shop_agent("spender", TURN, max_steps=9)
    assert "Another definition" not in page(run).text


def test_what_was_adopted_is_what_was_shown(world: World) -> None:
    run = drifted(world)
    assert sweep().blocked == 1
    shown = page(run)
    assert shown.cells("ar-drift") == [["max_steps", "50", "7"]]
    assert "Workers that know only the new one leave the run alone." in shown.text
    assert "#ar-definition" in shown.links
    form = shown.forms[url(run, "adopt")]
    assert {name: form[name] for name in ("hash", "seq")} == {k: str(v) for k, v in seen(run).items()}
    shop_agent(run.agent, TURN, max_steps=8)  # deployed meanwhile
    before = snapshot()
    for stale in (form, {**seen(run), "seq": 1}, {"hash": seen(run)["hash"]}, {"hash": "", "seq": "x"}):
        response = adopt(run, stale)
        assert response.status_code == 409
        assert "since you looked. This is how it is now." in read(response).text
    assert snapshot() == before
    old, fresh = run.definition_id, page(run).forms[url(run, "adopt")]
    response = adopt(run, fresh)
    assert "Adopted. The run now follows the definition of version 1." in read(response).text
    row = run.messages.get(kind="run_adopted").payload
    assert (row["old"], row["new"], row["actor"]["name"]) == (old, fresh["hash"], "superuser")
    assert url(run, "adopt") not in page(run).forms
    assert adopt(run, fresh).status_code == 409, "a double click"
    assert sweep().completed == 1


def test_a_live_run_is_not_given_another_definition(world: World) -> None:
    run = drifted(world)
    assert claim("default", run.pk)
    assert "Pause it first." in page(run).text
    before = snapshot()
    assert adopt(run, seen(run)).status_code == 409
    assert snapshot() == before


def test_a_version_that_is_still_served_just_goes_on(world: World) -> None:
    with isolated_registry():
        run = start_run(shop_agent("two", TURN), "do it", "s1")
        shop_agent("two", TURN, version="2", max_steps=7)
        shown = page(run)
        assert "Version 1, which this run was started with, is still registered as it was" in shown.text
        assert shown.cells("ar-drift") == [["max_steps", "50", "7"], ["version", "1", "2"]]
        assert url(run, "adopt") not in shown.forms
        assert adopt(run, seen(run)).status_code == 409
    with isolated_registry():
        assert adopt(run, {"hash": "", "seq": run.messages.latest("seq").seq}).status_code == 409, "unknown"
        shop_agent("two", TURN, version="2", max_steps=7)
        shown = page(run)
        assert (
            "Version 1 of two, which the run follows, is not registered here any more; version 2 is."
            in shown.text
        )
        adopt(run, shown.forms[url(run, "adopt")])
        run.refresh_from_db()
        assert run.version == "2"


def test_long_and_hostile_parts_are_cut_around_what_differs(world: World) -> None:
    model = shop_agent("model").model
    start, rule = "Be kind. " * 300, "<script>alert(1)</script>\u202eNever refund."
    run = start_run(Agent("long", instructions=start, tools=TOOLS, model=model), "do it", "s1")
    Agent("long", instructions=start + rule, tools=TOOLS[1:], model=model)
    (name, before, now), (tool, policy, gone) = page(run).cells("ar-drift")
    assert (name, tool, gone) == ("instructions", "tools.post (removed)", "not there")
    assert before.startswith("…")
    assert "Show all of it: 2700 characters" in before
    first, rest = now.split("Show all of it:")
    assert first.startswith("…")
    assert "<script>alert(1)</script>U+202ENever refund." in first
    assert start in rest
    assert '"description"' in policy
