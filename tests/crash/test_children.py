"""A worker with a family of runs is killed at each boundary: each call has one child run and one effect.

The family has five runs on three levels: the first hands two tasks over, and each of the two hands on one.
"""

from __future__ import annotations

import pytest

from agentruns import start_run
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.crash.families import boss
from tests.crash.processes import run_and_die
from tests.db.families import whole
from tests.db.helpers import names, outcomes
from tests.effects import Effects
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

# The first two starts of children are those of the first run and of one of its children; the last end is the
# first run's. Of what comes between, each boundary is met by several runs.
POINTS = (
    *("after_reply", "before_children", "after_children", "before_children:2", "after_children:2"),
    *("after_tool:2", "after_result:2", "before_finish", "after_finish", "before_settled", "after_settled"),
    *("before_finish:3", "after_finish:3", "before_settled:3", "after_settled:3", "before_settled:4"),
    *("after_settled:4", "before_finish:5"),
)


@pytest.mark.parametrize("point", POINTS)
def test_a_family_whose_worker_is_killed_ends_as_one_that_lived(point: str, effects: Effects) -> None:
    run = start_run(boss, "do it", "s1")
    run_and_die("work", point=point, module="tests.crash.families")

    def is_over() -> bool:
        sweep()
        return not Run.objects.unfinished().exists()

    wait_for(is_over, "the family to end")
    runs = whole()
    assert sorted(each.agent for each in runs) == ["crash-parent", *["crash-scout"] * 2, *["errand"] * 2]
    assert {each.status for each in runs} == {"completed"}
    assert outcomes(run) == ["ok"] * 3
    assert sorted(names(effects)).count("charge") == 2, "each errand pays once"
