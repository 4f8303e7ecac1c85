"""SIGKILL around large results and pictures: a file is there before its row, and no effect happens twice."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings

from agentruns import Image, Text, ToolContext, resume_run, run_agent, tool
from agentruns.journal.payloads import names_in
from agentruns.models import Message, Run, Session
from agentruns.services.data.retention import delete_old_files
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.crash.child import Orders, prepare
from tests.crash.processes import die, expire_lease, run_and_die
from tests.db.helpers import GO_ON, sound
from tests.effects import Effects
from tests.files import MEGABYTE, alias, fetch, report_of, stored_in
from tests.pictures import BIG, png
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

AT_POINT, AT_FILE = "django.core.files.storage.FileSystemStorage", "tests.files.DeadlyStorage"


@tool
def shoot(ctx: ToolContext) -> Image:
    """Take a large picture."""
    act("shoot", ctx)
    return Image(data=png(1, note=b"y" * 100_000), name="shot.png")


TASKS: dict[str, Any] = {
    "shoots-in-a-crash": [Text("look at this"), Image(data=BIG, name="big.png")],
    "fetches-in-a-crash": "do it",
}
shop_agent("shoots-in-a-crash", {"tools": [call("shoot")]}, tools=[shoot])
shop_agent("fetches-in-a-crash", {"tools": [call("fetch", size=MEGABYTE)]}, tools=[fetch])


def serve(orders: Orders, pipe: Connection) -> None:
    """Run an agent on a storage that kills the process with its first file, unless it dies at a point."""
    os.environ.clear()
    prepare(orders)
    ((agent, folder),) = orders.actions
    with override_settings(STORAGES=alias(Path(folder), AT_POINT if orders.point else AT_FILE)):
        run_agent(agent, TASKS[agent], "s1", idempotency_key="k")
    connections.close_all()


# point -> files, runs, effects and the run's status after a sweep
WINDOWS = {
    "": (1, 0, 0, ""),  # the storage has the task's picture, and no row names it
    "before_start_commit": (1, 0, 0, ""),
    "after_start": (1, 1, 1, "completed"),
    "before_model": (1, 1, 1, "completed"),
    "after_model": (1, 1, 1, "completed"),
    "before_tool": (1, 1, 0, "orphaned"),
    "after_tool": (1, 1, 1, "orphaned"),
    "before_result_commit": (1, 1, 1, "orphaned"),
    "after_result": (2, 1, 1, "completed"),
    "before_finish": (2, 1, 1, "completed"),
}


@pytest.mark.parametrize("point", WINDOWS)
def test_a_death(point: str, folder: Path, effects: Effects) -> None:
    files, runs, happened, status = WINDOWS[point]
    agent = "shoots-in-a-crash"
    run_and_die(agent, str(folder), serve=serve, point=point)
    assert (len(stored_in(folder)), Run.objects.count()) == (files, runs)
    named = {name for row in Message.objects.all() for name in names_in(row.payload)}
    assert len(named) == files * runs
    if not runs:
        assert not Session.objects.exists()
        for path in stored_in(folder):
            os.utime(path, (1, 1))
        assert delete_old_files() == files, "what no row names does not stay"
        assert run_agent(agent, TASKS[agent], "s1", idempotency_key="k").status == "completed"
    else:
        run = Run.objects.get()
        expire_lease(run)
        sweep()
        run.refresh_from_db()
        assert (run.status, effects.count()) == (status, happened)
        if status == "orphaned":
            assert resume_run(run.pk).status == "completed"
            assert effects.count() == happened, "nothing is entered twice"
        again = run_agent(agent, TASKS[agent], "s1", idempotency_key="k")
        assert again.run_id == str(run.pk), "it is the same task"
    run = sound(Run.objects.get())
    assert run.status == "completed"
    check_messages([*result_of(run.pk).messages, GO_ON])
    assert effects.count() <= 1


def test_a_death_between_the_file_of_a_result_and_its_row(folder: Path, effects: Effects) -> None:
    run = die("fetches-in-a-crash", str(folder), serve=serve)
    (path,) = stored_in(folder)
    assert path.read_text() == report_of(MEGABYTE)
    assert not any(names_in(row.payload) for row in Message.objects.all())
    sweep()
    run.refresh_from_db()
    assert (run.status, effects.count()) == ("orphaned", 1)
    assert resume_run(run.pk).status == "completed"
    assert effects.count() == 1, "nothing is entered twice"
    sound(run)
