"""docs/reference/requirements.md: every test that the page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reference" / "requirements.md"
ROWS = re.findall(r"^\| (?!requirement|-)(.+?) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("requirement", "shown"), ROWS)
def test_a_requirement_names_tests_that_exist_or_a_reason(requirement: str, shown: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", shown)
    assert named or len(shown.split()) > 3, f"{requirement} has neither test nor reason"
    for file, name in named:
        source = (TESTS / file).read_text()
        for part in name.split("::"):
            assert re.search(rf"^ *(def|class) {part}\b", source, re.MULTILINE), f"{file} has no {name}"


def test_each_requirement_is_there_once() -> None:
    assert len({requirement for requirement, _shown in ROWS}) == len(ROWS) > 150
