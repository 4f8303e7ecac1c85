"""Runs that wait for an event, as the commands tell of them."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from agentruns import Pending, tool
from agentruns.models import Run
from tests.commands.running import run
from tests.db.families import hand_over
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@tool(awaits="payment", sensitive=["iban"])
def charge(order: str, iban: str) -> Pending:
    """Ask the customer to pay."""
    return Pending(f"pi_{order}-{iban}", timedelta(days=3))


def test_the_commands_say_for_which_event_a_run_waits_and_mask_its_key() -> None:
    shop_agent("till", {"tools": [call("charge", order="1", iban="DE02-secret")]}, tools=[charge])
    begun = run("run_agent", "till", "charge", "--session", "s1")
    waiting = Run.objects.get()
    assert (begun.code, waiting.status) == (4, "waiting")
    assert "Waits for payment pi_1-*** since " in begun.out
    told = {
        name: run(name, *given).out
        for name, given in {"list_runs": [], "show_run": [str(waiting.pk)]}.items()
    }
    assert "payment pi_1-*** since " in told["list_runs"]
    assert "waits for     payment pi_1-*** since " in told["show_run"]
    assert "event_awaited" in told["show_run"]
    listed, shown = (
        json.loads(run(name, *given, "--json").out)
        for name, given in (("list_runs", []), ("show_run", [str(waiting.pk)]))
    )
    for record in (listed, shown):
        (wait,) = record["waits_for"]
        assert (wait["tool"], wait["name"], wait["key"]) == ("charge", "payment", "pi_1-***")
        assert wait["since"] < wait["until"]
    assert "1 run waits for an event." in run("resume_runs").out
    for text in (begun.out, *told.values(), json.dumps(shown)):
        assert "DE02-secret" not in text


def test_the_commands_say_for_which_run_a_run_waits() -> None:
    hand_over()
    begun = run("run_agent", "boss", "do it", "--session", "s1")
    (child,) = Run.objects.exclude(parent=None)
    said = f"run {child.pk}, which a call of scout started, since "
    assert (begun.code, f"Waits for {said}" in begun.out) == (4, True)
    assert f"waits for     {said}" in run("show_run", str(child.parent_id)).out
