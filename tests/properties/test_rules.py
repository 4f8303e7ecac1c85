"""Conditions and caps of standing rules as data never guess, and what `mistakes` accepts never raises."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import given, strategies as st

from agentruns.journal.rules import COUNT, WORDS, Cap, Condition, Facts, match, mistakes, sentence
from agentruns.models import ApprovalRule

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "price": {"type": "number"},
        "flag": {"type": "boolean"}, "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "place": {"$ref": "#/$defs/Place"}, "secret": {"type": "string"},
    },
    "$defs": {"Place": {"type": "object", "properties": {"country": {"enum": ["DE", "AT", None]}}}},
}  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
digits = st.from_regex(r"-?[0-9]{1,20}(\.[0-9]{1,5})?(e[0-9]{1,6})?", fullmatch=True)
members = st.sampled_from(["country", "text", "count", "x"])
values = st.recursive(
    scalars | digits,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(members, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*SCHEMA["properties"], "place.country", "place.city", "gone", "text.x", "", "."])
paths = st.builds("{}.{}".format, st.sampled_from(["arguments", "context"]), names) | st.just("requester")
patterns = st.sampled_from(["a", "[a-z]+", "(", "a)|(b", r"\d+", "(?i)x", "[", "a{2", "^a$", r"\z", "(?=a)"])
said = st.fixed_dictionaries(
    {"path": paths | values, "op": st.sampled_from([*WORDS]) | values, "value": values | digits | patterns}
)
told = st.fixed_dictionaries(
    {
        "of": st.just(COUNT) | paths | values,
        "most": digits | values,
        "seconds": st.integers(-5, 40_000_000) | values,
        "per": st.lists(paths, max_size=2) | values,
    }
)
arguments = st.dictionaries(st.sampled_from([*SCHEMA["properties"], "gone"]), values, max_size=5)
facts = st.builds(
    Facts, arguments, st.dictionaries(st.sampled_from(["text", "tenant"]), values), st.tuples(st.text())
)


def rule(conditions: list[Any], caps: list[Any], effect: str = "approve") -> ApprovalRule:
    """Build a rule as it is read from the database."""
    about = {"name": "r", "version": 1, "agent": "a", "tool": "t", "effect": effect}
    return ApprovalRule(conditions=conditions, caps=caps, **about)


@given(st.lists(said | values, max_size=3), st.lists(told | values, max_size=2), facts)
def test_what_is_accepted_is_explained_and_tried_without_an_error(
    conditions: list[Any], caps: list[Any], about: Facts
) -> None:
    if [*mistakes(conditions, caps, SCHEMA, ["secret"])]:
        return
    stored = rule(conditions, [{**cap, "most": str(cap["most"])} for cap in caps])
    assert sentence(stored).endswith(".")
    found = match(stored, about)
    assert found is None or all(0 <= each.amount <= 10**15 for each in found.amounts)
    assert not any("secret" in str(each["path"]) and "arguments" in each["path"] for each in conditions)


def kind(value: Any) -> Any:
    """Name the type of a JSON value, as a person who reads a condition thinks of it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if is_number else type(value)


@given(st.sampled_from([*WORDS]), values | digits, values | digits)
def test_a_value_of_another_type_never_matches(op: str, value: Any, given_value: Any) -> None:
    value = [value] if op == "in" else value
    if op in ("prefix", "regex"):
        value = "[a-z]*"
    holds = Condition("arguments.x", op, value).holds(Facts({"x": given_value}, {}, ()))
    if op in ("==", "in") and holds:
        assert kind(given_value) == kind(value[0] if op == "in" else value)
    if op in ("<=", ">=") and holds:
        assert kind(given_value) in ("number", str)
        low, high = Decimal(str(given_value)), Decimal(str(value))
        assert low <= high if op == "<=" else low >= high
    if op in ("prefix", "regex"):
        assert not holds or isinstance(given_value, str)


@given(said, values)
def test_a_missing_value_never_matches(condition: dict[str, Any], value: Any) -> None:
    if [*mistakes([condition], [], SCHEMA, [])]:
        return
    for about in (Facts({}, {}, ()), Facts({"x": value}, {"x": value}, ())):
        assert not Condition(**condition).holds(about)


@given(values | digits)
def test_an_amount_that_is_no_number_from_zero_is_never_counted(value: Any) -> None:
    capped = rule([], [{"of": "arguments.x", "most": "5", "seconds": 60, "per": []}])
    if found := match(capped, Facts({"x": value}, {}, ())):
        (amount,) = found.amounts
        assert kind(value) in ("number", str)
        assert amount.amount == Decimal(str(value)) >= 0


@given(values, values)
def test_equal_keys_share_a_cap_and_others_do_not(one: Any, other: Any) -> None:
    cap = Cap(COUNT, "5", 60, ("arguments.x",))
    first, second = (cap.amount(0, Facts({"x": each}, {}, ())).key for each in (one, other))
    assert first == cap.amount(0, Facts({"x": one}, {}, ())).key
    assert repr(one) != repr(other) or first == second
