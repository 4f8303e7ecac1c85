"""A result with two keys that are one in JSON: no entry is dropped, and the model is told."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from datetime import date
from typing import Any, TypedDict

import pytest
from pydantic import BaseModel

from agentruns import Occurred, ToolContext, tool
from tests.db.helpers import payloads, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import act, call

pytestmark = pytest.mark.django_db(transaction=True)

BOTH: dict[Any, str] = {1: "first", "1": "second"}


class Report(BaseModel):
    lines: dict[Any, str]


class Bare(TypedDict):
    lines: dict[Any, str]


@dataclasses.dataclass
class Sheet:
    lines: dict[Any, str]


# what the tool declares to return, and what it returns
KINDS: dict[str, tuple[Any, Any]] = {
    "plain": (dict, BOTH),
    "generic": (dict[Any, Any], {"deep": [{"down": BOTH}]}),
    "mapping": (Mapping[int | str, str], BOTH),
    "nothing": (
        dict[Any, str], {None: "first", "None": "second", "null": "third", True: "fourth", "true": "fifth"},
    ),
    "dates": (dict[date | str, str], {date(2026, 1, 1): "first", "2026-01-01": "second"}),
    "numbers": (dict[float | str, str], {math.nan: "first", float("nan"): "second"}),
    "ordered": (OrderedDict[Any, str], OrderedDict(BOTH)),
    "model": (Report, Report(lines=BOTH)),
    "in model": (list[Report], [Report(lines={}), Report(lines=BOTH)]),
    "typed": (Bare, {"lines": BOTH}),
    "sheet": (Sheet, Sheet(BOTH)),
    "unannotated": (Any, Report(lines=BOTH)),
    "unannotated sheet": (Any, [Sheet(BOTH), defaultdict(str, BOTH)]),
}  # fmt: skip


def texts(value: Any) -> set[str]:
    """Find every text that is a value somewhere inside."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return set().union(*map(texts, inside))
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("kind", KINDS)
def test_no_entry_is_dropped(kind: str, effects: Effects) -> None:
    declared, returned = KINDS[kind]

    def keyed(ctx: ToolContext):  # type: ignore[no-untyped-def]
        """Act, and return a mapping."""
        act("keyed", ctx)
        return returned

    keyed.__annotations__["return"] = declared
    made = tool(keyed)
    result = run_turns({"tools": [call("keyed")]}, tools=[made])
    (row,) = payloads(the_run(result), "tool_result")
    assert (result.status, row["outcome"], effects.count()) == ("completed", "ok", 1)
    assert len(texts(row["content"])) == (5 if kind == "nothing" else 2)
    assert row["stringified"] is True
    told = result.messages[2]["content"][0]["content"]
    if made.signature.returns is not None:
        assert "two of its keys are the same in JSON" in row["misfit"]
        assert "two of its keys are the same in JSON" in told
    assert "first" in told


def test_what_reconcile_knows_keeps_its_entries(effects: Effects) -> None:
    @tool(reconcile=lambda ctx, args: Occurred(BOTH))
    def pay(ctx: ToolContext) -> dict[Any, str]:
        """Pay, and lose the answer."""
        act("pay", ctx)
        raise ConnectionError("read timed out")

    run = the_run(run_turns({"tools": [call("pay")]}, tools=[pay]))
    assert texts(payloads(run, "tool_result")[0]["content"]) == {"first", "second"}
