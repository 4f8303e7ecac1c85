import asyncio
import contextvars
import itertools
import math
import sys
import threading
import typing
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from typing import Any, NoReturn
from uuid import UUID

import pytest
from asgiref.sync import sync_to_async
from hypothesis import given, strategies as st
from pydantic import BaseModel

from agentruns.tools import ToolContext, ToolOutput, to_jsonable, tool
from agentruns.utils import json as canonical

CONTEXT = ToolContext(run_id="r", call_id="c", tool_name="t", idempotency_key="k")


class Colour(Enum):
    RED = "red"
    MIX = (1, Decimal("2"))


class Level(IntEnum):
    HIGH = 3


class Word(StrEnum):
    YES = "yes"


class Order(BaseModel):
    number: str
    total: Decimal = Decimal("0")
    extra: Any = None


@dataclass
class Parcel:
    weight: Any


class Loud:
    def __str__(self) -> str:
        raise RuntimeError("no str")

    __repr__ = __str__


class OnlyRepr:
    def __str__(self) -> str:
        raise RuntimeError("no str")

    def __repr__(self) -> str:
        return "<OnlyRepr>"


class NotText:
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]  # noqa: PLE0307


class Text(str):
    def __str__(self) -> str:
        return "other"


class Number(int):
    def __int__(self) -> int:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


class BadDict(dict[Any, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


Point = namedtuple("Point", "x y")


def returning(value: Any, annotation: Any = Any) -> ToolOutput:
    def fn() -> Any:
        return value

    fn.__annotations__["return"] = annotation
    return tool(fn).invoke(CONTEXT, {})


def kind(value: Any) -> str:
    # pytest would print the values, and some of them cannot be.
    return type(value).__name__


def same(one: Any, other: Any) -> bool:
    return canonical.dumps(one) == canonical.dumps(other)


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (None, None),
        (True, True),
        (1e16, 1e16),
        (-0.0, -0.0),
        (math.nan, math.nan),
        ({"a": [math.inf, -math.inf]}, {"a": [math.inf, -math.inf]}),
        ("\x00\ud800\x10", "\x00\ud800\x10"),
        (Text("text"), "text"),
        (Number(5), 5),
        (Level.HIGH, 3),
        (Word.YES, "yes"),
        (Colour.RED, "red"),
        (Colour.MIX, [1, "2"]),
        (b"caf\xc3\xa9", "café"),
        (b"\xff\xfe", "//4="),
        (bytearray(b"ab"), "ab"),
        (memoryview(b"ab"), "ab"),
        ((1, [2], (3,)), [1, [2], [3]]),
        ({1}, [1]),
        (deque([1, 2]), [1, 2]),
        (Point(1, Decimal("1.10")), [1, "1.10"]),
        (OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (UserDict(a=1), {"a": 1}),
        (Decimal("1.10"), "1.10"),
        (datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), "2026-01-02T03:04:05.000006Z"),
        (date(2026, 1, 2), "2026-01-02"),
        (timedelta(hours=1), "PT1H"),
        (UUID(int=1), str(UUID(int=1))),
        (Path("/tmp/x"), "/tmp/x"),
        (Order(number="1", extra=math.nan), {"number": "1", "total": "0", "extra": math.nan}),
        (1 + 2j, "1+2j"),
        (Parcel(math.nan), {"weight": math.nan}),
        (Parcel(Order(number="1")), {"weight": {"number": "1", "total": "0", "extra": None}}),
        ({1: "a", 2.5: "b", None: "c", False: "d"}, {"1": "a", "2.5": "b", "null": "c", "false": "d"}),
        ({UUID(int=1): 1, Word.YES: 2, b"k": 3}, {str(UUID(int=1)): 1, "yes": 2, "k": 3}),
        (10**4000, 10**4000),
    ],
    ids=kind,
)
def test_what_json_can_say_is_said_without_a_flag(value: Any, content: Any) -> None:
    converted, stringified = to_jsonable(value)
    assert same(converted, content)
    assert stringified is False
    assert type(converted) in (type(None), bool, int, float, str, list, dict)
    output = returning(value)
    assert same(output.content, content) and output.flags == {}


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (10**5000, hex(10**5000)),
        (Loud(), "<unprintable Loud>"),
        (OnlyRepr(), "<OnlyRepr>"),
        ({"a": Loud(), "b": 1}, {"a": "<unprintable Loud>", "b": 1}),
        (ValueError("x"), "x"),
        ({(1, 2): 3}, {"(1, 2)": 3}),
        ({1: "a", "1": "b"}, {"1": "a", "1 (2)": "b"}),
        ({1: "a", "1": "b", b"1": "c"}, {"1": "a", "1 (2)": "b", "1 (3)": "c"}),
        (Parcel(object), {"weight": "<class 'object'>"}),
    ],
    ids=kind,
)
def test_what_needs_text_is_flagged(value: Any, content: Any) -> None:
    assert to_jsonable(value) == (content, True)
    output = returning(value)
    assert output == ToolOutput(content, {"stringified": True})


def circular() -> list[Any]:
    mine: list[Any] = [1]
    mine.append({"again": mine})
    parcel = Parcel(1)
    parcel.weight = [parcel]
    order = Order(number="1")
    order.extra = order
    return [mine, parcel, order]


def nested(depth: int, value: Any = 0) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def chain(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = Parcel(value)
    return value


@pytest.mark.parametrize(
    "value",
    [
        *circular(),
        nested(150),
        nested(100_000),
        {"deep": nested(5_000, {"a": 1})},
        chain(300),
        chain(50_000),
        BadDict(a=1),
        NotText(),
        [iter([1])],
        {"a": itertools.repeat(1)},  # without an end
        sys.stdout,
        lambda: 1,
        {"a": {Loud(): 1}},
        type,
    ],
    ids=kind,
)
def test_nothing_is_too_odd_to_store(value: Any) -> None:
    content, stringified = to_jsonable(value)
    assert stringified is True
    assert canonical.loads(canonical.dumps(content)) == content
    assert returning(value).flags == {"stringified": True}


def test_it_works_near_the_recursion_limit() -> None:
    def deeper(left: int) -> Any:
        return to_jsonable({"a": [Decimal(1)]}) if left == 0 else deeper(left - 1)

    for depth in range(0, 1000, 10):
        try:
            content, _ = deeper(depth)
        except RecursionError:
            break  # the test itself has no room left
        canonical.dumps(content)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
others = st.decimals() | st.datetimes() | st.timedeltas() | st.uuids() | st.complex_numbers()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers())
anything = st.recursive(
    scalars | others | st.builds(object) | st.builds(Loud),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.builds(Parcel, inner)
    ),
    max_leaves=15,
)


@given(anything)
def test_any_value_becomes_json(value: Any) -> None:
    content, _ = to_jsonable(value)
    text = canonical.dumps(content)
    assert canonical.dumps(canonical.loads(text)) == text
    assert same(to_jsonable(content)[0], content)
    assert to_jsonable(content)[1] is False
    assert same(returning(value).content, content)


def test_a_result_that_does_not_fit_is_stored_as_returned() -> None:
    """One that fits is dumped by its annotation."""
    output = returning({"number": "1", "total": "2.50", "extra": math.nan}, Order)
    assert same(output.content, {"number": "1", "total": "2.50", "extra": math.nan}) and not output.flags
    assert (returning("5", int), returning(None, None)) == (ToolOutput(5), ToolOutput(None))
    misfit = [{"number": 1, "note": "x" * 100_000}]
    flags = {"misfit": "0.number: Input should be a valid string"}
    assert returning(misfit, list[Order]) == ToolOutput(misfit, flags)
    output = returning({"a": Loud()}, None)
    assert output.content == {"a": "<unprintable Loud>"}
    assert output.flags == {"misfit": "result: Input should be None", "stringified": True}


@pytest.mark.parametrize(
    ("annotation", "value", "flags"),
    [
        (dict, {"a": math.nan, "b": "\ud800\x00"}, {}),
        (bytes, b"\xff", {}),
        (dict[str, object], {"a": Loud()}, {"stringified": True}),
        (int, 10**5000, {"stringified": True}),
        (Loud, Loud(), {"stringified": True}),
        (list[Any], nested(5_000), {"stringified": True}),
        (NoReturn, 5, {}),
        (Iterator[int], [1, 2], {}),
        (Iterator[Decimal], map(Decimal, "12"), {}),
        (typing.Iterator, map(Decimal, "12"), {}),
    ],
    ids=kind,
)
def test_odd_results_with_an_annotation_are_stored_too(annotation: Any, value: Any, flags: Any) -> None:
    output = returning(value, annotation)
    assert output.flags == flags
    canonical.dumps(output.content)
    with pytest.raises(TypeError, match="Unheard"):
        returning(value, "Unheard")


@pytest.mark.parametrize(
    "error", [ValueError("x"), MemoryError(), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]
)
def test_what_a_handler_raises_comes_through_unchanged(error: BaseException) -> None:
    @tool
    def sync_fail() -> None:
        raise error

    @tool
    async def async_fail() -> None:
        raise error

    @tool
    def count(to: int = 3) -> Iterator[int]:
        yield from range(to)
        if to > 2:
            raise error

    for each, arguments in ((sync_fail, {}), (async_fail, {}), (count, {"to": 3})):
        with pytest.raises(type(error)):
            each.invoke(CONTEXT, arguments)
    assert count.invoke(CONTEXT, {"to": 2}) == ToolOutput([0, 1]), "a generator is run to its end"


variable = contextvars.ContextVar("variable", default="unset")


@tool
async def sleepy(ctx: ToolContext, a: int) -> list[Any]:
    await asyncio.sleep(0)
    return [ctx.call_id, a, variable.get()]


def test_async_tools_run_whether_there_is_a_loop_or_not() -> None:
    async def outside() -> list[Any]:
        variable.set("inner")
        below = await sync_to_async(sleepy.invoke)(CONTEXT, {"a": 2})
        return [sleepy.invoke(CONTEXT, {"a": 1}).content, below.content[:2]]

    @tool
    async def orm() -> int:
        return await sync_to_async(threading.get_ident)()

    @tool
    def hidden(a: int) -> Any:
        return sleepy(CONTEXT, a)

    variable.set("set")
    assert sleepy.invoke(CONTEXT, {"a": 1}).content == ["c", 1, "set"]
    assert asyncio.run(outside()) == [["c", 1, "inner"], ["c", 2]]
    assert orm.invoke(CONTEXT, {}).content == threading.get_ident(), "its sync part runs in this thread"
    assert hidden.invoke(CONTEXT, {"a": 4}).content[:2] == ["c", 4], "what returns an awaitable is awaited"
