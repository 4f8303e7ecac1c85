"""`resume_runs --watch` between a decision and its handler, as a process of its own."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from agentruns import approve, start_run
from agentruns.models import Approval, Run
from agentruns.services.runs import write
from tests.effects import Effects
from tests.programs import ROOT
from tests.settings import DATABASE
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)
POSTGRES = DATABASE == "postgres"
SELDOM = "--interval=36000"  # nothing is found by looking: the first time is after more than an hour
LISTENERS = "FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN agentruns'"
needs_postgres = pytest.mark.skipif(not POSTGRES, reason="only PostgreSQL has LISTEN")

Watch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    """`watch("--interval=5")` starts a watcher; what it says is in `tmp_path / "said"`."""
    with ExitStack() as stack:

        def start(*options: str) -> subprocess.Popen[str]:
            child = subprocess.Popen(
                [sys.executable, "-m", "django", "resume_runs", "--watch", *options],
                cwd=ROOT,
                env={
                    **os.environ,
                    "DJANGO_SETTINGS_MODULE": "tests.settings",
                    "AGENTRUNS_TEST_DB_NAME": str(connection.settings_dict["NAME"]),
                },
                stdout=stack.enter_context((tmp_path / "said").open("w")),
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            wait_for(lambda: "watches" in (tmp_path / "said").read_text(), "the watcher")
            return child

        yield start


def waiting(number: int) -> Approval:
    """Return the card of a new run."""
    run = start_run("calls-refund", "do it", f"s{number}", idempotency_key=f"k{number}")
    wait_for(lambda: Run.objects.filter(pk=run.pk, status="awaiting-approval").exists(), "the gate")
    return Approval.objects.get(run=run)


def approve_and_wait(card: Approval, effects: Effects) -> None:
    """Approve a call, and wait until its handler begins; `make bench` measures how long that takes."""
    before = effects.count()
    approve(card.pk, None)
    wait_for(lambda: effects.count() > before, "the handler")


def listeners() -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT pid, state, xact_start {LISTENERS}")
        return list(cursor.fetchall())


def test_the_handler_begins_right_after_the_approval(watch: Watch, effects: Effects) -> None:
    watch(SELDOM)
    for number in range(20):
        card = waiting(number)
        time.sleep(random.uniform(0, 0.3))  # waits: so that the watcher is at any place of its round
        approve_and_wait(card, effects)
    assert effects.count() == 20


@needs_postgres
def test_a_listener_that_broke_is_made_anew(watch: Watch, effects: Effects, tmp_path: Path) -> None:
    watch("--interval=20")  # at the latest it listens again when it looks
    card = waiting(0)
    ((pid, *_rest),) = listeners()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
    wait_for(lambda: bool({row[0] for row in listeners()} - {pid}), "another listener")
    assert re.search("listens for runs broke; it is made anew: ", (tmp_path / "said").read_text())
    approve_and_wait(card, effects)
    approve_and_wait(waiting(1), effects)


def test_a_lost_ring_delays_a_run_until_the_next_look(
    watch: Watch, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch("--interval=2")
    card = waiting(0)
    monkeypatch.setattr(write, "notify_on_commit", lambda alias, run_id: None)
    approve_and_wait(card, effects)


def test_an_idle_watcher_holds_no_transaction_and_ends_at_once(
    watch: Watch, effects: Effects, tmp_path: Path
) -> None:
    child = watch(SELDOM)
    waiting(0)
    if POSTGRES:
        wait_for(lambda: [row[1:] for row in listeners()] == [("idle", None)], "an idle listener")
    else:
        with connection.cursor() as cursor:

            def is_free() -> bool:
                cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                return bool(cursor.fetchone()[0] == 0)

            wait_for(is_free, "a moment without readers")
    child.terminate()
    assert child.wait(LIMIT) == 0, "it does not wait for its next look"
    assert (tmp_path / "said").read_text().endswith("Stopped.\n")
