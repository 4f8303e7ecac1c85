from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncIterator, Callable, Set as AbstractSet
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypedDict
from uuid import UUID, uuid4

import pytest
from hypothesis import example, given, strategies as st
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    Secret,
    SecretBytes,
    SecretStr,
    Strict,
    computed_field,
)

from agentruns.tools import InvalidArguments, NotOccurred, Occurred, Tool, ToolContext, Unknown, tool
from agentruns.utils import json as canonical

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTypeCheckers


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class Line(BaseModel):
    sku: str
    price: Decimal
    at: datetime | None = None
    note: Any = None


class Node(BaseModel):
    title: str
    children: list[Node] = []


class Hidden(BaseModel):
    tokens: list[SecretStr]


class Basket(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lines: list[Line]

    @computed_field
    def total(self) -> Decimal:
        return sum((line.price for line in self.lines), Decimal(0))


class StrictLine(BaseModel):
    model_config = ConfigDict(strict=True)

    due: datetime
    amount: Decimal


@dataclass
class Parcel:
    weight: float
    tags: set[str]


class Typed(TypedDict):
    tags: frozenset[str]


def context(**changes: Any) -> ToolContext:
    given: dict[str, Any] = {"run_id": "r", "call_id": "c", "tool_name": "t", "idempotency_key": "k"}
    return ToolContext(**{**given, **changes})


# Declaration


def test_a_tool_is_still_the_function() -> None:
    @tool
    def add(a: int, b: int = 2) -> int:
        """Add."""
        return a + b

    @tool
    async def later(a: int) -> int:
        return a

    assert isinstance(add, Tool)
    assert (add(1), add(a=1, b=1), asyncio.run(later(3))) == (3, 2, 3)
    assert (add.__name__, add.__doc__, repr(add)) == ("add", "Add.", "<Tool add>")


def test_schema_and_descriptions_come_from_signature_and_docstring() -> None:
    @tool
    def refund(
        ctx: ToolContext,
        order_id: str,
        cents: Annotated[int, Field(gt=0, description="from Field")],
        reason: Literal["late", "broken"] = "late",
        title: str | None = None,
    ) -> None:
        """Refund an order.

        Only once.

        Args:
            ctx: not shown
            order_id (str): the shop's number,
                as printed: on the invoice
            cents: ignored, Field wins
            title: of the letter

        Returns:
            nothing
        """

    assert refund.description == "Refund an order.\n\nOnly once."
    assert refund.input_schema == {
        "type": "object",
        "additionalProperties": False,
        "required": ["order_id", "cents"],
        "properties": {
            "order_id": {"type": "string", "description": "the shop's number, as printed: on the invoice"},
            "cents": {"type": "integer", "exclusiveMinimum": 0, "description": "from Field"},
            "reason": {"type": "string", "enum": ["late", "broken"], "default": "late"},
            "title": {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "default": None,
                "description": "of the letter",
            },
        },
    }
    described = {"description": refund.description, "input_schema": refund.input_schema}
    assert refund.provider_schema() == {"name": "refund", **described}


def test_titles_go_and_properties_called_title_stay() -> None:
    @tool
    def plant(tree: Node, options: dict[str, str] = {"title": "x"}) -> str:  # noqa: B006
        """Plant."""
        return tree.children[0].title

    text = canonical.dumps(plant.input_schema)
    assert set(plant.input_schema["$defs"]["Node"]["properties"]) == {"title", "children"}
    assert plant.input_schema["properties"]["options"]["default"] == {"title": "x"}
    assert '"title":"' not in text.replace('"title":"x"', "")
    arguments = plant.effective({"tree": {"title": "a", "children": [{"title": "b"}]}})
    assert plant.invoke(context(), arguments).content == "b"


def test_a_name_can_be_given_but_none_that_providers_refuse_and_only_to_a_function() -> None:
    @tool(name="shop-refund", description="Given.")
    def refund() -> None:
        """Read."""

    assert (refund.name, refund.description) == ("shop-refund", "Given.")
    assert refund.input_schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert (tool(function).description, refund.effective({})) == ("", {})
    for name in ("", "a b", "é", "x" * 65, "a.b", "a\n"):
        with pytest.raises(TypeError, match="cannot be named"):
            tool(name=name)(lambda: None)
    for wrong, why in ((lambda: None, "<lambda>"), (Line, "declares a function"), (refund, "tool already")):
        with pytest.raises(TypeError, match=why):
            tool(wrong)


def test_the_context_is_found_by_annotation_anywhere_and_so_are_types_local_to_a_function() -> None:
    class Local(BaseModel):
        a: int

    @tool
    def first(c: ToolContext, a: Local) -> Any:
        return c.call_id, a.a

    @tool(risk="low")
    def last(a: Local, *, c: Annotated[ToolContext | None, "any"] = None) -> Any:
        return c and c.call_id, a.a

    for each in (first, last):
        assert set(each.input_schema["properties"]) == {"a"}
        assert each.invoke(context(call_id="x"), {"a": {"a": 1}}).content == ["x", 1]


def test_signatures_that_no_model_can_fill_are_refused() -> None:
    def rest(*args: int) -> None: ...
    def keywords(**options: int) -> None: ...
    def positional(a: int, /) -> None: ...
    def bare(a) -> None: ...  # type: ignore[no-untyped-def]
    def both(a: ToolContext, b: ToolContext) -> None: ...
    def pay(amount: OnlyForTypeCheckers) -> None: ...
    def call_me(back: Callable[[], int]) -> None: ...
    def take(what: inspect.Signature) -> None: ...
    def aliased(x: Annotated[int, Field(alias="y")]) -> None: ...
    def misfit(a: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013
    async def stream() -> AsyncIterator[int]:
        yield 1

    refused = {
        **{fn: f"[Tt]ool '{fn.__name__}'" for fn in (rest, keywords, positional, bare)},
        both: "two ToolContext",
        pay: "OnlyForTypeCheckers.*TYPE_CHECKING",
        call_me: "cannot be described",
        take: "cannot be described",
        aliased: "alias",
        misfit: "default of parameter 'a'.*None",
        stream: "async generator",
    }
    for fn, words in refused.items():
        with pytest.raises(TypeError, match=words):
            tool(fn)


@pytest.mark.parametrize(
    "annotation",
    [
        set[int], frozenset[str], set, AbstractSet[int], list[set[int]], dict[str, set[int] | None],
        Annotated[set[int], "x"], SecretStr, SecretBytes, Secret[int], list[SecretStr] | None, Hidden,
        list[Hidden], Parcel, Typed, dict[str, Annotated[list[Hidden], "x"]],
    ],
)  # fmt: skip
def test_sets_and_secrets_are_refused_however_deep(annotation: Any) -> None:
    def fn(value: Any) -> None: ...

    fn.__annotations__["value"] = annotation
    with pytest.raises(TypeError, match="parameter 'value' of tool 'fn'"):
        tool(fn)


def always(args: Any, ctx: Any) -> bool:
    return True


async def coroutine() -> None: ...


def function() -> None: ...


HOUR = timedelta(hours=1)
TOO_LATE = {"remind_after": HOUR, "escalate_after": HOUR, "escalate_to": "managers"}
THREE = dict.fromkeys(("transactional", "parallel", "safe_to_retry"), True)
WRONG: dict[str, list[Any]] = {
    "safe_to_retry": ["yes"], "transactional": [1], "parallel": [None], "approvals": [0, True, 1.5],
    "risk": ["huge"], "sensitive": ["card"], "timeout": [0, math.nan, "5", True], "expires_in": [5],
    "requires_approval": ["yes"], "approvers": [3], "describe": ["text"], "reconcile": [True],
    "untrusted": ["mail"], "outward": [1, None],
    "holds": ["paid"], "remind_after": [5], "escalate_to": [3],
}  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "options", "words"),
    [
        (function, {"parallel": True}, ["parallel", "safe_to_retry"]),
        (coroutine, {"transactional": True}, ["transactional", "async"]),
        (function, THREE, ["transactional", "parallel"]),
        (function, {"transactional": True, "timeout": 1}, ["transactional", "timeout"]),
        (function, {"transactional": True, "reconcile": always}, ["transactional", "reconcile"]),
        (function, {"transactional": True, "safe_to_retry": True}, ["transactional", "safe_to_retry"]),
        (function, {"safe_to_retry": True, "reconcile": always}, ["safe_to_retry", "reconcile"]),
        (function, {"sensitive": ["card"]}, ["sensitive", "card"]),
        (function, {"timeout": timedelta(seconds=-1)}, ["timeout", "-1"]),
        (function, {"expires_in": timedelta(0)}, ["expires_in"]),
        (function, {"escalate_to": "managers"}, ["escalate_to", "requires_approval=False"]),
        (function, {"requires_approval": True, "escalate_to": "managers"}, ["escalate_after", "escalate_to"]),
        (function, {**TOO_LATE, "requires_approval": True}, ["remind_after", "escalate_after"]),
        (function, {"risk": "high", "untrusted": True}, ["risk='high'", "requires_approval=False"]),
        (function, {"holds": always}, ["holds", "requires_approval=False"]),
        *((function, {name: value}, [name, repr(value)]) for name, wrong in WRONG.items() for value in wrong),
    ],
)
def test_contradictions_are_type_errors_that_name_both(fn: Any, options: Any, words: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        tool(fn, **options)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("options", "recovery"),
    [
        ({"requires_approval": True, "approvers": "x", "expires_in": timedelta(hours=1)}, "nothing"),
        ({"parallel": True, "safe_to_retry": True, "requires_approval": True}, "safe_to_retry"),
        ({"transactional": True, "requires_approval": always, "risk": "high"}, "transactional"),
        ({"reconcile": always, "timeout": timedelta(minutes=1)}, "reconcile"),
        ({"outward": True, "approvers": "x", "approvals": 2, "risk": "high", "deferred": True}, "nothing"),
        ({"outward": True, "untrusted": True, "expires_in": timedelta(hours=1)}, "nothing"),
        ({"transactional": True, "requires_approval": True, "holds": always}, "transactional"),
    ],
)
def test_what_does_not_contradict_is_allowed(options: Any, recovery: str) -> None:
    assert tool(function, **options).recovery == recovery


def test_the_definition_says_what_comes_in_and_goes_out_only_where_it_does() -> None:
    both = tool(function, untrusted=True, outward=True).policy()
    assert both == {**tool(function).policy(), "untrusted": True, "outward": True}


def test_policy_is_json_and_complete() -> None:
    @tool(
        requires_approval=always, approvers="Support leads", approvals=2, expires_in=timedelta(hours=2),
        risk="high", reconcile=always, timeout=timedelta(minutes=1), sensitive=("card", "b"),
    )  # fmt: skip
    def pay(b: int, card: str) -> None:
        """Pay."""

    policy = pay.policy()
    assert canonical.loads(canonical.dumps(policy)) == policy
    assert policy == {
        **pay.provider_schema(), "requires_approval": "predicate", "approvers": "Support leads",
        "approvals": 2, "expires_in": 7200.0, "risk": "high", "safe_to_retry": False,
        "transactional": False, "reconcile": True, "parallel": False, "timeout": 60.0,
        "sensitive": ["b", "card"],
    }  # fmt: skip
    assert tool(function).policy()["requires_approval"] is False
    assert tool(function, requires_approval=True, holds=always).policy()["holds"] is True


# Effective arguments


@tool
def everything(
    amount: Decimal,
    when: datetime,
    line: Line,
    kind: Literal["a", "b"],
    size: Size,
    id: UUID,
    maybe: Optional[int] = None,  # noqa: UP045
    lines: list[Line] = Field(default_factory=list),  # noqa: B008
    span: timedelta = timedelta(hours=1),
    pair: tuple[int, date] | None = None,
    raw: bytes = b"",
    anything: Any = None,
    parsed: Json[list[int]] = "[1]",  # type: ignore[assignment]
) -> str:
    assert isinstance(amount, Decimal) and isinstance(when, datetime) and isinstance(line, Line)
    assert isinstance(size, Size) and isinstance(id, UUID) and isinstance(span, timedelta)
    assert isinstance(line.price, Decimal) and parsed == [1]
    return f"{amount} {when:%Y} {line.price} {kind} {size.name} {maybe} {len(lines)} {pair} {raw!r}"


def test_values_are_coerced_dumped_and_given_back_as_python_objects() -> None:
    raw = {
        "amount": "1.10", "when": "2026-01-02T03:04:05.678901Z", "line": {"sku": "x", "price": 2},
        "kind": "a", "size": "l", "id": str(uuid4()), "pair": [1, "2026-01-02"], "raw": "né",
    }  # fmt: skip
    effective = everything.effective(raw)
    assert effective == {
        **raw,
        "line": {"sku": "x", "price": "2", "at": None, "note": None},
        "maybe": None,
        "lines": [],
        "span": "PT1H",
        "anything": None,
        "parsed": "[1]",
    }
    assert everything.effective(effective) == effective
    said = everything.invoke(context(), effective).content
    assert said.startswith("1.10 2026 2 a LARGE None 0 (1, datetime.date(2026, 1, 2))")


def test_defaults_and_factories_are_frozen_into_the_effective_arguments() -> None:
    made: list[UUID] = []

    def make() -> UUID:
        made.append(uuid4())
        return made[-1]

    @tool
    def book(ref: Annotated[UUID, Field(default_factory=make)], at: Decimal = 0) -> str:  # type: ignore[assignment]
        return str(ref)

    effective = book.effective({})
    assert effective == {"ref": str(made[0]), "at": "0"}
    assert book.invoke(context(), effective).content == str(made[0])
    assert len(made) == 1


def test_reserved_names_work_as_parameters() -> None:
    @tool(sensitive=["_private"])
    def odd(copy: int, _private: int, model_config: str, schema: int = 1, validate: bool = False) -> Any:
        return [copy, _private, model_config, schema, validate]

    effective = odd.effective({"copy": 1, "_private": 2, "model_config": "x"})
    assert effective == {"copy": 1, "_private": 2, "model_config": "x", "schema": 1, "validate": False}
    assert odd.invoke(context(), effective).content == [1, 2, "x", 1, False]
    assert odd.title(effective) == "odd(copy=1, _private=***, model_config='x', schema=1, validate=False)"


def test_computed_and_strict_fields_read_back() -> None:
    @tool
    def pay(basket: Basket, line: StrictLine, n: Annotated[int, Strict()]) -> str:
        return f"{basket.total} {line.amount}"

    raw = {
        "basket": {"lines": [{"sku": "a", "price": "1.5"}]},
        "line": {"due": "2026-01-01T00:00:00Z", "amount": "3"},
        "n": 1,
    }
    assert pay.invoke(context(), pay.effective(raw)).content == "1.5 3"
    with pytest.raises(InvalidArguments, match="n:"):
        pay.effective({**raw, "n": "1"})


@pytest.mark.parametrize(
    "raw",
    [
        {}, {"a": 1, "b": 2}, {"a": object()}, {1: 2}, {"a": None}, {"a": 10**5000}, {"a": "\ud800"},
        {"a": math.nan},
    ],
    ids=lambda raw: type(raw.get("a")).__name__,
)  # fmt: skip
def test_invalid_input_is_always_invalid_arguments(raw: Any) -> None:
    @tool
    def take(a: int) -> None: ...

    with pytest.raises(InvalidArguments) as caught:
        take.effective(raw)
    assert isinstance(caught.value, ValueError)
    for other in (None, "text", 3, [], [raw], True, math.nan, object()):
        with pytest.raises(InvalidArguments, match="must be a JSON object"):
            take.effective(other)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_the_text_goes_field_by_field_and_stays_short() -> None:
    @tool
    def take(a: int, lines: list[Line]) -> None: ...

    huge = "x" * 1_000_000
    with pytest.raises(InvalidArguments) as caught:
        take.effective({"a": huge, "lines": [{"sku": huge, "price": huge}], huge: huge})
    text = str(caught.value)
    assert len(text) < 600
    assert "- a: " in text and "- lines.0.price: " in text and "Parameters: a, lines." in text
    with pytest.raises(InvalidArguments) as caught:
        take.effective({"a": 1, "lines": [{}] * 1000})
    assert "and 1990 more" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_coercer_that_is_no_fixed_point_or_breaks_is_refused() -> None:
    def explode(value: Any) -> Any:
        raise ZeroDivisionError(f"secret {value}")

    @tool
    def break_it(text: Annotated[str, BeforeValidator(explode)]) -> None: ...

    @tool
    def post(text: Annotated[str, BeforeValidator(lambda value: f"{value}!")], other: int = 1) -> None: ...

    with pytest.raises(InvalidArguments, match=r"^text: .*read back"):
        post.effective({"text": "a"})
    with pytest.raises(InvalidArguments, match="ZeroDivisionError") as caught:
        break_it.effective({"text": "a"})
    assert "secret" not in str(caught.value)


finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@example([1e16, 1e-7, -0.0, 10**30, "\x00", "\ud800", "\x10", "é", True, None])
@given(json_values)
def test_any_input_is_effective_or_invalid_and_any_json_is_as_it_is(value: Any) -> None:
    effective = anything_goes.effective({"a": value})
    assert canonical.dumps(effective) == canonical.dumps({"a": value})
    assert canonical.dumps(anything_goes.invoke(context(), effective).content) == canonical.dumps(value)
    assert anything_goes.effective(effective).keys() == {"a"}
    for raw in (value, {"amount": value, "line": value, "kind": value}):
        try:
            effective = everything.effective(raw)
        except InvalidArguments as error:
            assert len(str(error)) < 3000
        else:
            assert canonical.dumps(everything.effective(effective)) == canonical.dumps(effective)


@tool
def anything_goes(a: Any) -> Any:
    return a


def test_deep_and_circular_input_and_arguments_that_are_not_effective_are_refused() -> None:
    entered: list[int] = []

    @tool
    def take(a: int, b: int = 2) -> None:
        entered.append(a)

    for arguments in ({"a": "1", "b": 2}, {"a": 1}, {"a": "x", "b": 2}):
        with pytest.raises(InvalidArguments):
            take.invoke(context(), arguments)
    circle: list[Any] = []
    circle.append(circle)
    for value in (circle, nested(100_000)):
        with pytest.raises(InvalidArguments):
            anything_goes.effective({"a": value})
    assert not entered


# Gates, titles, previews


@pytest.mark.parametrize(
    ("verdict", "asks"), [(True, True), (False, False), (1, True), (0, False), ("", False), (None, True)]
)
def test_a_predicate_decides(verdict: Any, asks: bool) -> None:
    async def later(args: Any, ctx: Any) -> Any:
        return args["a"]

    for gate in (lambda args, ctx: args["a"], later):
        assert tool(anything_goes.fn, requires_approval=gate).asks({"a": verdict}, context()) is asks
    if isinstance(verdict, bool):
        assert tool(function, requires_approval=verdict).asks({}, context()) is asks


class Undecided:
    def __bool__(self) -> bool:
        raise RuntimeError("neither")


def broken(args: Any, ctx: Any) -> Any:
    raise KeyError("x")


@pytest.mark.parametrize("gate", [broken, lambda args, ctx: Undecided()], ids=["raises", "undecided"])
def test_a_gate_that_fails_asks(gate: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="agentruns.tools"):
        assert tool(function, requires_approval=gate).asks({}, context()) is True
    assert "a person is asked" in caplog.text


def test_hooks_get_a_copy() -> None:
    def spoil(*found: Any) -> Any:
        for each in found:
            if isinstance(each, dict):
                each["a"].append("spoilt")
        return "ok"

    @tool(requires_approval=spoil, describe=spoil, preview=spoil, reconcile=spoil)
    def take(a: list[int]) -> None: ...

    arguments: dict[str, Any] = {"a": [1]}
    take.asks(arguments, context())
    take.title(arguments)
    take.preview_of(arguments)
    take.run_reconcile(context(), arguments)
    assert arguments == {"a": [1]}


def test_titles_are_what_describe_says_or_else_the_call_and_never_raise() -> None:
    @tool(describe=lambda args: f"Refund  {args['a']}\nnow\u202e\x00", sensitive=["b"])
    def pay(a: Any, b: str = "") -> None: ...

    assert pay.title({"a": 5}) == r"Refund 5 now\u202e\x00"
    whole = tool(pay.fn, describe=str, sensitive=["b"])
    assert whole.title({"a": 5, "b": "4242", "B": "4242"}) == "{'a': 5, 'b': '***', 'B': '***'}"
    for wrong in (lambda args: args["no"], lambda args: 3, lambda args: "  ", lambda args: 1 / 0):
        other = tool(pay.fn, describe=wrong, sensitive=["b"])
        assert other.title({"a": "x", "b": "4242"}) == "pay(a='x', b=***)"
    assert len(pay.title({"a": "y" * 10_000})) == 200
    deep = {"a": {"b": {"c": {}}}}
    for value in (10**5000, "x" * 10**6, nested(50_000), deep, "a\nb", "\ud800", math.nan, [1] * 9):
        title = tool(anything_goes.fn).title({"a": value})
        assert title.startswith("anything_goes(a=") and len(title) <= 200 and title.isprintable()


def test_previews() -> None:
    @tool(preview=lambda args: {"before": Decimal("1.5"), "after": args["a"], "links": []})
    def set_price(a: int) -> None: ...

    assert set_price.preview_of({"a": 2}) == {"before": "1.5", "after": 2, "links": []}
    without: list[Any] = [None, lambda args: "no dict", lambda args: 1 / 0]
    assert [tool(set_price.fn, preview=each).preview_of({"a": 2}) for each in without] == [None] * 3


# Reconcile


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_reconcile_answers() -> None:
    seen = []

    def ask(ctx: ToolContext, args: dict[str, Any]) -> Any:
        seen.append((ctx.idempotency_key, args))
        return answer

    async def ask_later(ctx: ToolContext, args: dict[str, Any]) -> Any:
        return answer

    @tool(reconcile=ask)
    def pay(a: int) -> dict[str, Decimal]:
        return {}

    for answer in (Occurred({"a": Decimal("1.5")}), NotOccurred(), Unknown("no idea"), Occurred()):
        for each in (pay, tool(pay.fn, reconcile=ask_later)):
            verdict = each.run_reconcile(context(), {"a": 1})
            assert type(verdict) is type(answer)
            if isinstance(verdict, Unknown):
                assert verdict.reason == "no idea"
    assert seen[0] == ("k", {"a": 1})
    answer = Occurred({"a": Decimal("1.50")})
    assert pay.run_reconcile(context(), {"a": 1}) == Occurred({"a": "1.50"})


@pytest.mark.parametrize(
    "answer",
    [None, True, "occurred", Occurred, NotOccurred, {}, ValueError("boom"), Rude(), TimeoutError()],
    ids=lambda answer: type(answer).__name__,
)
def test_any_other_answer_or_error_is_unknown(answer: Any) -> None:
    def ask(ctx: Any, args: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    verdict = tool(function, reconcile=ask).run_reconcile(context(), {})
    why = type(answer).__name__ if isinstance(answer, Exception) else "reconcile returned"
    assert isinstance(verdict, Unknown) and why in verdict.reason
    assert isinstance(tool(function).run_reconcile(context(), {}), Unknown), "without it nothing is known"


# The context


def test_the_context_asks_the_engine_and_does_nothing_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    ctx = context()
    assert ctx.is_cancelled() is False
    ctx.heartbeat()
    with caplog.at_level(logging.INFO, logger="agentruns.tools"):
        ctx.progress("half way")
    assert "half way" in caplog.text
    with pytest.raises(AttributeError):
        ctx.attempt = 2  # type: ignore[misc]
    beats: list[str] = []
    ctx = context(_is_cancelled=lambda: True, _heartbeat=lambda: beats.append("beat"))
    ctx.heartbeat()
    assert ctx.is_cancelled() and beats == ["beat"]


class Both(BaseModel):
    """A condition: pydantic tries both types of each part."""

    parts: list[Both | Either] = []
    first: Both | Either | None = None


class Either(BaseModel):
    """Another condition with the same members."""

    parts: list[Both | Either] = []
    first: Both | Either | None = None


class Leaf(BaseModel):
    kind: Literal["leaf"]


class Branch(BaseModel):
    kind: Literal["branch"]
    first: Annotated[Branch | Leaf, Field(discriminator="kind")] | None = None


def test_a_union_in_a_recursive_type_takes_no_exponential_time() -> None:
    @tool
    def search(condition: Both | Either) -> str:
        """Search."""
        return ""

    @tool
    def plain(condition: Both, more: Any = None) -> str:
        """Take no union at the top."""
        return ""

    @tool
    def named(condition: Branch) -> str:
        """Take parts that say which type they are."""
        return ""

    def nested(levels: int, **leaf: Any) -> dict[str, Any]:
        for _level in range(levels):
            leaf = {"kind": "branch", "first": leaf} if "kind" in leaf else {"first": leaf}
        return leaf

    for levels in (17, 60):
        with pytest.raises(InvalidArguments, match="nested too deeply: each level has several types"):
            search.effective({"condition": nested(levels)})
    with pytest.raises(InvalidArguments, match="nested too deeply"):
        search.effective({"condition": nested(9, parts=[{"parts": [{}]}] * 200)})
    assert search.effective({"condition": nested(8, parts=[{}] * 20)})
    assert named.effective({"condition": nested(50, kind="leaf")})
    assert plain.effective({"condition": {"parts": [{}, {}]}, "more": 1})
