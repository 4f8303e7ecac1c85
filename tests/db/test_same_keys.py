"""A result with two keys that are one in JSON: no entry is dropped, and the model is told."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any, TypedDict

import pytest
from pydantic import BaseModel

from agentruns import Occurred, ToolContext, Unknown, tool
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


def plain() -> dict:  # type: ignore[type-arg]
    return BOTH


def generic() -> dict[Any, Any]:
    return {"deep": [{"down": BOTH}]}


def mapping() -> Mapping[int | str, str]:
    return BOTH


def nothing() -> dict[Any, str]:
    return {None: "first", "None": "second", "null": "third", True: "fourth", "true": "fifth"}


def dates() -> dict[date | str, str]:
    return {date(2026, 1, 1): "first", "2026-01-01": "second"}


def numbers() -> dict[float | str, str]:
    return {math.nan: "first", float("nan"): "second"}


def ordered() -> OrderedDict[Any, str]:
    return OrderedDict(BOTH)


def model() -> Report:
    return Report(lines=BOTH)


def in_model() -> list[Report]:
    return [Report(lines={}), Report(lines=BOTH)]


def typed() -> Bare:
    return {"lines": BOTH}


def sheet() -> Sheet:
    return Sheet(BOTH)


def unannotated():  # type: ignore[no-untyped-def]
    return Report(lines=BOTH)


def unannotated_sheet():  # type: ignore[no-untyped-def]
    return [Sheet(BOTH), defaultdict(str, BOTH)]


KINDS: list[Callable[[], Any]] = [
    plain, generic, mapping, nothing, dates, numbers, ordered, model, in_model, typed, sheet, unannotated,
    unannotated_sheet,
]  # fmt: skip


def texts(value: Any) -> set[str]:
    """Every text that is a value somewhere inside."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return set().union(*map(texts, inside))
    return {value} if isinstance(value, str) else set()


@pytest.mark.parametrize("kind", KINDS)
def test_no_entry_is_dropped(kind: Callable[[], Any], effects: Effects) -> None:
    def keyed(ctx: ToolContext):  # type: ignore[no-untyped-def]
        """Act, and return a mapping."""
        act("keyed", ctx)
        return kind()

    keyed.__annotations__["return"] = kind.__annotations__.get("return", Any)
    made = tool(keyed)
    result = run_turns({"tools": [call("keyed")]}, tools=[made])
    (row,) = payloads(the_run(result), "tool_result")
    assert (result.status, row["outcome"], effects.count()) == ("completed", "ok", 1)
    due = {"nothing": 5}.get(kind.__name__, 2)
    assert len(texts(row["content"])) == due
    assert row["stringified"] is True
    told = result.messages[2]["content"][0]["content"]
    if made.signature.returns is not None:
        assert "two of its keys are the same in JSON" in row["misfit"]
        assert "two of its keys are the same in JSON" in told
    assert "first" in told


def test_what_reconcile_knows_keeps_its_entries(effects: Effects) -> None:
    def known(ctx: ToolContext, args: dict[str, Any]) -> Occurred | Unknown:
        return Occurred(BOTH)

    @tool(reconcile=known)
    def pay(ctx: ToolContext) -> dict[Any, str]:
        """Pay, and lose the answer."""
        act("pay", ctx)
        raise ConnectionError("read timed out")

    run = the_run(run_turns({"tools": [call("pay")]}, tools=[pay]))
    assert texts(payloads(run, "tool_result")[0]["content"]) == {"first", "second"}
