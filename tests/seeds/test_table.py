"""The table is complete and true: every item is answered, every test it names exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.seeds.table import ASKED, SHOWN, page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "requirements.md"
NUMBERS = list(range(1, 101))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def named_in(file: str) -> frozenset[str]:
    """Return the tests of a file as pytest names them: `function` or `Class::method`."""
    names = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, FUNCTIONS):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, FUNCTIONS)}
    return frozenset(name for name in names if name.rpartition("::")[2].startswith("test_"))


def test_every_number_is_there_once_and_in_order() -> None:
    assert list(SHOWN) == NUMBERS
    assert list(ASKED) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_an_item_has_tests_that_exist_or_a_reason(number: int) -> None:
    shown = SHOWN[number]
    assert shown.tests or shown.reason.strip(), f"item {number} has neither test nor reason"
    assert len(set(shown.tests)) == len(shown.tests)
    for test in shown.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), f"item {number}: there is no file {file}"
        assert name in named_in(file), f"item {number}: {file} has no test {name}"


def test_every_test_made_for_an_item_is_named_by_it() -> None:
    for file in sorted((ROOT / "tests" / "seeds").glob("test_e*.py")):
        path = file.relative_to(ROOT).as_posix()
        for name in named_in(path):
            number = int(name.removeprefix("test_item_")[:2])
            assert f"{path}::{name}" in SHOWN[number].tests, f"item {number} does not name {name}"


def test_the_page_is_up_to_date() -> None:
    command = "python -m tests.seeds.table > docs/reference/requirements.md"
    assert PAGE.read_text(encoding="utf-8") == page(), f"write it again: {command}"
