"""The package is typed: what is declared wrongly is found by a type checker, and when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.packaging import declared
from tests.programs import run_program


def test_a_type_checker_finds_what_is_wrong_and_nothing_else() -> None:
    """With the cache of `make check`, or it takes a while."""
    run_program(sys.executable, "-m", "mypy", declared.__file__)


@pytest.mark.parametrize("declare", declared.WRONG)
def test_it_is_found_when_it_runs_too(declare: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        declare()
