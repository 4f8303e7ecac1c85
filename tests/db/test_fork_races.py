"""A fork that is made twice at once, inside its caller's transaction, or without hearing of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connections, transaction

from agentruns import fork_run
from agentruns.journal.verify import problems
from agentruns.models import Run, Session
from tests.db.stories import seq_of, story
from tests.statements import broken_commit
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def test_two_at_once_with_the_same_key_inside_their_callers_transactions() -> None:
    run = story()
    last, ready = seq_of(run, "run_completed"), threading.Barrier(2)

    def fork() -> Any:
        ready.wait(LIMIT)
        try:
            with transaction.atomic():
                made = fork_run(run.pk, last, text="x", idempotency_key="once")
                return made.pk, Run.objects.filter(origin=run).count()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as threads:
        both = [future.result() for future in [threads.submit(fork) for _ in range(2)]]
    made = Run.objects.get(origin=run)
    assert both == [(made.pk, 1)] * 2
    assert problems(made.session_id) == []
    assert Session.objects.count() == 2


def test_a_fork_joins_the_callers_transaction_and_is_made_once_if_its_acknowledgement_is_lost() -> None:
    run = story()
    last = seq_of(run, "run_completed")
    with transaction.atomic():
        fork_run(run.pk, last, text="x")
        transaction.set_rollback(True)
    assert Run.objects.get() == run
    with broken_commit(1, went_through=True):
        fork = fork_run(run.pk, last, text="x")
    assert Run.objects.get(origin=run) == fork
