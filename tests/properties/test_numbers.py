"""A number that is not finite passes no gate, wherever a parameter has a number and however it is written."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PlainSerializer,
    RootModel,
    create_model,
    field_serializer,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from agentruns import Agent, ToolContext, approve, run_agent, start_run, tool
from agentruns.exceptions import ApprovalStateError
from agentruns.journal import events
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.tools import InvalidArguments, Tool
from agentruns.tools.mcp.arguments import arguments_model
from agentruns.tools.signature import Signature
from tests.effects import Effects
from tests.rebuild import examples
from tests.shop.agents import act, call, shop_agent

T = TypeVar("T")
CONTEXT = ToolContext(run_id="r", call_id="c", tool_name="t", idempotency_key="k")


class Lax(BaseModel, Generic[T]):
    """Accepts every number by its own configuration, and writes NaN as null."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="null", extra="allow")
    inside: T


class Hidden(BaseModel):
    """Writes its number as a text."""

    inside: float

    @field_serializer("inside")
    def written(self, value: float) -> str:
        return str(value)


class Money:
    """No number to pydantic."""

    __slots__ = ("amount",)

    def __init__(self, amount: str) -> None:
        self.amount = Decimal(amount)


class Limit(float, Enum):
    SOME = 1.5
    NONE = math.inf
    ODD = math.nan


class Row(NamedTuple):
    name: str
    amount: float


class Entry(TypedDict):
    amount: complex


@dataclasses.dataclass
class Plain:
    amount: float | None


@dataclasses.dataclass(slots=True)
class Slotted:
    amount: float


@pydantic_dataclass
class Checked:
    amount: Annotated[Decimal, Field(allow_inf_nan=None)]


Written = Callable[[Any], Any]  # a number as its place in the input has it

Coined = Annotated[
    Any, AfterValidator(lambda text: Money(str(text))), PlainSerializer(lambda coin: str(coin.amount))
]

# A type with a number in it, how an input has that, and whether a text is read as a number there.
LEAVES: list[tuple[Any, Written, bool]] = [
    *((kind, lambda number: number, True) for kind in (float, float | None, Decimal, complex, int | float)),
    *((kind, lambda number: number, False) for kind in (Any, object, str | float, Limit)),
    *((kind, lambda number: {"amount": number}, True) for kind in (Plain, Slotted, Checked, Entry)),
    (dict, lambda number: {"inside": [number]}, False),
    (list, lambda number: [number], False),
    (Row, lambda number: ["a", number], True),
    (Hidden, lambda number: {"inside": number}, True),
    (Lax[int], lambda number: {"inside": 1, "more": number}, False),
    (Coined, lambda number: number, True),
    (Json[Any], lambda number: f"[{_json(number)}]", False),
    (dict[float, int], lambda number: {_text(number): 1}, True),
]
WRAPPERS: list[tuple[Callable[[Any], Any], Written]] = [
    (lambda kind: kind, lambda inner: inner),
    (lambda kind: kind | None, lambda inner: inner),
    (lambda kind: list[kind], lambda inner: [inner]),
    (lambda kind: Sequence[kind], lambda inner: [inner]),
    (lambda kind: tuple[int, kind], lambda inner: [1, inner]),
    (lambda kind: tuple[kind, ...], lambda inner: [inner]),
    (lambda kind: dict[str, kind], lambda inner: {"a": inner}),
    (lambda kind: Mapping[str, list[kind]], lambda inner: {"a": [inner]}),
    (lambda kind: Lax[kind], lambda inner: {"inside": inner}),
    (lambda kind: RootModel[kind], lambda inner: inner),
    (lambda kind: create_model("Made", at=(kind, Field(alias="inside"))), lambda inner: {"inside": inner}),
]
NUMBERS = [math.nan, math.inf, -math.inf]
TEXTS = ["NaN", "nan", "-inf", "Infinity", "-Infinity", "1e400", "-1e400"]


def _text(number: Any) -> str:
    return number if isinstance(number, str) else repr(number)


def _json(number: Any) -> str:
    named = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return named.get(repr(number), _text(number)) if isinstance(number, float) else "NaN"


@st.composite
def parameters(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """Draw a type, an input with a number that is not finite, and the same with a finite one."""
    kind, write, reads_texts = draw(st.sampled_from(LEAVES))
    number = draw(st.sampled_from([*NUMBERS, *TEXTS] if reads_texts else NUMBERS))
    if isinstance(number, str) and "1e400" in number and kind in (Decimal, Checked, Coined):
        number = "NaN"  # to a Decimal the other is finite
    bad, good = write(number), write(1.5)
    for wrap, written in draw(st.lists(st.sampled_from(WRAPPERS), max_size=2)):
        kind, bad, good = wrap(kind), written(bad), written(good)
    return kind, bad, good


def taking(kind: Any, entered: list[Any], asked: list[Any]) -> Tool:
    """Declare a tool with one parameter, and a gate that compares."""

    def asks(arguments: dict[str, Any], ctx: ToolContext) -> bool:
        asked.append(arguments)
        return False

    def pay(amount: Any) -> str:
        entered.append(amount)
        return "paid"

    pay.__annotations__["amount"] = kind
    return tool(pay, requires_approval=asks)


@settings(max_examples=examples(300, brief=60, long=3000))
@given(parameters())
def test_it_reaches_neither_gate_nor_handler(drawn: tuple[Any, Any, Any]) -> None:
    kind, bad, good = drawn
    entered: list[Any] = []
    asked: list[Any] = []
    pay = taking(kind, entered, asked)
    for amount, count in ((bad, 0), (good, 1)):
        turns = [{"tools": [call("pay", amount=amount)]}, {"text": "done"}]
        result = Agent("payer", instructions="Pay.", tools=[pay], model=ScriptedModel(turns)).run("pay")
        assert (len(asked), len(entered)) == (count, count), result.messages
        assert result.status == "completed"
    with pytest.raises(InvalidArguments, match=r"- amount"):
        pay.effective({"amount": bad})


@pytest.mark.parametrize(
    ("kind", "given", "place"),
    [
        (float, math.nan, "amount"),
        (list[list[float]], [[1], [2, "-inf"]], "amount.1.1"),
        (list[Plain], [{"amount": "1e400"}], "amount.0.amount"),
        (RootModel[list[Lax[float]]], [{"inside": "NaN"}], "amount.0.inside"),
        (dict[float, int], {"NaN": 1}, r"amount.\[key\]"),
        (Any, {"a": [math.inf]}, "amount.a.0"),
    ],
)
def test_the_model_is_told_where_it_is(kind: Any, given: Any, place: str) -> None:
    pay = taking(kind, [], [])
    with pytest.raises(InvalidArguments, match=rf"^Invalid arguments:\n- {place}: .* finite number.*$"):
        pay.effective({"amount": given})


Anything = Annotated[float, Field(allow_inf_nan=True)]


class Open(BaseModel):
    low: Anything = -math.inf
    high: float = Field(default=1, allow_inf_nan=True)
    amount: float = 1


class OpenEntry(TypedDict):
    low: Anything
    amount: float


class OpenRow(NamedTuple):
    low: Anything
    amount: float


@dataclasses.dataclass
class OpenPlain:
    low: Anything
    amount: float


@pytest.mark.parametrize(
    ("kind", "fits", "misfits"),
    [
        (Anything, "NaN", None),
        (Anything | None, math.inf, None),
        (Annotated[float | None, Field(allow_inf_nan=True)], math.nan, None),
        (Annotated[Decimal, Field(allow_inf_nan=True)], "NaN", None),
        (list[Anything], [1, "-inf"], None),
        (tuple[float, Anything], [1, math.nan], [math.nan, 1]),
        (dict[str, Anything], {"a": math.nan}, None),
        (dict[str, list[Anything] | str], {"a": [math.nan]}, None),
        (Open, {"low": math.nan, "high": math.inf}, {"low": math.nan, "amount": math.nan}),
        (OpenEntry, {"low": math.nan, "amount": 1}, {"low": 1, "amount": math.nan}),
        (OpenRow, [math.nan, 1], [1, math.nan]),
        (list[OpenPlain], [{"low": math.nan, "amount": 1}], [{"low": 1, "amount": math.nan}]),
        (list[Anything] | list[dict[str, float]], [math.nan], [{"a": math.nan}]),
    ],
)
def test_a_tool_may_allow_it_number_by_number(kind: Any, fits: Any, misfits: Any) -> None:
    entered: list[Any] = []
    pay = taking(kind, entered, [])
    pay.invoke(CONTEXT, pay.effective({"amount": fits}))
    assert len(entered) == 1
    if misfits is not None:
        with pytest.raises(InvalidArguments, match="finite"):
            pay.effective({"amount": misfits})


def test_a_name_is_no_number_and_json_of_a_server_has_none() -> None:
    names = [*TEXTS, "Nan"]
    for kind, said in ((str, "Nan"), (list[str], names), (dict[str, Any], {"NaN": names}), (Any, names)):
        assert taking(kind, [], []).effective({"amount": said}) == {"amount": said}
    schema = {"type": "object", "properties": {"amount": {"type": "number"}}}
    pay = taking(float, [], [])
    pay.signature = Signature(arguments_model("pay", schema, quotes=True), {}, None, "", schema, None)
    assert pay.effective({"amount": 1}) == {"amount": 1}
    with pytest.raises(InvalidArguments, match=r"- amount: .*finite"):
        pay.effective({"amount": math.nan})
    for once in (Iterable[float], Generator[float], list[Iterable[int]], Iterable):
        # It would be read to be stored, and the handler would receive nothing.
        with pytest.raises(TypeError, match=r"parameter 'amount' of tool 'pay' contains .* once.* Use list"):
            taking(once, [], [])


@pytest.mark.parametrize("default", [math.nan, "-inf", Field(default=math.inf)])
def test_a_default_is_finite_or_allowed(default: Any) -> None:
    def pay(amount: float = default) -> str:
        return "paid"

    with pytest.raises(TypeError, match=r"parameter 'amount' of tool 'pay'.* not a finite number.*allow_inf"):
        tool(pay)
    pay.__annotations__["amount"] = Anything
    allowed = tool(pay)
    assert not math.isfinite(allowed.effective({})["amount"])
    json.dumps(allowed.input_schema, allow_nan=False)
    assert allowed.input_schema["properties"]["amount"].get("default") in (None, "-inf")


def test_one_that_is_only_written() -> None:
    """A validator's object that no walk sees into, and whose JSON is a number."""
    hides = Annotated[Any, AfterValidator(lambda text: object()), PlainSerializer(lambda value: math.nan)]
    with pytest.raises(InvalidArguments, match=r"- amount: .*finite"):
        taking(hides, [], []).effective({"amount": "1"})


@tool(requires_approval=lambda args, ctx: args["amount"] > 50)
def transfer(ctx: ToolContext, amount: float) -> str:
    """Transfer."""
    return act("pay", ctx, amount=repr(amount))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("amount", ["NaN", math.nan, "-inf", "-1e400", -math.inf, -(10**400)])
def test_no_card_and_no_effect(amount: Any, effects: Effects) -> None:
    agent = shop_agent("payer", {"tools": [call("transfer", amount=amount)]}, tools=[transfer])
    result = run_agent(agent, "pay", "s1")
    assert (result.status, effects.count(), Approval.objects.count()) == ("completed", 0, 0)
    (row,) = Message.objects.filter(kind=events.TOOL_RESULT)
    assert row.payload["is_error"]
    assert "- amount: Input should be a finite number" in row.payload["content"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("amount", [math.nan, "-inf", "1e400"])
def test_an_edit_to_it_is_refused_and_costs_nothing(amount: Any, effects: Effects) -> None:
    agent = shop_agent("payer", {"tools": [call("transfer", amount=99)]}, tools=[transfer])
    (card,) = run_agent(agent, "pay", "s1").pending
    rows = Message.objects.count()
    with pytest.raises(ApprovalStateError, match="amount: Input should be a finite number"):
        approve(card.pk, None, arguments={"amount": amount}, digest=card.digest)
    assert (Approval.objects.get().status, Message.objects.count()) == ("pending", rows)
    approve(card.pk, None, arguments={"amount": 60}, digest=card.digest)
    assert (sweep().completed, effects.count()) == (1, 1)


@pytest.mark.django_db(transaction=True)
def test_a_context_is_finite() -> None:
    agent = shop_agent("payer", {"tools": []}, tools=[transfer])
    with pytest.raises(TypeError, match=r"JSON values: limits\.day is not finite"):
        start_run(agent, "pay", "s1", context={"limits": {"day": math.nan}})
    assert not Run.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_one_that_was_approved_before_does_not_run(effects: Effects) -> None:
    free = Annotated[float, Field(allow_inf_nan=True)]

    def declared(kind: Any) -> None:
        def move(ctx: ToolContext, amount: Any) -> str:
            return act("pay", ctx, amount=repr(amount))

        move.__annotations__["amount"] = kind
        turn = {"tools": [call("move", amount=math.nan)]}
        shop_agent("mover", turn, tools=[tool(move, requires_approval=True)])

    declared(free)
    start_run("mover", "move", "s1")
    sweep()
    approve(Approval.objects.get().pk, None)
    declared(float)  # as if code from before this rule had recorded the call
    assert sweep().waiting == 1
    assert (Run.objects.get().status, effects.count()) == ("awaiting-approval", 0)
    (row,) = Message.objects.filter(kind=events.APPROVAL_VOIDED)
    assert "finite number" in row.payload["why"]
