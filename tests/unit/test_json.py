"""JSON that is the same however it is written, and where two values differ."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from agentruns.utils import json as canonical
from agentruns.utils.json import first_difference, passes

TEXT = st.text(alphabet=st.characters(codec=None) | st.sampled_from("\x00\x10\ud800\udfff\\u0"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def same(left: object, right: object) -> bool:
    """Equality under which NaN is NaN and -0.0 is not 0.0."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


@given(VALUES)
def test_what_is_written_is_read_back(value: Any) -> None:
    text = canonical.dumps(value)
    assert same(canonical.loads(text), value)
    assert canonical.dumps(canonical.loads(text)) == text
    for strict in (text, json.dumps(canonical.legal(value), allow_nan=False, ensure_ascii=False)):
        strict.encode()  # no lone surrogate is left, as what the provider gets has none
        assert "\x00" not in strict
        assert "\\u0000" not in strict.replace("\\\\", "")
    assert first_difference(value, copy.deepcopy(value)) is None


@given(st.dictionaries(TEXT, st.integers()), st.randoms())
def test_the_order_of_keys_does_not_matter(value: dict[str, int], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical.digest(dict(items)) == canonical.digest(value)


@given(TEXT)
def test_text_columns_hold_any_text(text: str) -> None:
    stored = canonical.escape_text(text)
    assert "\x00" not in stored
    stored.encode()
    assert canonical.unescape_text(stored) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [1.5, "ü", None]}, '{"a":[1.5,"ü",null],"b":1}'),
        (1e16, "1e+16"),
        (-0.0, "-0.0"),
        ("\x00", '"\\u00100000"'),
        (math.nan, '"\\u0010NaN"'),
        ("\x10NaN", '"\\u00100010NaN"'),
    ],
)
def test_the_canonical_text_never_changes(value: object, text: str) -> None:
    """Stored hashes depend on these texts: they may not change between releases."""
    assert canonical.dumps(value) == text


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", {"a": object()}])
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        canonical.dumps(value)


def test_a_circular_value_is_refused() -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises((ValueError, RecursionError)):
        canonical.dumps(circle)


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
    assert first_difference({"a": [1]}, {"a": []}) == ("$.a[0]", 1, None), "what is not there is none"


def test_a_path_through_a_name() -> None:
    names = frozenset({"card", "odd key"})
    assert passes("$.calls[0].arguments.card", names)
    assert passes("$.calls[0].card.number", names)
    assert passes('$["odd key"][1]', names)
    assert not passes("$.calls[0].cardinal", names)
    assert not passes("$.calls[0]", frozenset())
