"""A worker is killed around a reservation: each cost counts once, and nobody waits for what is dead."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentruns import start_run
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.models.bookkeeping import Reservation, Spending
from agentruns.services.sweep import sweep
from tests.crash.processes import die, run_and_die
from tests.crash.spenders import LIMIT, POLICY, PRICES, spender
from tests.db.helpers import forget_backoff
from tests.effects import Effects
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

MODULE = "tests.crash.spenders"
THREADS = 8  # of the worker that is killed
# Before the request, after it, around the commit of the first reply, and of the last; what is stored then
STORED = {
    "request:before": 0, "request:after": 0, "after_model": 0, "after_reply": 1, "before_finish": 1,
    "after_finish": 2,
}  # fmt: skip
PLACES = [*STORED]
RESERVED = PLACES[:3]


@pytest.fixture(autouse=True)
def _priced(settings: Any) -> None:
    settings.AGENTRUNS_PRICES, settings.AGENTRUNS_POLICY = PRICES, POLICY


def replies() -> int:
    return Message.objects.filter(kind="assistant").count()


def spent() -> float:
    return float(sum(row.spent for row in Spending.objects.all()))


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_is_driven_again_costs_what_its_replies_cost(
    place: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "2")
    run = die("run", "spending-worker", "s1", at=place, module=MODULE)
    assert (spent(), replies()) == (STORED[place], STORED[place])
    assert Reservation.objects.exists() == (place not in ("after_reply", "after_finish"))
    sweep()
    run.refresh_from_db()
    assert (run.status, run.cost, spent(), replies()) == ("completed", 2, 2, 2)
    assert not Reservation.objects.exists()
    requests = Counter(line["key"] for line in effects.lines() if line["tool"] == "request")
    asked_again = place in ("request:after", "after_model", "before_finish")
    assert sorted(requests.values()) == [1, 1 + asked_again], "only what was not stored is asked again"


@pytest.mark.parametrize("place", RESERVED)
def test_the_reservation_of_a_dead_process_ends_with_its_lease(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody drives the dead run again; the other run waits for its turn until the lease is over."""
    monkeypatch.setenv(LIMIT, "1.5")
    dead = die("run", "spending-worker", "s1", at=place, module=MODULE)
    other = start_run("spending-worker", "do it", "s2")
    held = Reservation.objects.get()
    assert (held.run_id, held.amount) == (dead.pk, 1)

    def goes_on() -> bool:
        forget_backoff(other)
        return bool(sweep(run_id=other.pk).completed)

    wait_for(goes_on, "the other run to end")
    assert (spent(), Reservation.objects.get()) == (2, held)


@pytest.mark.parametrize("place", PLACES)
def test_a_day_is_exceeded_by_one_reply_at_most_though_workers_die(
    place: str, monkeypatch: pytest.MonkeyPatch, effects: Effects
) -> None:
    """Eight threads ask at once when their process is killed, and again when the next one is."""
    monkeypatch.setenv(LIMIT, "7.5")
    for number in range(6):
        start_run(spender, "do it", f"s{number}")
    kill = {"SHOP_KILL": place} if place.startswith("request") else {"point": place}
    for _death in range(1 if place == "after_finish" else 2):  # then nothing may be left to finish
        run_and_die("work", module=MODULE, **kill)

    def is_over() -> bool:
        for run in Run.objects.filter(status="queued"):
            forget_backoff(run)
        sweep()
        return not Run.objects.filter(status__in=("queued", "running")).exists()

    wait_for(is_over, "all runs to end or to pause")
    costs = {run.pk: run.cost or 0 for run in Run.objects.all()}
    assert sum(costs.values()) == spent() == replies() == 8
    paused = Run.objects.filter(status="paused")
    assert {reason.partition(" of ")[0] for reason in paused.values_list("blocked_reason", flat=True)} == {
        "budget_exhausted: scope: 8"
    }
    assert not Reservation.objects.exists()
    assert [problems(run.session_id) for run in Run.objects.all()] == [[]] * 6
    requests = sum(line["tool"] == "request" for line in effects.lines())
    assert requests <= 8 + 2 * THREADS
