"""The list of `make mutants`, which takes minutes, fits the code as it is: that takes none."""

from __future__ import annotations

from tests.mutants.__main__ import ALL, ROOT, inapplicable


def test_each_snippet_stands_once_in_its_file() -> None:
    assert inapplicable(ALL) == []


def test_each_named_test_is_there() -> None:
    for mutant in ALL:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), mutant.guard


def test_each_guard_has_a_name_of_its_own() -> None:
    assert len({mutant.guard for mutant in ALL}) == len(ALL)
