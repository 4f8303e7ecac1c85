"""Many runs, several workers, one of them killed at random all the time: nothing doubled, nothing lost.

AGENTRUNS_LONG=1 takes the long form: 200 runs and 4 workers.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from agentruns import start_run
from agentruns.models import Message, Run
from tests.crash.processes import start
from tests.shop.models import Order
from tests.waiting import wait_for
from tests.workers.soak import check, decide

pytestmark = pytest.mark.django_db(transaction=True)

LONG = bool(os.environ.get("AGENTRUNS_LONG"))
# One worker is killed every second; the short form lets the few it has come a little further.
RUNS, WORKERS, PAUSE = (200, 4, 0) if LONG else (15, 3, 3)


def test_soak() -> None:
    dice = random.Random(time.time_ns())
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    for number in range(RUNS):
        start_run("soaked", "do it", f"soak-{number}", idempotency_key=f"soak-{number}")
    workers = [start("work", SHOP_PACE="0.15") for _ in range(WORKERS)]
    kills, rows = 0, 0

    def goes_on() -> bool:
        decide(dice)
        return Message.objects.count() > rows or not Run.objects.unfinished().exists()

    try:
        while Run.objects.unfinished().exists():
            wait_for(goes_on, "the workers that are left to do anything")
            time.sleep(1)  # waits: the pace of the kills
            rows = Message.objects.count()
            victim = dice.randrange(WORKERS)
            workers[victim].close()  # by SIGKILL
            kills += 1
            # The others go on while the new one starts: else a slow machine never gets anywhere.
            workers[victim] = start("work", SHOP_PACE="0.15")
            time.sleep(PAUSE * dice.random())  # waits: the pace of the kills
    finally:
        for worker in workers:
            worker.close()
    found = check(RUNS)
    print(f"{WORKERS} workers, {kills} kills, {found}")
    assert (found["runs"], kills > 2) == ({"completed": RUNS}, True)
