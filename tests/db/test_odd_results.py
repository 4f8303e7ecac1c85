"""Whatever a handler returns, its effect happened once, its result is kept, and Claude is asked on."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from types import MappingProxyType
from typing import Any, NoReturn
from unittest.mock import MagicMock
from uuid import UUID

import pytest
from django.utils.functional import SimpleLazyObject

from agentruns import Agent, NotOccurred, ToolContext, resume_run, run_agent, tool
from agentruns.models import Message, Run
from agentruns.providers.anthropic import AnthropicModel
from agentruns.testing import check_messages
from tests.db.helpers import forget_backoff, outcomes, payloads, run_turns, the_run
from tests.effects import Effects
from tests.fake_anthropic import FakeAnthropic
from tests.shop.agents import act
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)


class Mute:
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Endless:
    def __str__(self) -> str:
        return f"{self}"


class Slippery(dict[str, int]):
    def items(self) -> NoReturn:
        raise RuntimeError("not today")


class Size(Enum):
    BIG = "\x00big"


@dataclass
class Node:
    name: str
    next: Node | None = None
    at: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    seen: set[str] = field(default_factory=lambda: {"x"})


def circular(kind: type) -> Any:
    if kind is Node:
        node = Node("loop")
        node.next = node
        return node
    loop: Any = kind()
    loop.append(loop) if kind is list else loop.update(self=loop)
    return loop


def nested(levels: int, around: Callable[[Any], Any]) -> Any:
    """Build a value that has so many others around it."""
    deep: Any = Node("bottom")
    for _ in range(levels):
        deep = around(deep)
    return deep


def generated() -> Iterator[Any]:
    yield from ("\x00", math.nan, b"\xff")


# name -> a function that makes what the handler returns
ODD: dict[str, Callable[[], Any]] = {
    "nul": lambda: "a\x00b", "escape_character": lambda: "\x10NaN\x100000",
    "lone_surrogate": lambda: "a\ud800b\udfff", "surrogate_pair": lambda: "\ud83d\ude00",
    "emoji": lambda: "\U0001f600 e\u0301 \u202e\ufeff", "nan": lambda: math.nan,
    "infinity": lambda: [math.inf, -math.inf, {"x": math.nan}], "large_float": lambda: 1e16,
    "tiny_float": lambda: [5e-324, 1.7976931348623157e308, 0.1 + 0.2], "minus_zero": lambda: -0.0,
    "huge_int": lambda: 10**5000, "long_int": lambda: [2**63, -(2**64), 10**4000],
    "bytes": lambda: b"\x00\xff\xfe", "text_bytes": lambda: bytearray(b"plain"),
    "decimal": lambda: [Decimal("1.10"), Decimal("NaN"), Decimal("1E+99")],
    "datetime": lambda: [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=UTC), date(1, 1, 1)],
    "timedelta": lambda: timedelta.max, "uuid": lambda: UUID(int=0), "enum": lambda: Size.BIG,
    "set": lambda: {1, "a", None, Decimal(1)}, "tuple": lambda: (1, (2, frozenset([3]))),
    "none": lambda: None, "empty": lambda: ["", {}, []], "blank": lambda: "", "spaces": lambda: " \n\t ",
    "circular_list": lambda: circular(list), "circular_dict": lambda: circular(dict),
    "circular_object": lambda: circular(Node), "mute": Mute, "endless": Endless,
    "mute_inside": lambda: {"fine": 1, "mute": [Mute()]}, "slippery": lambda: Slippery(a=1),
    "lock": threading.Lock, "lambda": lambda: lambda: 1, "type": lambda: int,
    "exception": lambda: ValueError("\x00\ud800"), "mock": MagicMock,
    "mapping": lambda: MappingProxyType({"a": 1}), "range": lambda: range(3),
    "odd_keys": lambda: {1: "a", "1": "b", None: 1, (1, 2): 2, b"\xff": 3, math.nan: 4, False: 5},
    "odd_key_texts": lambda: {"\x00": 1, "b\ud800": 2, "\x10": 3, "": 4}, "generator": generated,
    "five_megabytes": lambda: "\x00\ud800" + "x\u20ac" * (5 * 2**20 // 4),
    "deep_list": lambda: nested(10_000, lambda deep: [deep]),
    "deep_dict": lambda: nested(10_000, lambda deep: {"down": deep}),
    "deep_objects": lambda: nested(1_000, lambda deep: Node("above", deep)),
    "broken_query": lambda: Order.objects.extra(where=["nonsense"]),
    "lazy": lambda: SimpleLazyObject(lambda: {"a": "\x00"}),
    "broken_lazy": lambda: SimpleLazyObject(lambda: 1 / 0),
}  # fmt: skip

# What Claude is told of some of them, and what the journal keeps.
TOLD = {
    "nul": "a\ufffdb", "escape_character": "\x10NaN\x100000", "lone_surrogate": "a\ufffdb\ufffd",
    "nan": '"NaN"', "infinity": '["Infinity","-Infinity",{"x":"NaN"}]', "large_float": "1e+16",
    "minus_zero": "-0.0", "bytes": "AP/+", "none": "null", "blank": "(no output)",
    "circular_list": '["<circular reference>"]', "mute": "<unprintable Mute>",
    "odd_key_texts": '{"":4,"\\u0010":3,"b\ufffd":2,"\ufffd":1}', "generator": '["\ufffd","NaN","/w=="]',
    "five_megabytes": "\ufffd\ufffd" + "x\u20ac" * (5 * 2**20 // 4),
}  # fmt: skip
KEPT = {
    "nul": "a\x00b", "lone_surrogate": "a\ud800b\udfff", "large_float": 1e16, "minus_zero": -0.0,
    "infinity": [math.inf, -math.inf, {"x": math.nan}], "long_int": [2**63, -(2**64), 10**4000],
}  # fmt: skip


@tool(refuses=ZeroDivisionError)  # of the broken lazy object, so that the rest is tried as well
def odd(ctx: ToolContext, kind: str) -> Any:
    """Act, and return something odd."""
    act("odd", ctx, kind=kind)
    return ODD[kind]()


@tool(refuses=ZeroDivisionError)
def typed(ctx: ToolContext, kind: str) -> str:
    """Act, and return something else than was said."""
    act("typed", ctx, kind=kind)
    made: str = ODD[kind]()
    return made


@tool(safe_to_retry=True, parallel=True)
def read(ctx: ToolContext, kind: str) -> list[Any]:
    """Act in a thread."""
    act("read", ctx, kind=kind)
    made: list[Any] = ODD[kind]()
    return made


@tool(transactional=True)
def booked(ctx: ToolContext, kind: str) -> dict[str, Any]:
    """Act in the transaction that keeps the result."""
    Order.objects.create(number=ctx.idempotency_key[:20], customer=kind, total_cents=1)
    made: dict[str, Any] = ODD[kind]()
    return made


def calls(name: str, kinds: Any) -> list[dict[str, Any]]:
    return [{"name": name, "input": {"kind": kind}} for kind in kinds]


LIGHT = [kind for kind in ODD if kind != "five_megabytes"]
TURNS: list[dict[str, Any]] = [
    *({"tools": calls(name, kinds)} for name, kinds in (("odd", ODD), ("read", LIGHT), ("booked", LIGHT))),
    {"tools": calls("typed", ODD)},
    *({"tools": calls("odd", [kind])} for kind in ("nul", "nan", "mute", "deep_list")),
    {"text": "all done"},
]


def results(run: Run) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield tool, kind and result of each call, which has exactly one."""
    rows = list(Message.objects.filter(run=run, kind="tool_result"))
    kept = {row.call_id: row.payload for row in rows}
    made = [call for reply in payloads(run, "assistant") for call in reply["calls"]]
    assert sorted(row.call_id for row in rows) == sorted(call["id"] for call in made)
    for call in made:
        yield call["tool"], call["arguments"]["kind"], kept[call["id"]]


def acted(effects: Effects) -> Counter[tuple[str, str]]:
    """Count what really happened, outside and in the database, by tool and kind."""
    outside = Counter((line["tool"], line["kind"]) for line in effects.lines())
    return outside + Counter(("booked", order.customer) for order in Order.objects.all())


def test_the_next_request_goes_out_whatever_a_handler_returned(effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_RESULT_SENT_MAX = None
    with FakeAnthropic(TURNS, faults={2: 529}, window=100_000_000) as fake:
        model = AnthropicModel("claude-sonnet-5-5", fake.client(), context_window=100_000_000)
        agent = Agent("odd", instructions="Be odd.", tools=[odd, typed, read, booked], model=model)
        first = run_agent(agent, "do it", "s1", idempotency_key="k")
        assert first.status == "queued"
        assert first.error == "overloaded_error: Anthropic answered 529: Overloaded"
        run = the_run(first)
        forget_backoff(run)
        result = resume_run(run.pk)
    assert (result.status, [call.error for call in fake.calls if call.status == 400]) == ("completed", [])
    bodies = [call.body for call in fake.calls]
    assert len(bodies) == len(TURNS) + 1
    assert bodies[1] == bodies[2], "what was read back is what was said live"
    run = the_run(result)
    done, expected = acted(effects), Counter[tuple[str, str]]()
    for name, kind, kept in results(run):
        rolled_back = name == "booked" and kept["outcome"] == "error"
        expected[name, kind] += not rolled_back
        assert kept["outcome"] == ("error" if kind == "broken_lazy" or rolled_back else "ok"), (name, kind)
        assert not rolled_back or kind in ("broken_lazy", "broken_query")
        if name == "odd" and kind in KEPT:
            assert repr(kept["content"]) == repr(KEPT[kind])
    assert done == +expected
    told = dict(zip(ODD, bodies[2]["messages"][2]["content"], strict=False))
    assert {kind: told[kind]["content"] for kind in TOLD} == TOLD


@pytest.mark.parametrize(
    "options",
    [{"safe_to_retry": True}, {"refuses": ValueError}, {"reconcile": lambda ctx, args: NotOccurred()}],
    ids=lambda options: next(iter(options)),
)
def test_what_a_handler_says_as_it_raises_is_kept_too(options: dict[str, Any], effects: Effects) -> None:
    @tool(**options)
    def raising(ctx: ToolContext, kind: str) -> str:
        act("raising", ctx, kind=kind)
        raise ValueError(ODD[kind]())

    kinds = [kind for kind in ODD if kind != "broken_lazy"]
    result = run_turns({"tools": calls("raising", kinds)}, tools=[raising])
    run = the_run(result)
    assert (run.status, outcomes(run), effects.count()) == ("completed", ["error"] * len(kinds), len(kinds))
    check_messages(result.messages)
