"""The list of `make mutants`, which takes minutes, fits the code as it is: that takes none."""

from __future__ import annotations

from tests.mutants.__main__ import ALL, ROOT, inapplicable


def test_each_snippet_stands_once_in_its_file_and_each_named_test_is_there() -> None:
    assert inapplicable(ALL) == []
    assert len({mutant.guard for mutant in ALL}) == len(ALL), "each guard has a name of its own"
    for mutant in ALL:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), mutant.guard
