"""Runs over Celery workers that are killed, a broker that loses all it has, a database that crashes.

`python -m tests.workers.soak RUNS WORKERS`: brings its own servers, prints its figures as a line of JSON, and
fails if an effect happened twice, a run is lost or a journal does not add up.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.effects import VARIABLE, Effects
from tests.servers import Broker, Postgres, postgres

ONCE = {"post", "refund", "broken", "invoice", "charge"}  # charge asks the ledger before it is repeated
PATIENCE = 3600  # seconds
# By the server that workers are forked from; last what sets Django up, in the environment of `main`.
IMPORTED = [
    "celery.bin.worker",
    "celery.concurrency.prefork",
    "kombu.transport.redis",
    "tests.workers.celery_worker",
]


class Fleet:
    """Celery workers, of which one is killed with its pool now and then, and replaced."""

    def __init__(self, size: int) -> None:
        self.kills = 0
        self.workers = [self._start() for _ in range(size)]

    def kill_one(self, dice: random.Random) -> None:
        """Kill a worker and its pool by SIGKILL, and start another."""
        victim = dice.randrange(len(self.workers))
        kill(self.workers[victim])
        self.kills += 1
        self.workers[victim] = self._start()

    def _start(self) -> ForkServerProcess:
        context = get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        worker = context.Process(target=_work)
        worker.start()
        return worker


def _work() -> None:
    from tests.workers.celery_worker import work  # not before the environment says which database it is

    work()


def kill(worker: ForkServerProcess) -> None:
    """End a worker and the processes of its pool at once."""
    with suppress(ProcessLookupError):  # it has no session yet
        os.killpg(worker.pid or 0, signal.SIGKILL)
    worker.kill()
    worker.join()


def main(runs: int, workers: int) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentruns-soak-")))
        database = stack.enter_context(postgres())
        broker = Broker(folder)
        broker.start()
        stack.callback(broker.stop)
        os.environ |= {
            **database.environment,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "AGENTRUNS_TEST_DB_NAME": "postgres",
            "AGENTRUNS_TEST_BROKER": broker.url,
            "AGENTRUNS_TEST_LEASE": "3",
            "SHOP_PACE": "0.03",  # a while in which what happened is not stored yet
            VARIABLE: str(folder / "effects.jsonl"),
        }
        prepare(runs)
        fleet = Fleet(workers)
        stack.callback(lambda: [kill(worker) for worker in fleet.workers])
        began = time.monotonic()  # waits: for nothing; it is printed
        disturb(runs, fleet, broker, database)
        took = round(time.monotonic() - began)  # waits: the same
        print(json.dumps({**check(runs), "kills": fleet.kills, "seconds": took}))


def prepare(runs: int) -> None:
    """Make the tables, and start every run."""
    import django

    django.setup()
    from django.core.management import call_command

    from agentruns import start_run
    from tests.celery_app import app  # noqa: F401 - the application that rings
    from tests.shop.models import Order

    call_command("migrate", verbosity=0)
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    for number in range(runs):
        start_run("soaked", "do it", f"soak-{number}", idempotency_key=f"soak-{number}")


def disturb(runs: int, fleet: Fleet, broker: Broker, database: Postgres) -> None:
    """Kill, restart, sweep and decide until every run has ended."""
    from django.db import DatabaseError, InterfaceError, connections

    dice, crash = random.Random(time.time_ns()), partial(database.stop, signal.SIGQUIT)
    give_up = time.monotonic() + PATIENCE  # waits: an hour, in which it kills
    to_come = [(runs // 3, broker.stop, broker.start), (2 * runs // 3, crash, database.start)]
    while True:
        try:
            ended = go_on(dice)
        except (DatabaseError, InterfaceError):
            connections.close_all()
            continue
        if ended == runs:
            return
        if time.monotonic() > give_up:  # waits: the same
            raise SystemExit(f"Only {ended} of {runs} runs have ended.")
        if to_come and ended >= to_come[0][0]:
            _, stop, start = to_come.pop(0)
            stop()
            time.sleep(2)  # waits: so that workers meet what is away
            start()
        time.sleep(1 + 2 * dice.random())  # waits: the pace of the kills
        fleet.kill_one(dice)


def go_on(dice: random.Random) -> int:
    """Do what the periodic task and the staff do; return how many runs have ended."""
    from agentruns.models import Approval, Run
    from agentruns.services.sweep import sweep

    sweep(drives=False)
    if Approval.objects.pending().exists() or Run.objects.filter(status__in=["orphaned", "paused"]).exists():
        decide(dice)
    return Run.objects.filter(status__in=Run.ENDED).count()


def decide(dice: random.Random) -> None:
    """Play the people: approve or deny what waits, and resume what is in doubt or paused."""
    from agentruns import approve, deny, resume_run
    from agentruns.exceptions import AgentRunsError
    from agentruns.models import Approval, Run

    for card in Approval.objects.pending():
        try:
            approve(card.pk, None) if dice.random() < 0.8 else deny(card.pk, None, "not today")
        except AgentRunsError:
            continue
    for run in Run.objects.filter(status__in=["orphaned", "paused"]):
        try:
            resume_run(run.pk, drive=False)
        except AgentRunsError:
            continue


def check(runs: int, *, frozen: bool = False) -> dict[str, Any]:
    """Compare what happened outside with what the journal says; count what the bank had to refuse.

    A process that is `frozen` inside charge may charge after another has asked the ledger and entered it
    again: the gap of docs/explanation/guarantees, which a bank that honours the key closes.
    """
    from agentruns.journal.verify import problems
    from agentruns.models import Message, Run
    from agentruns.services.runs.lifecycle import result_of
    from agentruns.testing import check_messages

    lines = Effects.from_environment().lines()
    starts = Counter(line["key"] for line in lines if line["tool"] in ONCE)
    entries = Counter((line["key"], line["attempt"]) for line in lines if line["tool"] in ONCE)
    twice = [line for line in lines if line["tool"] in ONCE and starts[line["key"]] > 1]
    refused = [line for line in twice if frozen and line["tool"] == "charge" and line["attempt"] > 1]
    gaps = {line["key"] for line in refused}
    assert [line for line in twice if line["key"] not in gaps] == [], "an effect happened twice"
    assert max(entries.values(), default=1) == 1, "an attempt was entered twice"
    rows = Message.objects.filter(kind="tool_result", tool_name__in=ONCE)
    known = {row.call_id for row in rows if row.payload["outcome"] == "ok"}
    keys = dict(Message.objects.filter(kind="tool_started").values_list("call_id", "facts"))
    missing = [call for call in known if keys[call]["key"] not in starts]
    assert not missing, f"the journal knows effects that never happened: {missing}"
    for run in Run.objects.all():
        assert problems(run.session_id) == [], run.pk
        check_messages(result_of(run.pk).messages)
    statuses = Counter(Run.objects.values_list("status", flat=True))
    assert sum(statuses.values()) == runs
    orphans = Message.objects.filter(kind="orphan_found").count()
    return {"runs": dict(statuses), "effects": len(starts), "refused": len(gaps), "orphans": orphans}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
