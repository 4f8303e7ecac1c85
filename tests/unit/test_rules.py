"""Conditions and caps of standing rules, as data: what is accepted, and what fits a call."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import tool
from agentruns.journal.rules import Cap, Condition, Facts, mistakes, sentence, types_at
from agentruns.models import ApprovalRule


@tool(sensitive=["iban"])
def pay(customer: str, cents: int, vip: bool = False, note: str | None = None, iban: str = "") -> str:
    """Pay."""
    return "paid"


SCHEMA = pay.input_schema
FACTS = Facts({"customer": "C1", "cents": 500, "vip": True, "note": None}, {"shop": {"id": 7}}, ("1", "2"))


def wrong(*conditions: Any, caps: Any = ()) -> str:
    return next(mistakes(conditions, caps, SCHEMA, pay.sensitive), "")


def test_the_types_of_a_parameter_are_those_of_the_schema() -> None:
    assert types_at(SCHEMA, ["cents"]) == {"integer"}
    assert types_at(SCHEMA, ["note"]) == {"string", "null"}
    assert types_at(SCHEMA, ["vip", "deeper"]) == set()


@pytest.mark.parametrize(
    ("path", "op", "value", "fits"),
    [
        ("arguments.cents", "<=", 500, True),
        ("arguments.cents", "<=", 499.99, False),
        ("arguments.cents", ">=", 501, False),
        ("arguments.cents", "==", 500.0, True),
        ("arguments.cents", "in", [1, 500], True),
        ("arguments.vip", "==", True, True),
        ("arguments.vip", "==", 1, False),
        ("arguments.customer", "prefix", "C", True),
        ("arguments.customer", "regex", "C[0-9]", True),
        ("arguments.customer", "regex", "[0-9]", False),  # the whole text
        ("arguments.note", "==", None, True),
        ("arguments.note", "prefix", "", False),  # no text
        ("arguments.missing", "==", None, False),
        ("context.shop.id", "==", 7, True),
        ("context.shop.id.deeper", "==", 7, False),
        ("requester", "in", ["1", "2", "3"], True),
        ("requester", "in", ["1"], False),  # every one of them
    ],
)
def test_a_condition_fits_by_value_and_type(path: str, op: str, value: Any, fits: bool) -> None:
    assert Condition(path, op, value).holds(FACTS) is fits


def test_nobody_fits_a_condition_about_requesters_of_a_run_without_any() -> None:
    assert not Condition("requester", "in", ["1"]).holds(FACTS._replace(requesters=()))


@pytest.mark.parametrize(
    ("condition", "why"),
    [
        ("a text", "must have path, op and value"),
        ({"path": "arguments.cents", "op": "<", "value": 1}, "op is one of"),
        ({"path": "cents", "op": "==", "value": 1}, "is not requester"),
        ({"path": "arguments.", "op": "==", "value": 1}, "is not requester"),
        ({"path": "arguments.euros", "op": "==", "value": 1}, "no parameter euros"),
        ({"path": "arguments.iban", "op": "prefix", "value": "DE"}, "sensitive"),
        ({"path": "arguments.cents", "op": "==", "value": "500"}, "type"),
        ({"path": "arguments.cents", "op": "==", "value": True}, "type"),
        ({"path": "arguments.cents", "op": "in", "value": 500}, "list of values"),
        ({"path": "arguments.cents", "op": "in", "value": []}, "list of values"),
        ({"path": "arguments.customer", "op": "<=", "value": 5}, "a number"),
        ({"path": "arguments.cents", "op": "prefix", "value": "5"}, "a text"),
        ({"path": "arguments.customer", "op": "regex", "value": "("}, "regular expression"),
        ({"path": "arguments.customer", "op": "regex", "value": "a)|(?:.*"}, "regular expression"),
    ],
)
def test_a_condition_that_cannot_be_meant_is_refused(condition: Any, why: str) -> None:
    assert why in wrong(condition)


@pytest.mark.parametrize(
    ("cap", "why"),
    [
        ({"of": "count"}, "must have of, most, seconds and per"),
        ({"of": "arguments.customer", "most": "1", "seconds": 60, "per": []}, "no number"),
        ({"of": "requester", "most": "1", "seconds": 60, "per": []}, "path of a number"),
        ({"of": "count", "most": "-1", "seconds": 60, "per": []}, "not negative"),
        ({"of": "count", "most": "NaN", "seconds": 60, "per": []}, "not negative"),
        ({"of": "count", "most": "1", "seconds": 0, "per": []}, "whole number"),
        ({"of": "count", "most": "1", "seconds": True, "per": []}, "whole number"),
        ({"of": "count", "most": "1", "seconds": 60, "per": ["arguments.iban"]}, "sensitive"),
        ({"of": "count", "most": "1", "seconds": 60, "per": "arguments.customer"}, "list of paths"),
    ],
)
def test_a_cap_that_cannot_be_counted_is_refused(cap: Any, why: str) -> None:
    assert why in wrong(caps=[cap])


def test_a_cap_counts_calls_or_a_number_and_knows_its_key() -> None:
    count, total = Cap("count", "2", 60), Cap("arguments.cents", "900", 60, ("arguments.customer",))
    assert (count.amount(0, FACTS).amount, total.amount(1, FACTS).amount) == (1, 500)
    other = total.amount(1, FACTS._replace(arguments={**FACTS.arguments, "customer": "C2"}))
    assert other.key != total.amount(1, FACTS).key
    with pytest.raises(LookupError):
        total.amount(1, FACTS._replace(arguments={"customer": "C1", "cents": -1}))
    with pytest.raises(LookupError):
        total.amount(1, FACTS._replace(arguments={"cents": 1}))


def test_a_rule_explains_itself_in_one_sentence() -> None:
    rule = ApprovalRule(
        tool="pay",
        effect="approve",
        conditions=[
            {"path": "arguments.cents", "op": "<=", "value": 5000},
            {"path": "arguments.customer", "op": "prefix", "value": "C"},
        ],
        caps=[{"of": "arguments.cents", "most": "20000", "seconds": 86400, "per": ["context.customer"]}],
    )
    assert sentence(rule) == (
        'Approve pay if cents is at most 5000 and customer begins with "C", '
        "at most 20000 of cents per context.customer in a day."
    )
