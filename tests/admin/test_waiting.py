"""The one reader of what runs wait for, which the console and the commands share."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from agentruns import resolve_orphan
from agentruns.models import Run
from agentruns.services import waiting
from tests.admin import doubts
from tests.admin.world import World
from tests.shop.agents import call

pytestmark = pytest.mark.django_db


def test_two_queries_say_what_any_number_of_runs_wait_for(world: World) -> None:
    approval, orphaned, paused = world.waiting(), world.orphaned(), world.paused()
    blocked = world.queued()
    Run.objects.filter(pk=blocked.pk).update(blocked_reason="no worker knows its agent")
    world.completed()
    with CaptureQueriesContext(connection) as queries:
        found = waiting.waits("default", list(Run.objects.all()))
    assert len(queries) == 4  # one of them for the runs, one for what is masked
    assert {run: [(wait.kind, wait.tool, wait.text) for wait in waits] for run, waits in found.items()} == {
        approval.run_id: [(waiting.APPROVAL, "refund", approval.title)],
        orphaned.pk: [(waiting.ORPHAN, "dies", "MemoryError inside the handler.")],
        paused.pk: [(waiting.PAUSED, "", "the bank is down")],
        blocked.pk: [(waiting.BLOCKED, "", "no worker knows its agent")],
    }
    assert found[approval.run_id][0].approval_id == approval.pk
    assert found[orphaned.pk][0].attempt == 1


def test_calls_of_a_run_come_before_its_approvals(world: World) -> None:
    run = doubts.in_doubt(call("refund", cents=5000))
    found = waiting.waits("default", [run])[run.pk]
    assert [(wait.kind, wait.tool) for wait in found] == [
        (waiting.ORPHAN, "wire"),
        (waiting.APPROVAL, "refund"),
    ]


def test_a_call_stays_uncleared_until_somebody_clears_it(world: World) -> None:
    run = doubts.uncleared()
    with CaptureQueriesContext(connection) as queries:
        (wait,) = waiting.uncleared("default", run)
    assert len(queries) == 2
    assert (wait.run_id, wait.call_id, wait.tool) == (run.pk, doubts.doubtful(run), "wire")
    assert wait.gates_tool
    resolve_orphan(run.pk, wait.call_id, "unknown", None, evidence="no answer yet")
    assert waiting.uncleared("default", run) == [wait]
    resolve_orphan(run.pk, wait.call_id, "occurred", None, evidence="on the bank's statement")
    assert waiting.uncleared("default", run) == []
