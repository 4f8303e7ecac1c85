"""The selection of `python -m tests.mutants --changed`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutants import Edit, Mutant, changes
from tests.programs import run_program

A, B = (Mutant(at, (Edit(f"{at}.py", "old", "new"),), (f"db/test_{at}.py::test_it[case]",)) for at in "ab")
DEFINITIONS = "tests/mutants/engine.py"
EMPTY = (
    "agentruns/a.py", "agentruns/b.py", "agentruns/c.py", "docs/page.md", "fixtures/old.json",
    "pyproject.toml", "tests/conftest.py", "tests/app/models.py", "tests/child.py", "tests/ledger.py",
    "tests/shared.py", "tests/urls.py", "tests/mutants/__main__.py",
)  # fmt: skip
FILES = {
    **dict.fromkeys(EMPTY, ""),
    "tests/db/conftest.py": "from tests import shared",
    "tests/db/helpers.py": "from tests.ledger import Effects",
    "tests/db/test_a.py": "from tests.db.helpers import run\nNAMED = ['python -m tests.child', 'tests.app']",
    "tests/db/test_b.py": "import json",
    "tests/settings.py": "ROOT_URLCONF = 'tests.urls'",
    DEFINITIONS: f"from tests.mutants import Edit, Mutant\nMUTANTS = [{A!r}, {B!r}]",
}


def git(root: Path, *words: str) -> str:
    given = ["-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]
    return run_program("git", *given, *words, cwd=root).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which is known to be green."""
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    monkeypatch.setenv(changes.VARIABLE, git(tmp_path, "rev-parse", "HEAD"))
    return tmp_path


def commit(root: Path) -> None:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "Change", "--allow-empty")


def selected(root: Path, *mutants: Mutant) -> list[Mutant]:
    return changes.affected(root, list(mutants or (A, B)), [DEFINITIONS])[0]


def append(root: Path, file: str) -> None:
    with (root / file).open("a") as opened:
        opened.write("\n")


@pytest.mark.parametrize("committed", [True, False])
def test_a_change_selects_the_mutants_of_its_file(tree: Path, committed: bool) -> None:
    for expected, files in {
        (A,): ("agentruns/a.py", "tests/db/test_a.py", "tests/db/helpers.py", "tests/ledger.py",
               "tests/child.py", "tests/app/models.py"),
        (B,): ("agentruns/b.py", "tests/db/test_b.py"),
        (): ("agentruns/c.py", "docs/page.md", DEFINITIONS),
        (A, B): ("tests/db/conftest.py", "tests/shared.py", "tests/conftest.py", "tests/settings.py",
                 "tests/urls.py", "tests/mutants/__main__.py", "pyproject.toml", "fixtures/old.json",
                 "tests/new.json", "locked-dev.txt"),
    }.items():  # fmt: skip
        for file in files:
            append(tree, file)
            if committed:
                commit(tree)
            assert selected(tree) == [*expected], file
            git(tree, "add", "-A")
            git(tree, "reset", "-q", "--hard", os.environ[changes.VARIABLE])


def test_a_new_or_changed_definition_selects_its_mutant(tree: Path) -> None:
    changed = Mutant("a", A.edits, A.tests, "postgresql")
    new = Mutant("new", A.edits, A.tests)
    assert selected(tree, changed, B, new) == [changed, new]


def test_without_a_green_commit_or_definitions_that_load_all_are_selected(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selected(tree / "tests") == [A, B], "it is not the top of its repository"
    monkeypatch.setenv(changes.VARIABLE, "0" * 40)
    assert selected(tree) == [A, B]
    monkeypatch.delenv(changes.VARIABLE)
    assert selected(tree) == [A, B]
    (tree / DEFINITIONS).write_text("from tests.mutants import a_name_that_has_gone")
    commit(tree)
    monkeypatch.setenv(changes.VARIABLE, "HEAD")
    assert selected(tree) == [A, B]
    monkeypatch.setenv("PATH", str(tree))
    assert selected(tree) == [A, B], "there is no git"


@pytest.mark.parametrize("base", ["refs/remotes/origin/HEAD", "refs/remotes/origin/main"])
def test_a_branch_is_compared_with_the_base_that_it_left(
    tree: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.delenv(changes.VARIABLE)
    git(tree, "update-ref", base, "HEAD")
    assert selected(tree) == [A, B]  # the base itself, of which nobody said that it is green
    append(tree, "agentruns/a.py")
    commit(tree)
    assert selected(tree) == [A]
    git(tree, "checkout", "-q", "--orphan", "elsewhere")
    commit(tree)
    assert selected(tree) == [A, B]
