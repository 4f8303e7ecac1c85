"""The primary dies while workers are at work, and a replica takes over: nothing is done twice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial

import pytest
from django.db import connection

from agentruns import get_run, start_run
from agentruns.journal.verify import problems
from agentruns.models import Control, Run
from tests.commands.running import run as command
from tests.effects import Effects
from tests.failover.orders import AGENT, Scene, acted, begin, left_alone, settle
from tests.failover.replica import Pair, ask
from tests.settings import DATABASE
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.skipif(DATABASE != "postgres", reason="only PostgreSQL has replicas")


# What the other tests here rest on: a replica that really lacks what the primary acknowledged


def started(number: int) -> None:
    start_run("calls-lookup", "do it", f"s{number}", idempotency_key=f"k{number}")
    connection.close()  # also that of a thread


def test_what_an_asynchronous_replica_lacked_is_gone_after_a_failover(pair: Pair) -> None:
    started(1)
    pair.catch_up()
    assert ask(pair.replica, "SELECT count(*) FROM agentruns_run") == 1
    pair.cut_off()
    started(2)
    pair.kill_primary()
    pair.fail_over()
    assert list(Run.objects.values_list("session__key", flat=True)) == ["s1"]
    started(3)
    assert Run.objects.count() == 2


def test_a_commit_waits_for_a_synchronous_replica_which_then_has_it(pair: Pair) -> None:
    pair.make_synchronous()
    pair.cut_off()
    waits = threading.Thread(target=started, args=(1,))
    waits.start()
    wait_for(lambda: ask(pair.primary, f"SELECT count(*) {WAITING}") == 1, "the commit")
    pair.join()
    waits.join(LIMIT)
    assert not waits.is_alive()
    pair.kill_primary()
    pair.fail_over()
    assert ask(pair.replica, "SELECT count(*) FROM agentruns_run") == 1


# An asynchronous replica


def at_work(where: str, agent: str, scene: Scene) -> None:
    """Fail over while the one worker is at a place that comes after what the replica never got."""
    scene.start("lookup:after", where)
    begin(agent=agent)
    scene.lose("lookup:after")
    scene.wait_at(where)
    scene.fail_over()
    scene.open(where)


def after_the_run(scene: Scene) -> None:
    """Fail over when the worker is done with a run of which the replica has only the beginning."""
    scene.start("lookup:after")
    run = begin()
    scene.lose("lookup:after")
    wait_for(lambda: get_run(run.pk).is_ended, "the end of the run")
    scene.fail_over()


def before_the_claim(scene: Scene) -> None:
    """Fail over to a replica that has the run as it was before the worker claimed it."""
    run = begin()
    scene.pair.catch_up()
    scene.pair.cut_off()
    scene.start()
    wait_for(lambda: get_run(run.pk).is_ended, "the end of the run")
    scene.fail_over()


def by_another(scene: Scene) -> None:
    """Let a worker that did not drive the run find it on the replica; the one that did is dead."""
    drives = scene.start("lookup:after")
    run = begin()
    scene.wait_at("lookup:after")
    scene.start()
    scene.lose("lookup:after")
    wait_for(lambda: get_run(run.pk).is_ended, "the end of the run")
    drives.kill()
    drives.wait()
    scene.fail_over()


STORIES: dict[str, Callable[[Scene], None]] = {
    "in_the_handler": partial(at_work, "post:after", AGENT),
    "in_the_reply": partial(at_work, "reply:before", "thinks-twice"),
    **{one.__name__: one for one in (after_the_run, before_the_claim, by_another)},
}


@pytest.mark.parametrize("story", STORIES)
def test_what_an_asynchronous_replica_lacks_is_done_at_most_once(
    story: str, scene: Scene, effects: Effects
) -> None:
    STORIES[story](scene)
    run = left_alone(Run.objects.get())
    done = acted(effects)
    assert max(done["post"], done["charge"]) <= 1, done
    assert (run.status, run.blocked_reason[:15]) == ("paused", "journal_rewound")
    said = scene.folder / f"said-{len(scene.workers) - 1}"
    wait_for(lambda: "rewound" in said.read_text(), "the line in the log")
    assert problems(run.session_id) == []

    def is_noted() -> bool:
        connection.close()
        return Control.objects.filter(name="server", reason="00000002").exists()

    # The worker lives, and does other work once every run of the old server is held.
    wait_for(is_noted, "a sweep to note the timeline of the new server")
    other = left_alone(begin(2))
    assert (other.status, other.blocked_reason) == ("completed", "")
    command("resume_runs", "--hold-all")
    settle(run, done)
    # Lost calls that had not happened are made now, and nothing twice.
    done = acted(effects)
    assert (done["post"], done["charge"]) == (2, 2)


def test_the_runbook_of_a_failover_that_lost_rows(scene: Scene, effects: Effects) -> None:
    """The runbook of docs/databases.md, step by step."""
    stopped = scene.start("lookup:after")
    begin()
    scene.lose("lookup:after")
    wait_for(lambda: acted(effects)["charge"] == 1, "the charge")
    # 1. Stop the workers. 2. Fence the old primary. 3. Promote the replica.
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(LIMIT) == 0
    scene.fail_over()
    # 4. Hold every unfinished run.
    held = command("resume_runs", "--hold-all")
    assert (held.code, held.out) == (0, "Held 1 run for staff.\n")
    # 5. Check the journal: what the replica has is whole.
    assert command("verify_journal").code == 0
    done = acted(effects)
    # 6. Start the workers: they leave what is held alone.
    scene.start()
    other = left_alone(begin(2))
    run = Run.objects.get(session__key="s1")
    assert (other.status, run.status) == ("completed", "paused")
    assert acted(effects) == {"lookup": 2, "post": 2, "charge": 2}
    # 7. Go through the held runs, and look outside before each answer.
    settle(run, done)
    assert Run.objects.get(pk=run.pk).status == "completed"
    assert (acted(effects)["post"], acted(effects)["charge"]) == (2, 2)


# A synchronous replica has every commit that was acknowledged


def test_with_a_synchronous_replica_nothing_is_lost_nor_held(scene: Scene, effects: Effects) -> None:
    scene.pair.make_synchronous()
    for _worker in range(2):
        scene.start("post:after", lease="60", size=1)  # so that each takes one run
    for number in range(6):
        begin(number)
    wait_for(lambda: effects.count("at:post:after") == 2, "a post in each worker")
    scene.fail_over()
    scene.open("post:after")
    wait_for(lambda: Run.objects.filter(status="completed").count() == 6, "all runs")
    assert acted(effects) == {"lookup": 6, "post": 6, "charge": 6}
    assert effects.repeated() == ["at:post:after"]
    assert [found for run in Run.objects.all() for found in problems(run.session_id)] == []


WAITING = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
END = {"cancelled": "pg_cancel_backend(pid)", "terminated": "pg_terminate_backend(pid, 60000)"}


@pytest.mark.parametrize("how", END)
@pytest.mark.parametrize("fails_over", [False, True])
def test_a_wait_for_the_replica_that_was_cancelled_is_no_commit(
    fails_over: bool, how: str, scene: Scene, effects: Effects
) -> None:
    """The worker's commit waits for a replica that receives nothing; that wait is ended three times."""
    primary = scene.pair.primary

    def moves_on() -> bool:
        return bool(ask(primary, f"SELECT count(*) {WAITING}")) or acted(effects)["post"] > 0

    # Alone: a sweep beside the drive holds the run while it has not noted that the server is synchronous.
    scene.start("lookup:after", lease="60", size=1)
    begin()
    scene.wait_at("lookup:after")
    begun = Run.objects.get()
    connection.close()
    scene.pair.make_synchronous()
    scene.lose("lookup:after")
    for _ in range(3):
        wait_for(moves_on, "the worker's commit")
        assert acted(effects)["post"] == 0, "a handler was entered on a commit that a failover would lose"
        ask(primary, f"SELECT count({END[how]}) {WAITING}")
    wait_for(moves_on, "the worker's next commit")
    assert acted(effects) == {"lookup": 1}
    if fails_over:
        scene.fail_over()
    else:
        scene.pair.join()
    wait_for(lambda: acted(effects)["charge"] == 1, "the charge")
    wait_for(lambda: Run.objects.get(pk=begun.pk).is_ended, "the end of the run")
    assert acted(effects) == {"lookup": 1, "post": 1, "charge": 1}
    assert problems(begun.session_id) == []
