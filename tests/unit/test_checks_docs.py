"""The reference pages of checks and settings, compared with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from agentruns.conf import DEFAULTS

ROOT = Path(__file__).parents[2]
ID = re.compile(r"agentruns\.[EW]\d{3}")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def in_python(folder: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py"))


def test_all_checks_are_listed_and_tested() -> None:
    known = {*re.findall(r'id="(agentruns\.[EW]\d{3})"', in_python("agentruns"))}
    listed = re.findall(r"^\| `(agentruns\.[EW]\d{3})` \|", page("reference/checks.md"), re.MULTILINE)
    assert listed == sorted(known)
    assert known <= {*ID.findall(in_python("tests"))}


@pytest.mark.parametrize("name", ["reference/checks.md", "databases.md"])
def test_the_settings_that_are_named_exist(name: str) -> None:
    named = {*re.findall(r"AGENTRUNS_([A-Z_]+[A-Z])", page(name))}
    assert named <= {*DEFAULTS}


def test_all_settings_are_listed_with_their_defaults() -> None:
    rows = re.findall(
        r"^\| `AGENTRUNS_(\w+)` \| [^|]+ \| `([^|]+)` \| [^|]+ \|$",
        page("reference/settings.md"),
        re.MULTILINE,
    )
    assert [name for name, _default in rows] == [*dict.fromkeys(name for name, _default in rows)]
    assert {name: ast.literal_eval(default) for name, default in rows} == DEFAULTS
