"""A journal that goes back: copies of it that are restored in the middle of a handler, and tools for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.db import connection, transaction

from agentruns import NotOccurred, Occurred, tool
from agentruns.journal.fold import Call, fold
from agentruns.journal.read import run_rows
from agentruns.journal.store import Batch
from agentruns.models import Approval, Definition, Message, Run, Session, triggers
from agentruns.services.runs.write import write
from agentruns.tools import ToolContext
from tests.effects import Effects
from tests.shop.agents import act, charge, post, refund

TABLES = (Session, Definition, Run, Message, Approval)


class Copy:
    """A copy of the journal, as a backup or a replica that is behind has it."""

    def __init__(self) -> None:
        self.rows = {model: list(model._default_manager.values()) for model in TABLES}

    def restore(self) -> None:
        """Put the copy in the place of the journal: whatever was committed since is gone."""
        with triggers.lifted(connection), transaction.atomic():
            for model in reversed(TABLES):
                model._default_manager.all().delete()
            for model, rows in self.rows.items():
                model._default_manager.bulk_create([model(**row) for row in rows])


class At:
    """Does something in the middle of a handler, once."""

    todo: Callable[[], None] | None = None

    @classmethod
    def work(cls) -> None:
        todo, cls.todo = cls.todo, None
        if todo is not None:
            todo()


def during(name: str, declared: Any) -> Any:
    """Make a tool that acts, and then does what the test has put into `At`."""

    def handler(ctx: ToolContext, number: int) -> str:
        done = act(name, ctx, number=number)
        At.work()
        return done

    handler.__name__ = handler.__qualname__ = name
    handler.__doc__ = "Act, while the world goes wrong."
    return tool(**declared)(handler)


def asked(ctx: ToolContext, args: dict[str, object]) -> Any:
    return Occurred("it was") if Effects.from_environment().count(ctx.idempotency_key) else NotOccurred()


acting = during("acting", {})
gated = during("gated", {"requires_approval": True})
charging = during("charging", {"reconcile": asked})
looking = during("looking", {"safe_to_retry": True})
TOOLS = [acting, gated, charging, looking, post, charge, refund]


def calls_of(run_id: UUID) -> list[Call]:
    return list(fold(run_id, run_rows("default", run_id)).calls.values())


def second_handler(todo: Callable[[], None]) -> None:
    """Do something in the second handler that is entered, after what is to be done in the first."""
    first = At.todo

    def work() -> None:
        if first is not None:
            first()
        At.todo = todo

    At.todo = work


def resume_quietly(run_id: UUID) -> None:
    """Let a held run go on without anybody who asks for its calls in doubt to be told to the model."""

    def change(run: Run, batch: Batch) -> None:
        batch.unpaused = True
        payload = {"actor": None, "epoch": batch.epoch, "reason": "asked", "unpause": True}
        batch.add("run_resumed", payload)

    write(run_id, change, takes_lease=True)
