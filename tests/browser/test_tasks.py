"""What people do in the console stays within its goals: the rows of `python -m tests.browser.tasks`."""

from __future__ import annotations

import pytest

from tests.browser.desk import Desk
from tests.browser.tasks import TASKS, People, Task
from tests.browser.visitor import Visitors


@pytest.mark.parametrize(
    "task", [one for one in TASKS if not one.is_long], ids=lambda one: one.measure.__name__
)
def test_the_goal_is_met(desk: Desk, visit: Visitors, task: Task) -> None:
    found = task.measure(People(visit, desk))
    assert [one.text for one in found if not one.is_met] == []
