"""What the other tests here rest on: a replica that really lacks what the primary acknowledged."""

from __future__ import annotations

import threading

import pytest
from django.db import connection

from agentruns import start_run
from agentruns.models import Run
from tests.failover.replica import Pair, ask
from tests.settings import DATABASE
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(DATABASE != "postgres", reason="only PostgreSQL has replicas")

COUNT = "SELECT count(*) FROM agentruns_run"


def begin(number: int) -> None:
    start_run("calls-lookup", "do it", f"s{number}", idempotency_key=f"k{number}")
    connection.close()  # also that of a thread


def test_what_an_asynchronous_replica_lacked_is_gone_after_a_failover(pair: Pair) -> None:
    begin(1)
    pair.catch_up()
    assert ask(pair.replica, COUNT) == 1
    pair.cut_off()
    begin(2)
    pair.kill_primary()
    pair.fail_over()
    assert list(Run.objects.values_list("session__key", flat=True)) == ["s1"]
    begin(3)
    assert Run.objects.count() == 2


def test_a_commit_waits_for_a_synchronous_replica_which_then_has_it(pair: Pair) -> None:
    pair.make_synchronous()
    pair.cut_off()
    waits = threading.Thread(target=begin, args=(1,))
    waits.start()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    wait_for(lambda: ask(pair.primary, waiting) == 1, "the commit")
    pair.join()
    waits.join(120)
    assert not waits.is_alive()
    pair.kill_primary()
    pair.fail_over()
    assert ask(pair.replica, COUNT) == 1
