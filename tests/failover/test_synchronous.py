"""A synchronous replica has every commit that was acknowledged."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import connection

from agentruns.journal.verify import problems
from agentruns.models import Run
from tests.crash.processes import wait_for
from tests.effects import Effects
from tests.failover.orders import acted, begin
from tests.failover.replica import Pair
from tests.settings import DATABASE

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
