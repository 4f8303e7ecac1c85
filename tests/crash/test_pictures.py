"""SIGKILL around pictures: a file is there before its row, none is lost, and no effect happens twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentruns import resume_run, run_agent
from agentruns.journal.payloads import names_in
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session
from agentruns.services.retention import delete_old_files
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.crash.photographing import photographer, task
from tests.crash.processes import LEASE, expire_lease, interpret_and_die
from tests.effects import Effects
from tests.files import stored_in

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

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
    given = {"AGENTRUNS_CRASH_AT": point} if point else {}
    interpret_and_die(
        "-m", "tests.crash.photographing", str(folder), AGENTRUNS_TEST_LEASE=str(LEASE), **given
    )
    agent = photographer()
    assert (len(stored_in(folder)), Run.objects.count()) == (files, runs)
    named = {name for row in Message.objects.all() for name in names_in(row.payload)}
    assert len(named) == files * runs
    if not runs:
        assert not Session.objects.exists()
        for path in stored_in(folder):
            os.utime(path, (1, 1))
        assert delete_old_files() == files, "what no row names does not stay"
        assert run_agent(agent, task(), "s1", idempotency_key="k").status == "completed"
    else:
        run = Run.objects.get()
        expire_lease(run)
        sweep()
        run.refresh_from_db()
        assert (run.status, effects.count()) == (status, happened)
        if status == "orphaned":
            assert resume_run(run.pk).status == "completed"
            assert effects.count() == happened, "nothing is entered twice"
        assert run_agent(agent, task(), "s1", idempotency_key="k").run_id == str(run.pk), (
            "it is the same task"
        )
    run = Run.objects.get()
    assert (run.status, problems(run.session_id)) == ("completed", [])
    check_messages([*result_of(run.pk).messages, {"role": "user", "content": "go on"}])
    assert effects.count() <= 1
