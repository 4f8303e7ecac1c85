"""The mutants whose guard, tests or definition changed since a commit known to be green."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutants import Mutant

VARIABLE = "AGENTRUNS_GREEN"  # the commit, from a caller who knows one
BASES = ("origin/HEAD", "origin/main")  # what a branch is based on
EVERYTHING = (
    "pyproject.toml", "locked*.txt", "fixtures/*", "tests/servers.py",
    *(f"tests/mutants/{name}.py" for name in ("__init__", "__main__", "changes", "forkserver", "plugin")),
)  # fmt: skip
NAME = re.compile(r"\b(?:tests|project)(?:\.\w+)+")  # of a module of this tree that a test may use


def git(root: Path, *words: str) -> str | None:
    """Run git in the tree; return the output, or None if git fails or is missing."""
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout
    return None


def green(root: Path) -> str | None:
    """Find the newest commit known to be green: the caller's, or the base of this branch."""
    top = git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.rstrip("\n")) != root.resolve():
        return None

    def commit(name: str) -> str | None:
        return git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")

    if named := os.environ.get(VARIABLE):
        return (commit(named) or "").strip() or None
    for base in map(commit, BASES):
        is_older = base and git(root, "merge-base", "--is-ancestor", base.strip(), "HEAD") is not None
        if base and is_older and base != commit("HEAD"):
            return base.strip()
    return None


def changed_files(root: Path, commit: str) -> set[str] | None:
    """List the files that differ from a commit in the working tree, new files included."""
    lists = (
        git(root, "diff", "--name-only", "--no-renames", "-z", commit, "--"),
        git(root, "ls-files", "--others", "--exclude-standard", "-z"),
    )
    return None if None in lists else {*"".join(map(str, lists)).split("\0")} - {""}


@cache
def names(source: str) -> frozenset[str]:
    """List the modules that a source imports, or names in a string: an app, or a process that it starts."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                found |= {f"{module}.{alias.name}" for alias in node.names}
            case ast.Constant(value=str(text)):
                found |= {f"{name}.*" for name in NAME.findall(text)}
    return frozenset(filter(NAME.match, found))


def files_of(root: Path, test: str) -> set[str]:
    """List the modules that a test loads: its own, `conftest.py`, settings, and all that they import."""
    file = Path("tests", test.partition("::")[0])
    waiting = [str(file), "tests/settings.py", *(str(folder / "conftest.py") for folder in file.parents[:-1])]
    files: set[str] = set()
    while waiting:
        file = Path(waiting.pop())
        if str(file) in files or not (root / file).is_file():
            continue
        files.add(str(file))
        for name in names((root / file).read_text()):
            path = Path(*name.removesuffix(".*").split("."))
            if name.endswith(".*"):  # all modules of an app are loaded
                waiting += [str(each.relative_to(root)) for each in (root / path).rglob("*.py")]
            for each in (path, *path.parents):  # the last word may be a name in a module
                waiting += [f"{each}.py", str(each / "__init__.py")]
    return files


def known(root: Path, commit: str, files: Iterable[str]) -> set[Mutant]:
    """Load the mutants that files defined at a commit, without those of a file that cannot be loaded."""
    mutants: set[Mutant] = set()
    for file in files:
        with suppress(Exception):
            module: dict[str, Any] = {"__name__": file}
            exec(git(root, "show", f"{commit}:{file}") or "", module)
            mutants.update(module["MUTANTS"])
    return mutants


def affected(root: Path, mutants: list[Mutant], definitions: Iterable[str]) -> tuple[list[Mutant], str]:
    """Select the mutants that a change since the green commit concerns; say why these."""
    commit = green(root)
    files = changed_files(root, commit) if commit else None
    if commit is None or files is None:
        return mutants, f"no commit is known to be green ({VARIABLE} may name one)"
    for pattern in EVERYTHING:
        if found := sorted(file for file in files if fnmatch(file, pattern)):
            return mutants, f"{found[0]} changed since {commit[:12]}"
    if data := sorted(file for file in files if file.startswith("tests/") and not file.endswith(".py")):
        return mutants, f"{data[0]} changed since {commit[:12]}"
    old = known(root, commit, definitions)
    selected = [
        mutant
        for mutant in mutants
        if mutant not in old
        or files & {f"agentruns/{edit.file}" for edit in mutant.edits}
        or any(files & files_of(root, test) for test in mutant.tests)
    ]
    return selected, f"changed since {commit[:12]}"
