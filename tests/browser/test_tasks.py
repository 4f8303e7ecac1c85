"""What people do in the console stays within its goals: the rows of `python -m tests.browser.tasks`."""

from __future__ import annotations

import pytest

from tests.browser.desk import Desk
from tests.browser.tasks import TASKS, People, Task, decide, doubt, told
from tests.browser.visitor import Visitors

SHORT = [one for one in TASKS if not one.is_long]
IN_THE_FIRST_SCREEN = [one for one in TASKS if one.measure in (decide, doubt, told)]


def name(task: Task) -> str:
    return task.measure.__name__


@pytest.mark.parametrize("task", SHORT, ids=name)
def test_the_goal_is_met(desk: Desk, visit: Visitors, task: Task) -> None:
    found = task.measure(People(visit, desk))
    assert [one.text for one in found if not one.is_met] == []


@pytest.mark.parametrize("task", IN_THE_FIRST_SCREEN, ids=name)
def test_the_first_screen_has_it_with_wider_letters(desk: Desk, visit: Visitors, task: Task) -> None:
    visit.has_wide_letters = True
    found = task.measure(People(visit, desk))
    assert [one.text for one in found if not one.is_met] == []
