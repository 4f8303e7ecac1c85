"""The cost of replies, by the project's AGENTRUNS_PRICES.

AGENTRUNS_PRICES = {"claude-sonnet-5-5": {"input": 3, "output": 15}}: per million tokens, in any currency.
Models of other providers have the provider in their name, as in "openai:gpt-5.4".
`cache_read`, `cache_write` and `cache_write_1h` default to 0.1, 1.25 and 2 times `input`. A name also
covers dated versions of the same model, but no other model: "claude-sonnet-5" covers
"claude-sonnet-5-20261021" and not "claude-sonnet-5-5".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Context, Decimal, localcontext
from typing import Any

from agentruns.conf import settings
from agentruns.providers.base import token_count

MILLION = 1_000_000
OF_INPUT = {"cache_read": Decimal("0.1"), "cache_write": Decimal("1.25"), "cache_write_1h": Decimal(2)}
KINDS = frozenset({"input", "output", *OF_INPUT})
_DATE = re.compile(r"[-@](\d{8}|\d{4}-\d\d-\d\d)(?!\d)")
MAX_DIGITS = 20
MOST_COST = Decimal("999999999999.999999999999")


def price_of(*models: str) -> dict[str, Decimal] | None:
    """Find the prices of the first of `models` that AGENTRUNS_PRICES covers; None without valid prices.

    If several names there match the model, the longest counts.
    """
    # An invalid price counts as none: a reply that was paid for must be journaled in any case.
    known = settings.PRICES if isinstance(settings.PRICES, dict) else {}
    for model in models:
        begin = [name for name in known if isinstance(name, str) and model.startswith(name)]
        if not (names := [name for name in begin if name == model or _DATE.match(model, len(name))]):
            continue
        name = max(names, key=len)
        if mistakes({name: known[name]}):
            return None
        given = {kind: Decimal(str(value)) for kind, value in known[name].items()}
        with localcontext(Context(prec=100)):
            return {**{kind: given["input"] * factor for kind, factor in OF_INPUT.items()}, **given}
    return None


def cost_of(usage: Mapping[str, Any], *models: str) -> Decimal | None:
    """Compute the cost of a reply from its usage, by `price_of`; None if there is no valid price."""
    if (price := price_of(*models)) is None:
        return None
    written = token_count(usage, "cache_creation_input_tokens")
    longer = min(written, token_count(usage.get("cache_creation"), "ephemeral_1h_input_tokens"))
    tokens = {
        "input": token_count(usage, "input_tokens"),
        "output": token_count(usage, "output_tokens"),
        "cache_read": token_count(usage, "cache_read_input_tokens"),
        "cache_write": written - longer,
        "cache_write_1h": longer,
    }
    with localcontext(Context(prec=100)):  # exact, whatever the thread's own precision
        return sum((price[kind] * count for kind, count in tokens.items()), Decimal(0)) / MILLION


def added(total: str, cost: str) -> str:
    """Add two journaled amounts; return the sum as it is journaled."""
    return amount(Context(prec=100).add(Decimal(total), Decimal(cost)))


def amount(value: Decimal) -> str:
    """Format an amount as journaled: plain digits, exact."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def stored(exact: Decimal) -> Decimal:
    """Round and limit an amount to fit a column of a cost."""
    return min(max(exact, -MOST_COST), MOST_COST).quantize(Decimal("1e-12"), context=Context(prec=60))


def mistakes(prices: Any) -> list[str]:
    """List the mistakes in a value of AGENTRUNS_PRICES; an empty list if it has none."""
    if not isinstance(prices, dict):
        return ["it must be a dict of model names"]
    problems = []
    for name, price in prices.items():
        if not isinstance(name, str):
            problems.append(f"{name!r} is not the name of a model")
        elif not isinstance(price, dict) or not {"input", "output"} <= price.keys() <= KINDS:
            problems.append(f"{name!r} must have input and output, and may have the cache_ ones")
        elif not all(map(is_amount, price.values())):
            problems.append(f"the prices of {name!r} must be numbers, not negative")
    return problems


def is_amount(value: Any) -> bool:
    """Check whether a value is valid as a price: a number that is not negative and has few digits."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        return False
    try:
        number = Decimal(str(value))
    except ArithmeticError:
        return False
    # More digits than any real price has would make sums long, or inexact.
    digits = max(len(number.as_tuple().digits), abs(number.adjusted()))
    return number.is_finite() and number >= 0 and digits <= MAX_DIGITS
