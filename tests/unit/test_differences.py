from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentruns.utils.json import first_difference, passes

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("then", "now", "path"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "$.a[1].b"),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, "$.a"),
        ([1], [1, 2], "$[1]"),
        ({"a": 1}, {}, "$.a"),
        ({"odd key": 1}, {"odd key": 2}, '$["odd key"]'),
        (1, True, "$"),
        (1, 1.0, "$"),
        ("a", ["a"], "$"),
        (None, {}, "$"),
    ],
)
def test_the_first_difference(then: Any, now: Any, path: str) -> None:
    found = first_difference(then, now)
    assert found is not None
    assert found.path == path


def test_what_is_not_there_is_none() -> None:
    found = first_difference({"a": [1]}, {"a": []})
    assert found == ("$.a[0]", 1, None)


@given(VALUES)
def test_a_value_is_equal_to_its_copy(value: Any) -> None:
    assert first_difference(value, copy.deepcopy(value)) is None


def test_a_path_through_a_name() -> None:
    names = frozenset({"card", "odd key"})
    assert passes("$.calls[0].arguments.card", names)
    assert passes("$.calls[0].card.number", names)
    assert passes('$["odd key"][1]', names)
    assert not passes("$.calls[0].cardinal", names)
    assert not passes("$.calls[0]", frozenset())
