"""The runbook of docs/databases.md, step by step."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import connection

from agentruns.models import Run
from tests.commands.running import run as command
from tests.effects import Effects
from tests.failover.orders import acted, begin, is_at, left_alone, settle
from tests.failover.replica import Pair
from tests.settings import DATABASE
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(DATABASE != "postgres", reason="only PostgreSQL has replicas")

Workers = Callable[..., "subprocess.Popen[str]"]
Gates = Callable[[str], Path]


def test_the_runbook_of_a_failover_that_lost_rows(
    pair: Pair, worker: Workers, effects: Effects, gates: Gates
) -> None:
    looking = gates("lookup:after")
    stopped = worker(SHOP_SLOW="lookup:after", SHOP_GATE=str(looking))
    begin()
    wait_for(is_at(effects, "lookup:after"), "the lookup")
    pair.catch_up()
    pair.cut_off()
    looking.unlink()
    wait_for(lambda: acted(effects)["charge"] == 1, "the charge")
    # 1. Stop the workers. 2. Fence the old primary. 3. Promote the replica.
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(120) == 0
    pair.kill_primary()
    pair.fail_over()
    connection.close()
    # 4. Hold every unfinished run.
    held = command("resume_runs", "--hold-all")
    assert (held.code, held.out) == (0, "Held 1 run for staff.\n")
    # 5. Check the journal: what the replica has is whole.
    assert command("verify_journal").code == 0
    done = acted(effects)
    # 6. Start the workers: they leave what is held alone.
    worker()
    other = left_alone(begin(2))
    run = Run.objects.get(session__key="s1")
    assert (other.status, run.status) == ("completed", "paused")
    assert acted(effects) == {"lookup": 2, "post": 2, "charge": 2}
    # 7. Go through the held runs, and look outside before each answer.
    settle(run, done)
    assert Run.objects.get(pk=run.pk).status == "completed"
    assert (acted(effects)["post"], acted(effects)["charge"]) == (2, 2)
