"""A synchronous replica has every commit that was acknowledged."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import connection

from agentruns.journal.verify import problems
from agentruns.models import Run
from tests.effects import Effects
from tests.failover.orders import acted, begin, is_at
from tests.failover.replica import Pair, ask
from tests.settings import DATABASE
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(DATABASE != "postgres", reason="only PostgreSQL has replicas")

Workers = Callable[..., "subprocess.Popen[str]"]
Gates = Callable[[str], Path]


def test_with_a_synchronous_replica_nothing_is_lost_nor_held(
    pair: Pair, worker: Workers, effects: Effects, gates: Gates
) -> None:
    pair.make_synchronous()
    posting = gates("post:after")
    environment = {"SHOP_SLOW": "post:after", "SHOP_GATE": str(posting), "AGENTRUNS_TEST_LEASE": "60"}
    worker(**environment)
    worker(**environment)
    for number in range(6):
        begin(number)
    wait_for(lambda: effects.count("at:post:after") == 2, "a post in each worker")
    pair.kill_primary()
    pair.fail_over()
    posting.unlink()
    connection.close()
    wait_for(lambda: Run.objects.filter(status="completed").count() == 6, "all runs")
    assert acted(effects) == {"lookup": 6, "post": 6, "charge": 6}
    assert effects.repeated() == ["at:post:after"]
    assert [found for run in Run.objects.all() for found in problems(run.session_id)] == []


WAITING = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
END = {"cancelled": "pg_cancel_backend(pid)", "terminated": "pg_terminate_backend(pid, 60000)"}


def give_up_waiting(pair: Pair, how: str, effects: Effects, gate: Path) -> None:
    """Let the worker's commit wait for a replica that receives nothing, and end that wait, three times."""
    pair.make_synchronous()
    pair.catch_up()
    pair.cut_off()
    gate.unlink()

    def moves_on() -> bool:
        return bool(ask(pair.primary, f"SELECT count(*) {WAITING}")) or acted(effects)["post"] > 0

    for _ in range(3):
        wait_for(moves_on, "the worker's commit")
        assert acted(effects)["post"] == 0, "a handler was entered on a commit that a failover would lose"
        ask(pair.primary, f"SELECT count({END[how]}) {WAITING}")
    wait_for(moves_on, "the worker's next commit")


@pytest.mark.parametrize("how", END)
@pytest.mark.parametrize("fails_over", [False, True])
def test_a_wait_for_the_replica_that_was_cancelled_is_no_commit(
    fails_over: bool, how: str, pair: Pair, worker: Workers, effects: Effects, gates: Gates
) -> None:
    looking = gates("lookup:after")
    worker(SHOP_SLOW="lookup:after", SHOP_GATE=str(looking), AGENTRUNS_TEST_LEASE="60")
    begin()
    wait_for(is_at(effects, "lookup:after"), "the lookup")
    begun = Run.objects.get()
    connection.close()
    give_up_waiting(pair, how, effects, looking)
    assert acted(effects) == {"lookup": 1}
    if fails_over:
        pair.kill_primary()
        pair.fail_over()
    else:
        pair.join()
    wait_for(lambda: acted(effects)["charge"] == 1, "the charge")
    wait_for(lambda: Run.objects.get(pk=begun.pk).is_ended, "the end of the run")
    assert acted(effects) == {"lookup": 1, "post": 1, "charge": 1}
    assert problems(begun.session_id) == []
