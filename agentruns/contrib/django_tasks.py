"""Tasks of Django that wake workers, on any backend. Before Django 6.0, the package `django-tasks` has them.

A lost, doubled or late task does no harm, because only the database says which runs can continue.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any
from uuid import UUID

from agentruns.engine import worker

_PACKAGE = "django.tasks" if find_spec("django.tasks") else "django_tasks"
tasks: Any = import_module(_PACKAGE)
immediate: Any = import_module(f"{_PACKAGE}.backends.immediate")


class TasksDispatcher:
    """The dispatcher that enqueues a task for each run; a subclass's `task` chooses the backend and queue."""

    @property
    def task(self) -> Any:
        """The task to enqueue. A subclass may return `advance_run.using(queue_name="agents")`."""
        return advance_run

    def is_immediate(self) -> bool:
        """Check whether the backend runs a task at once, in the process that enqueues it."""
        return isinstance(self.task.get_backend(), immediate.ImmediateBackend)

    def notify(self, run_id: UUID) -> None:
        """Enqueue a task for the run, unless the backend would run the task at once in this process."""
        if not self.is_immediate():
            self.task.enqueue(str(run_id))


@tasks.task  # type: ignore[untyped-decorator]
def advance_run(run_id: str) -> None:
    """Drive a run until it ends, waits or is stopped; do nothing if the run cannot be claimed now."""
    worker.answer(run_id)
