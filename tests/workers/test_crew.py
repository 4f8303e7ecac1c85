"""A worker of many threads, as a process of its own: signals while all of them are at work."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agentruns import deliver_event, start_run
from agentruns.models import Message, Run
from tests.db.families import whole
from tests.programs import has_heard, start_program
from tests.shop.models import Order
from tests.shop.waits import paid
from tests.waiting import LIMIT, wait_for
from tests.workers.families import HEADS
from tests.workers.soak import check, decide

pytestmark = pytest.mark.django_db(transaction=True)

LONG = bool(os.environ.get("AGENTRUNS_LONG"))
RUNS, LEAKS = (100, 1000) if LONG else (24, 40)
LEASE = "3"  # seconds

Watch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def watch(tmp_path: Path, effects: Any) -> Iterator[Watch]:
    """`watch(SHOP_PACE="1")` starts a worker with a thread for each run."""
    with ExitStack() as stack:

        def start(concurrency: int = RUNS, **environment: str) -> subprocess.Popen[str]:
            output = stack.enter_context((tmp_path / "said").open("a"))
            words = ("-m", "django", "resume_runs", "--watch", f"--concurrency={concurrency}")
            child = start_program(*words, stdout=output, AGENTRUNS_TEST_LEASE=LEASE, **environment)
            stack.callback(child.wait)
            stack.callback(child.kill)
            return child

        yield start


def begin() -> None:
    """Start the runs, each in a session of its own."""
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    for number in range(RUNS):
        start_run("soaked", "do it", f"soak-{number}", idempotency_key=f"soak-{number}")


def wait_until_all_work() -> None:
    running = Run.objects.filter(status="running", lease_owner__gt="")
    wait_for(lambda: running.count() == RUNS, "each run to be driven")
    wait_for(
        lambda: Message.objects.filter(kind="tool_started").count() >= RUNS // 2, "handlers to be at work"
    )


def finish() -> None:
    """Decide what waits for people until every run has ended, and check the ledger and the journals."""
    dice = random.Random(time.time_ns())

    def is_over() -> bool:
        decide(dice)
        return not Run.objects.unfinished().exists()

    wait_for(is_over, "every run to end")
    assert check(RUNS)["runs"] == {"completed": RUNS}


def test_sigkill_with_every_thread_at_work(watch: Watch) -> None:
    begin()
    child = watch(SHOP_PACE="5")
    wait_until_all_work()
    child.kill()
    child.wait()
    watch()
    finish()


def test_sigterm_with_every_thread_at_work_leaves_nothing_in_doubt(watch: Watch) -> None:
    begin()
    child = watch(SHOP_PACE="2")
    wait_until_all_work()
    child.send_signal(signal.SIGTERM)
    assert child.wait() == 0
    left = Run.objects.unfinished().exclude(status="awaiting-approval")
    assert set(left.values_list("lease_owner", "attempts")) <= {("", 0)}
    assert not Message.objects.filter(kind="orphan_found").exists()
    assert not Run.objects.filter(status="running").exists()
    watch()
    finish()


def test_a_second_signal_ends_the_process_at_once(watch: Watch) -> None:
    begin()
    child = watch(SHOP_PACE="3600")
    wait_until_all_work()
    child.send_signal(signal.SIGTERM)
    wait_for(lambda: has_heard(child), "the first signal to be taken")
    child.send_signal(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    watch()
    finish()


def test_workers_that_are_killed_and_frozen_at_random_lose_and_double_nothing(watch: Watch) -> None:
    """AGENTRUNS_LONG=1 takes three workers and 150 runs at a time, for ten minutes."""
    workers, at_once, minutes = (3, 150, 10) if LONG else (2, 12, 0)
    until = time.monotonic() + 60 * minutes  # waits: as it says
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    dice, begun, blows = random.Random(time.time_ns()), 0, Counter[str]()
    fleet = [watch(SHOP_PACE="0.1") for _ in range(workers)]
    while True:
        decide(dice)
        goes_on = time.monotonic() < until  # waits: the same
        if not goes_on and blows["kills"] > 1 and not Run.objects.unfinished().exists():
            break
        more = at_once - Run.objects.unfinished().count() if goes_on or not begun else 0
        for number in range(begun, begun + more):
            start_run("soaked", "do it", f"soak-{number}", idempotency_key=f"soak-{number}")
        begun += more
        time.sleep(2 * dice.random())  # waits: the pace of the blows
        victim = dice.randrange(workers)
        if blows["kills"] <= blows["freezes"]:
            fleet[victim].kill()
            fleet[victim] = watch(SHOP_PACE="0.1")
            blows["kills"] += 1
        else:
            fleet[victim].send_signal(signal.SIGSTOP)
            time.sleep(2 * float(LEASE) * dice.random())  # waits: sometimes for longer than a lease
            fleet[victim].send_signal(signal.SIGCONT)
            blows["freezes"] += 1
    outcome = check(begun, frozen=True)
    print(f"{workers} workers, {begun} runs, {dict(blows)}, {outcome}")
    assert outcome["runs"] == {"completed": begun}


def test_families_whose_workers_are_killed_lose_and_double_nothing(watch: Watch) -> None:
    """AGENTRUNS_LONG=1 takes three workers and 500 families; each has two, three or four child runs."""
    workers, families = (3, 500) if LONG else (2, 6)
    size = [HEADS[number % len(HEADS)] for number in range(families)]
    dice, kills, exhausted, told = random.Random(time.time_ns()), 0, Counter[Any](), set[str]()
    for number, most in enumerate(size):
        start_run(f"head-{most}", "do it", f"soak-{number}", idempotency_key=f"soak-{number}")
    fleet = [watch(16, SHOP_PACE="0.1", SHOP_FAMILIES="1") for _ in range(workers)]
    while kills < 2 or Run.objects.unfinished().exists():
        for key in {*paid()} - told:
            deliver_event("payment", f"pi-{key}", {"paid": 500})
            told.add(key)
        paused = Run.objects.filter(status="paused", blocked_reason__startswith="attempts_exhausted")
        exhausted.update(paused.values_list("pk", flat=True))
        decide(dice)
        time.sleep(2 * dice.random())  # waits: the pace of the kills
        victim = dice.randrange(workers)
        fleet[victim].kill()
        fleet[victim] = watch(16, SHOP_PACE="0.1", SHOP_FAMILIES="1")
        kills += 1
    outcome = check(families + sum(size))
    print(f"{workers} workers, {families} families, {kills} kills, {exhausted.total()} pauses, {outcome}")
    assert outcome["runs"] == {"completed": families + sum(size)}
    assert [run.agent for run in whole() if run.parent_id is None] == [f"head-{most}" for most in size]


def held(pid: int) -> tuple[int, int, int]:
    """Count a process's open files and threads; and its memory, in MB."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    threads, memory = (int(status.split(f"{name}:")[1].split()[0]) for name in ("Threads", "VmRSS"))
    return len(os.listdir(f"/proc/{pid}/fd")), threads, memory // 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux shows what a process holds")
def test_what_a_worker_holds_stays_as_it_is_however_many_runs_it_drove(watch: Watch) -> None:
    """AGENTRUNS_LONG=1 takes 5,000 runs."""

    def drive(count: int, name: str) -> tuple[int, int, int]:
        for number in range(count):
            start_run("calls-lookup", "do it", f"{name}-{number}")
        wait_for(lambda: not Run.objects.unfinished().exists(), "every run to end", 10 * LIMIT)
        wait_for(lambda: held(child.pid)[1] <= 2, "the threads to end")  # of those, one may be a clock's
        return held(child.pid)

    child = watch()
    first = drive(LEAKS, "first")
    last = drive(5 * LEAKS, "last")
    print(f"files, threads, MB: {first} after {LEAKS} runs, {last} after {6 * LEAKS}")
    assert last[0] <= first[0] + 24, "three files for each connection that SQLite may keep open for later"
    assert last[2] <= first[2] + 12
