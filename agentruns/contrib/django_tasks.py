"""Workers notified by Django's tasks, whatever backend the project has; before Django 6.0 by `django-tasks`.

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
    """Notifies by a task of the default backend and queue, or of those that `task` names in a subclass."""

    @property
    def task(self) -> Any:
        """Return the task to enqueue, such as `advance_run.using(queue_name="agents")`."""
        return advance_run

    def is_immediate(self) -> bool:
        """Check whether the backend runs a task at once, in the process that enqueues it."""
        return isinstance(self.task.get_backend(), immediate.ImmediateBackend)

    def notify(self, run_id: UUID) -> None:
        """Enqueue the task, unless it would run at once: no model and no tool ever runs in a web request."""
        if not self.is_immediate():
            self.task.enqueue(str(run_id))


@tasks.task  # type: ignore[untyped-decorator]
def advance_run(run_id: str) -> None:
    """Drive a run until it ends or waits; do nothing if it cannot be claimed now."""
    worker.answer(run_id)
