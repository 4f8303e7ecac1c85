"""Arguments of every kind reach the handler as the same Python values, whoever dies in between."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NotRequired
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from agentruns import Agent, ToolContext, approve, run_agent, tool
from agentruns.engine.gate import call_digest
from agentruns.models import Approval, Run, Session
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.crash.processes import die
from tests.db.helpers import payloads, sound
from tests.effects import Effects

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]

GIVEN: dict[str, Any] = {
    "price": "1.10", "aware": "2026-03-29T01:30:00+01:00", "naive": "2026-03-29T02:30:00",
    "day": "2026-02-28", "at": "23:59:59.000001", "within": 90.5,
    "key": "018F0000-0000-7000-8000-00000000000A", "colour": "red", "level": 3, "missing": None,
    "either": "7", "ratio": 1e16,
    "parcel": {"sent": "2026-01-01T00:00:00Z", "to": {"street": "\u00c4 1", "since": "2020-01-01"}},
    "lines": [{"sku": "a", "price": "0.10"}], "prices": {"x": "1E+3"}, "pair": ["2026-01-01", "5"],
    "raw": "h\u00e9llo\x00", "payment": {"kind": "cash", "amount": 5},
}  # fmt: skip
# What the handler is to see; the values of factories are left out, for they are new each time they are made.
SEEN = {
    "price": "Decimal 1.10", "aware": "datetime 2026-03-29 01:30:00+01:00",
    "naive": "datetime 2026-03-29 02:30:00", "day": "date 2026-02-28", "at": "time 23:59:59.000001",
    "within": "timedelta 0:01:30.500000", "key": "UUID 018f0000-0000-7000-8000-00000000000a",
    "colour": "Colour Colour.RED", "level": "Level 3", "missing": "NoneType None", "either": "str 7",
    "ratio": "float 1e+16", "lines": "list [{'sku': 'a', 'price': Decimal('0.10')}]",
    "prices": "dict {'x': Decimal('1E+3')}", "pair": "tuple (datetime.date(2026, 1, 1), 5)",
    "raw": r"bytes b'h\xc3\xa9llo\x00'", "payment": "Cash kind='cash' amount=Decimal('5')",
}  # fmt: skip
NOW: Any = Field(default_factory=lambda: datetime.now(UTC))


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Cash(BaseModel):
    kind: Literal["cash"]
    amount: Decimal


class Address(BaseModel):
    street: str
    since: date
    tag: UUID = Field(default_factory=uuid4)


class Line(TypedDict):
    sku: str
    price: Decimal
    note: NotRequired[str]


@dataclass
class Parcel:
    sent: datetime
    to: Address
    tags: list[str] = field(default_factory=list)


def fresh() -> UUID:
    """Count outside how often a default is made: a second time would be another value."""
    Effects.from_environment().record("fresh")
    return uuid4()


def order(
    ctx: ToolContext, price: Decimal, aware: datetime, naive: datetime, day: date, at: time,
    within: timedelta, key: UUID, colour: Colour, level: Level, missing: int | None, either: int | str,
    ratio: float, parcel: Parcel, lines: list[Line], prices: dict[str, Decimal], pair: tuple[date, int],
    raw: bytes, request_id: Annotated[UUID, Field(default_factory=fresh)],
    payment: Annotated[Cash, Field(discriminator="kind")] | None = None, made: datetime = NOW,
) -> str:  # fmt: skip
    """Take an order and keep what it saw in the ledger."""
    arguments = {name: value for name, value in locals().items() if name != "ctx"}
    seen = {name: f"{type(value).__name__} {value}" for name, value in arguments.items()}
    Effects.from_environment().record(ctx.idempotency_key, tool=ctx.tool_name, seen=seen)
    if os.environ.get("ORDER_KILL") == seen["missing"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return "ordered"


for _name, _asks, _times in (("orders", False, 1), ("asks-to-order", True, 2)):
    _tool = tool(safe_to_retry=True, requires_approval=_asks)(order)
    _turns: list[Any] = [{"tools": [{"name": "order", "input": GIVEN}] * _times}, {"text": "all done"}]
    Agent(_name, instructions="Order.", tools=[_tool], model=ScriptedModel(_turns))


def ordered(effects: Effects) -> list[tuple[int, dict[str, str]]]:
    """Count how often the handler was entered for each call; it saw the same each time."""
    seen: dict[str, list[dict[str, str]]] = {}
    for line in effects.lines():
        if line["key"] != "fresh":
            seen.setdefault(line["key"], []).append(line["seen"])
    assert all(one == attempts[0] for attempts in seen.values() for one in attempts)
    return [(len(attempts), attempts[0]) for attempts in seen.values()]


def bound(arguments: dict[str, Any], digest: str, seen: dict[str, str], **edited: str) -> None:
    """Check that what the handler saw is what was given, recorded and hashed."""
    assert {name: seen[name] for name in SEEN} == {**SEEN, **edited}
    assert digest == call_digest(Session.objects.get().secret, "order", arguments)
    assert seen["request_id"] == f"UUID {arguments['request_id']}"
    assert seen["made"] == f"datetime {datetime.fromisoformat(arguments['made'])}"
    assert seen["parcel"].startswith("Parcel Parcel(sent=datetime.datetime(2026, 1, 1, 0, 0, tzinfo=")
    assert f"UUID('{arguments['parcel']['to']['tag']}')" in seen["parcel"]


def started(run: Run) -> list[str]:
    """List the digests of the attempts, and check the journal."""
    return [row["digest"] for row in payloads(sound(run), "tool_started")]


def test_a_default_is_made_once_and_every_process_sees_the_same_values(effects: Effects) -> None:
    die("run", "orders", "s1", at="after_reply", module=__name__)
    run = die("sweep", module=__name__, ORDER_KILL="NoneType None")
    assert sweep().completed == 1
    (call,) = payloads(run, "assistant")[0]["calls"]
    ((times, seen),) = ordered(effects)
    assert (times, effects.count("fresh"), started(run)) == (2, 1, [call["digest"]] * 3)
    bound(call["arguments"], call["digest"], seen)


def test_what_a_person_approved_is_what_every_attempt_is_given(effects: Effects) -> None:
    """Of two equal calls one is approved as it is, the other with an edit, and a process dies in that.

    The edit leaves out two arguments that have defaults: these are made anew, once.
    """
    run_agent("asks-to-order", "do it", "s1", idempotency_key="s1")
    plain, card = Approval.objects.order_by("requested_at", "pk")
    made = [(call["arguments"], call["digest"]) for call in payloads(plain.run, "assistant")[0]["calls"]]
    assert [(one.arguments, one.digest) for one in (plain, card)] == made
    approve(plain.pk, None, digest=plain.digest)
    shown = {**card.arguments, "price": "0.99", "missing": 4}
    del shown["request_id"], shown["made"]
    edited = approve(card.pk, None, digest=card.digest, arguments=shown)
    assert (edited.arguments | shown, edited.digest != card.digest) == (edited.arguments, True)
    assert edited.arguments["request_id"] != card.arguments["request_id"]
    run = die("sweep", module=__name__, ORDER_KILL="int 4")
    assert sweep().completed == 1
    (once, first), (twice, second) = ordered(effects)
    assert (once, twice, effects.count("fresh")) == (1, 2, 3)
    bound(plain.arguments, plain.digest, first)
    bound(edited.arguments, edited.digest, second, price="Decimal 0.99", missing="int 4")
    assert started(run) == [plain.digest, edited.digest, edited.digest]
    assert set(Approval.objects.values_list("status", flat=True)) == {"consumed"}
