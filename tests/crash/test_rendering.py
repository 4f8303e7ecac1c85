"""What was made for a run outlives the process that made it, wherever that is killed."""

from __future__ import annotations

import pytest

from agentruns.models import Message, Run
from tests.crash.kills import finish, run_and_die
from tests.crash.processes import expire_lease
from tests.db.helpers import payloads, sound

pytestmark = pytest.mark.django_db(transaction=True)

FIRST = {"SHOP_SAYS": "first", "SHOP_TOOL": "charge"}
LATER = {"SHOP_SAYS": "later", "SHOP_TOOL": "post"}


def made(run: Run) -> tuple[str, list[str]]:
    """Return what the run's first row has."""
    (row,) = payloads(run, "run_started")
    return row["instructions"], row["tools"]


POINTS = (
    "after_start", "before_model", "after_model", "after_reply", "before_tool", "after_result",
    "before_finish",
)  # fmt: skip


@pytest.mark.parametrize("where", POINTS)
def test_a_killed_run_goes_on_with_what_was_made_for_it(where: str, effects: object) -> None:
    run_and_die("run", "made", "s1", point=where, **FIRST)
    run = Run.objects.get()
    assert made(run) == ("first", ["lookup", "charge"])
    expire_lease(run)
    finish("run", "made", "s1", **LATER)
    run = sound(run)
    assert (run.status, run.output, Run.objects.count()) == ("completed", "first lookup charge", 1)


def test_one_killed_before_its_start_was_committed_is_made_anew(effects: object) -> None:
    run_and_die("run", "made", "s1", point="before_start_commit", **FIRST)
    assert (Run.objects.count(), Message.objects.count()) == (0, 0)
    finish("run", "made", "s1", **LATER)
    assert sound(Run.objects.get()).output == "later post lookup"


def test_a_queued_run_is_driven_by_another_process(effects: object) -> None:
    run_and_die("start", "made", "s1", point="after_start", **FIRST)
    finish("sweep", **LATER)
    assert sound(Run.objects.get()).output == "first lookup charge"
