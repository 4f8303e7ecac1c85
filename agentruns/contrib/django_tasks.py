"""Tasks that wake workers, on any backend of Django's tasks; before Django 6.0 of the package `django-tasks`.

A task may be lost, doubled or late; the database has the truth.
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
    """The dispatcher that enqueues tasks: on the default backend and queue, or by a subclass's `task`."""

    @property
    def task(self) -> Any:
        """Choose the task to enqueue; a subclass may return `advance_run.using(queue_name="agents")`."""
        return advance_run

    def is_immediate(self) -> bool:
        """Check whether the backend runs a task at once, in the process that enqueues it."""
        return isinstance(self.task.get_backend(), immediate.ImmediateBackend)

    def notify(self, run_id: UUID) -> None:
        """Enqueue a task for the run, unless the backend would run the task at once, in a web request."""
        if not self.is_immediate():
            self.task.enqueue(str(run_id))


@tasks.task  # type: ignore[untyped-decorator]
def advance_run(run_id: str) -> None:
    """Drive a run until it ends or waits; do nothing if the run cannot be claimed now."""
    worker.answer(run_id)
