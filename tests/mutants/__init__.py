"""Guards of the promise, each taken out in a copy of the code: the tests named with it must notice.

`make mutants` runs them; `python -m tests.mutants WORD ...` those whose guard has all the words, with
`--changed` those that a change since the last green commit concerns.
A snippet that no longer stands in its file fails the run: put the new text there, or drop the
mutant with its guard.
"""

from __future__ import annotations

from dataclasses import dataclass

SQLITE, POSTGRESQL = "sqlite", "postgresql"


@dataclass(frozen=True)
class Edit:
    """A text that stands exactly once in a file, and what is put in its place."""

    file: str  # below agentruns/
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """The loss of a guard, or of all the guards that keep one promise; each of `tests` must fall."""

    guard: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]  # below tests/
    database: str = SQLITE


def mutant(guard: str, *parts: Edit | str, database: str = SQLITE) -> Mutant:
    """Build a mutant from its edits and the ids of its tests."""
    edits = tuple(part for part in parts if isinstance(part, Edit))
    return Mutant(guard, edits, tuple(part for part in parts if isinstance(part, str)), database)
