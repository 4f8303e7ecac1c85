"""SIGKILL between a large result's file and its row: the call is in doubt as ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentruns import resume_run
from agentruns.journal.payloads import names_in
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.crash.fetching import fetcher
from tests.crash.processes import LEASE, expire_lease, interpret_and_die
from tests.effects import Effects
from tests.files import MEGABYTE, report_of, stored_in

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_death_between_the_file_and_its_row(folder: Path, effects: Effects) -> None:
    interpret_and_die("-m", "tests.crash.fetching", str(folder), AGENTRUNS_TEST_LEASE=str(LEASE))
    fetcher()
    run = Run.objects.get()
    (path,) = stored_in(folder)
    assert path.read_text() == report_of(MEGABYTE)
    assert not any(names_in(row.payload) for row in Message.objects.all())
    expire_lease(run)
    sweep()
    run.refresh_from_db()
    assert (run.status, effects.count()) == ("orphaned", 1)
    assert resume_run(run.pk).status == "completed"
    assert effects.count() == 1, "nothing is entered twice"
    assert problems(run.session_id) == []
