"""What a reply costs: exact, by the longest name that stands for its model, or unknown."""

from __future__ import annotations

import decimal
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from django.test import override_settings

from agentruns.agents.prices import added, amount, cost_of, mistakes, price_of

PRICES = {
    "claude-sonnet-5": {"input": 2, "output": 10},
    "claude-sonnet-5-5": {"input": 3, "output": 15},
    "claude-sonnet-5-5-20260901": {"input": 4, "output": 20},
    "claude-haiku-5-5": {
        "input": "0.8", "output": 4, "cache_read": 0.1, "cache_write": Decimal(1), "cache_write_1h": 2,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _priced(settings: Any) -> None:
    settings.AGENTRUNS_PRICES = PRICES


def cost(model: str = "claude-sonnet-5-5", **usage: Any) -> Decimal | None:
    return cost_of(usage, model)


def input_price(*models: str) -> Decimal | None:
    return (price_of(*models) or {}).get("input")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("claude-sonnet-5-5", 3), ("claude-sonnet-5-5-20261021", 3), ("claude-sonnet-5-5@20261021", 3),
        ("claude-sonnet-5-5-20261021-v1:0", 3), ("claude-sonnet-5-5-20260901", 4), ("claude-sonnet-5", 2),
        ("claude-sonnet-5-20261021", 2), ("claude-sonnet-5-6", None), ("claude-sonnet-5-5-large", None),
        ("claude-sonnet-5-5-202610210", None), ("claude-sonnet", None), ("", None),
    ],
)  # fmt: skip
def test_a_name_stands_for_its_dated_versions_and_for_no_other_model(
    model: str, expected: int | None
) -> None:
    assert input_price(model) == expected


def test_the_first_model_that_has_a_price_counts_and_a_wrong_price_spoils_no_other() -> None:
    assert input_price("scripted", "claude-sonnet-5-5") == 3
    assert input_price("claude-sonnet-5-5-20260901", "claude-sonnet-5-5") == 4
    assert input_price("scripted", "other") is None
    assert input_price() is None
    assert cost("gpt-7", input_tokens=5) is None
    assert mistakes(PRICES) == mistakes({}) == []
    with override_settings(AGENTRUNS_PRICES={**PRICES, "other": {}}):
        assert (input_price("claude-sonnet-5"), input_price("other")) == (2, None)


def test_every_kind_of_token_has_its_price_and_usage_that_says_nothing_none() -> None:
    million = 1_000_000
    assert cost(input_tokens=million) == 3
    assert cost(output_tokens=million) == 15
    assert cost(cache_read_input_tokens=million) == Decimal("0.3")
    assert cost(cache_creation_input_tokens=million) == Decimal("3.75")
    longer = {"ephemeral_1h_input_tokens": million // 4, "ephemeral_5m_input_tokens": 3 * million // 4}
    assert cost(cache_creation_input_tokens=million, cache_creation=longer) == Decimal("4.3125")
    whole = {"input_tokens": 10, "output_tokens": 20, "cache_read_input_tokens": 30}
    written = {"cache_creation_input_tokens": 40, "cache_creation": {"ephemeral_1h_input_tokens": 40}}
    assert cost("claude-haiku-5-5", **whole, **written) == Decimal("0.000171")
    assert cost() == cost(cache_creation={"ephemeral_1h_input_tokens": 7}) == 0
    assert cost(input_tokens=None, output_tokens="many", cache_creation=5) == 0
    assert cost(input_tokens=True, cache_creation_input_tokens=-3) == 0


def test_a_cost_is_exact_however_few_digits_the_thread_calculates_with() -> None:
    odd = {"odd": {"input": "0.1234567890123456789", "output": 0.1}}
    with decimal.localcontext(prec=3), override_settings(AGENTRUNS_PRICES=odd):
        found = cost("odd", input_tokens=123_456_789, output_tokens=3)
        assert found is not None
        exact = (Fraction("0.1234567890123456789") * 123_456_789 + Fraction("0.1") * 3) / 1_000_000
        assert Fraction(amount(found)) == exact
        assert Fraction(added(amount(found), "1000000000000")) == exact + 10**12
    digits = {"0": "0", "1E+2": "100", "100": "100", "1.50": "1.5", "2.00": "2", "1E-7": "0.0000001"}
    assert {value: amount(Decimal(value)) for value in digits} == digits


WRONG: list[Any] = [-1, True, "three", float("nan"), Decimal("Infinity"), None, "1e999"]
OTHERS: list[Any] = [
    None, [], {5: {"input": 1, "output": 1}}, {"m": 3}, {"m": {"input": 3}},
    {"m": {"input": 3, "output": 15, "caching": 1}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", [*OTHERS, *({"m": {"input": each, "output": 15}} for each in WRONG)])
def test_mistakes_are_found_and_a_wrong_price_is_none(wrong: Any) -> None:
    assert len(mistakes(wrong)) == 1
    with override_settings(AGENTRUNS_PRICES=wrong):
        assert cost("m", input_tokens=5) is None
