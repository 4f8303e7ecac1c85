"""Inside a TestCase's own transaction everything works: no heartbeat, no threads, parallel calls in order."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import transaction
from django.test import TestCase, TransactionTestCase

from agentruns import approve, run_agent, start_run
from agentruns.exceptions import NotDurableError
from agentruns.models import Message
from agentruns.services.sweep import sweep
from agentruns.testing.database import JournalFlushMixin
from tests.bells import Bell
from tests.db.helpers import run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

EVERYTHING = {
    "tools": [
        call("post", text="x"),
        call("annotate", number="A1", note="seen"),
        call("search", query="x"),
        call("search", query="y"),
        call("charge", cents=5),
        call("refund", cents=5000),
        call("broken"),
    ]
}


@pytest.mark.django_db
def test_a_whole_run(effects: Effects) -> None:
    Order.objects.create(number="A1", customer="Ada", total_cents=1)
    before = {*threading.enumerate()}  # what an earlier test of this process left may be among them
    result = run_turns(EVERYTHING)
    new = {*threading.enumerate()} - before
    assert not [thread for thread in new if thread.name.startswith("agentruns-")]
    approve(result.pending[0].pk, None)
    assert sweep().completed == 1
    the_run(result)
    assert effects.count() == 6


@pytest.mark.django_db
def test_an_atomic_block_in_it_is_still_refused() -> None:
    with transaction.atomic(), pytest.raises(NotDurableError):
        run_agent(shop_agent("inner"), "do it", "s1")


@pytest.mark.django_db
def test_the_doorbell_rings_on_commit(settings: Any, django_capture_on_commit_callbacks: Any) -> None:
    settings.AGENTRUNS_DISPATCHER = "tests.bells.Bell"
    Bell.rung.clear()
    with django_capture_on_commit_callbacks(execute=True):
        run = start_run(shop_agent("rung"), "do it", "s1")
        assert Bell.rung == []
    assert Bell.rung == [run.pk]


class WithTestCase(TestCase):
    def test_a_run(self) -> None:
        run = start_run("calls-post", "do it", "in-a-testcase", idempotency_key="k")
        self.assertEqual(run.status, "queued")


class WithFlush(JournalFlushMixin, TransactionTestCase):
    def test_first(self) -> None:
        self.assertEqual(Message.objects.count(), 0)
        start_run("calls-post", "do it", "flushed", idempotency_key="k")

    def test_second(self) -> None:
        self.test_first()
