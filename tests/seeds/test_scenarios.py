"""The scenarios are complete and true: every one is answered, every test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.seeds.scenarios import SCENARIOS, page
from tests.seeds.test_table import named_in

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "scenarios.md"
LAST = {"B1-": 24, "B2-": 29, "D-V": 20, "D-R": 28, "D-E": 8, "D-S": 12}
NAMES = [f"{group}{number}" for group, last in LAST.items() for number in range(1, last + 1)]
MADE = re.compile(r"test_(b1|b2|d_v|d_r|d_s)_?(\d\d)_\w+")


def test_every_scenario_is_there_once_and_in_order() -> None:
    assert list(SCENARIOS) == NAMES
    assert len({text for text, _ in SCENARIOS.values()}) == len(SCENARIOS)


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_has_tests_that_exist_or_a_reason(name: str) -> None:
    text, shown = SCENARIOS[name]
    assert text.endswith(".")
    assert shown.tests or shown.reason.strip(), f"{name} has neither test nor reason"
    assert len(set(shown.tests)) == len(shown.tests)
    for test in shown.tests:
        file, _, function = test.partition("::")
        assert (ROOT / file).is_file(), f"{name}: there is no file {file}"
        assert function in named_in(file), f"{name}: {file} has no test {function}"


def test_every_test_made_for_a_scenario_is_named_by_it() -> None:
    folder = ROOT / "tests" / "seeds"
    files = [*folder.glob("test_d_*.py"), folder / "test_scenarios_b.py"]
    for file in sorted(files):
        path = file.relative_to(ROOT).as_posix()
        for function in named_in(path):
            found = MADE.fullmatch(function)
            assert found is not None, f"{function} does not say which scenario it is of"
            group = found[1].upper().replace("_", "-")
            name = f"{group}-{int(found[2])}" if group[0] == "B" else f"{group}{int(found[2])}"
            assert f"{path}::{function}" in SCENARIOS[name][1].tests, f"{name} does not name {function}"


def test_the_page_is_up_to_date() -> None:
    command = "python -m tests.seeds.scenarios > docs/reference/scenarios.md"
    assert PAGE.read_text(encoding="utf-8") == page(), f"write it again: {command}"
