"""The dispatcher for Django's tasks, with a real backend and its worker: django-tasks-db."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction
from django_tasks_db.models import DBTaskResult

from agentruns import approve, start_run
from agentruns.checks.deployment import check_dispatcher
from agentruns.contrib.django_tasks import TasksDispatcher, advance_run
from agentruns.models import Approval, Run
from tests.effects import Effects
from tests.programs import start_program
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)
NAME = "agentruns.contrib.django_tasks.TasksDispatcher"


@pytest.fixture(autouse=True)
def _dispatcher(settings: Any) -> None:
    settings.AGENTRUNS_DISPATCHER = NAME


@pytest.fixture
def worker() -> Iterator[None]:
    """A worker of django-tasks-db on this test's database."""
    child = start_program("-m", "django", "db_worker", "--interval=0.05", "--no-startup-delay")
    yield
    child.terminate()
    assert child.wait(LIMIT) == 0


def ended(run: Run, status: str) -> bool:
    return Run.objects.filter(pk=run.pk, status=status).exists()


@pytest.mark.usefixtures("worker")
def test_a_task_is_enqueued_at_the_commit_and_its_worker_drives_the_run(effects: Effects) -> None:
    with transaction.atomic():
        run = start_run("calls-refund", "do it", "s1", idempotency_key="k1")
        assert not DBTaskResult.objects.exists()
    wait_for(lambda: ended(run, "awaiting-approval"), "the gate")
    approve(Approval.objects.get().pk, None)
    advance_run.enqueue(str(run.pk))  # one too many
    wait_for(lambda: ended(run, "completed"), "the end")
    wait_for(lambda: not DBTaskResult.objects.exclude(status="SUCCESSFUL").exists(), "the tasks")
    assert [line["tool"] for line in effects.lines()] == ["refund"]
    assert DBTaskResult.objects.count() == 3


def test_nothing_runs_in_the_process_that_enqueues(settings: Any, effects: Effects) -> None:
    assert check_dispatcher(None) == []
    backend = advance_run.get_backend().__class__.__mro__[1].__module__.partition(".backends")[0]
    settings.TASKS = {"default": {"BACKEND": f"{backend}.backends.immediate.ImmediateBackend"}}
    (found,) = check_dispatcher(None)
    assert found.id == "agentruns.W009"
    assert TasksDispatcher().is_immediate()
    run = start_run("calls-refund", "do it", "s1", idempotency_key="k1")
    assert ended(run, "queued")


class Queued(TasksDispatcher):
    """As a project that keeps model calls apart."""

    @property
    def task(self) -> Any:
        """Send the task to a queue of its own."""
        return advance_run.using(queue_name="agents")


def test_a_queue_of_its_own(settings: Any) -> None:
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default", "agents"]}}
    settings.AGENTRUNS_DISPATCHER = f"{__name__}.Queued"
    start_run("calls-refund", "do it", "s1", idempotency_key="k1")
    assert DBTaskResult.objects.get().queue_name == "agents"
