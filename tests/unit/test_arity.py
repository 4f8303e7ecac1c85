"""A function that a project declares takes what it will be called with, or its declaration is refused."""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentruns import Agent, Policy, mcp_tools, tool
from agentruns.checks.settings import check_notifiers, check_values
from agentruns.journal.outbox import load_notifier
from agentruns.testing import ScriptedModel


def pay(amount: int) -> str:
    """Pay."""
    return "paid"


class Asked:
    """A callable object, and a method to be bound."""

    def __call__(self, arguments: Any, ctx: Any) -> bool:
        return True

    def gate(self, arguments: Any, ctx: Any) -> bool:
        return True

    def one(self, arguments: Any) -> bool:
        return True


async def waits(arguments: Any, ctx: Any) -> bool:
    return True


def none() -> Any: ...
def one(first: Any) -> Any: ...
def two(first: Any, second: Any) -> Any: ...
def three(first: Any, second: Any, third: Any) -> Any: ...
def named(first: Any, *, second: Any) -> Any: ...
def anything(*args: Any) -> Any: ...
def optional(first: Any, second: Any = None, third: Any = None) -> Any: ...


OPTIONS = {
    "requires_approval": ("f(arguments, ctx)", [none, one, three, named, Asked().one, str.upper]),
    "describe": ("f(arguments)", [none, two, named, functools.partial(one, 1)]),
    "preview": ("f(arguments)", [none, two, Asked()]),
    "reconcile": ("f(ctx, arguments)", [none, one, three, lambda arguments: None]),
    "refuses": ("f(error)", [none, two, lambda: True]),
}


@pytest.mark.parametrize(("option", "wrong"), [(name, one) for name in OPTIONS for one in OPTIONS[name][1]])
def test_a_function_of_another_arity_is_refused(option: str, wrong: Any) -> None:
    """It would be called once a model asks, and fail: each call would ask a person, or none know why."""
    with pytest.raises(TypeError) as caught:
        tool(pay, **{option: wrong})
    assert all(word in str(caught.value) for word in ("Tool 'pay'", option, OPTIONS[option][0])), caught.value


@pytest.mark.parametrize(
    ("option", "right"),
    [
        *(("requires_approval", each) for each in (two, anything, optional, Asked(), Asked().gate, waits)),
        ("requires_approval", functools.partial(three, None)),
        ("describe", str),
        ("describe", max),
        ("preview", dict),
        ("reconcile", getattr),
        ("refuses", lambda error: True),
    ],
)
def test_whatever_can_be_called_so_is_taken(option: str, right: Any) -> None:
    assert tool(pay, **{option: right}).name == "pay"


@pytest.mark.parametrize(
    ("option", "value"),
    [("approvers", "managers"), ("approvals", 2), ("expires_in", timedelta(hours=1)), ("risk", "high")],
)
def test_an_option_of_a_card_without_one_is_refused(option: str, value: Any) -> None:
    given: Any = {option: value}
    for gate in ({}, {"requires_approval": False}):
        contradict = rf"Tool 'pay': {option}.* and requires_approval=False contradict"
        with pytest.raises(TypeError, match=contradict):
            tool(pay, **gate, **given)
    for asks in (True, two):
        assert tool(pay, requires_approval=asks, **given)
    with pytest.raises(TypeError, match=r"Tool 'pay': approvers and requires_approval=False"):
        tool(approvers="managers", approvals=2, risk="high")(pay)


def test_the_tools_of_a_server_share_their_options() -> None:
    server, lock = "https://127.0.0.1:1/mcp", Path(__file__).parents[1] / "mcp" / "hostile.mcp.json"
    with pytest.raises(TypeError, match="approvers and requires_approval=False contradict"):
        mcp_tools(server, name="shut", lock=lock, requires_approval=False, approvers="managers")
    with pytest.raises(TypeError, match=r"MCP server 'shut': headers is called as f\(ctx\)"):
        mcp_tools(server, name="shut", lock=lock, headers=none)
    first, *others = mcp_tools(server, name="shut", lock=lock)
    read = first.name.removeprefix("shut__")
    made = mcp_tools(server, name="shut", lock=lock, approvers="managers", approvals=2, read_only=[read])
    assert [each.requires_approval for each in made] == [False, *(True for _ in others)]


@pytest.mark.parametrize("option", ["instructions", "tools_for"])
@pytest.mark.parametrize("wrong", [none, two, named])
def test_an_agents_functions_take_a_run_and_its_model_a_request(option: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"Agent 'shop': {option} is called as f\(run\)"):
        Agent("shop", **{"instructions": "Pay.", "model": ScriptedModel([]), option: wrong})
    with pytest.raises(TypeError, match=r"propose\(\) of model is called as f\(request\)"):
        Agent("shop", instructions="Pay.", model=SimpleNamespace(propose=wrong))


def test_a_policy_takes_what_it_is_asked_with() -> None:
    asked = r"Short\.can_decide is called as f\(self, user, approval, arguments\)"
    with pytest.raises(TypeError, match=asked):

        class Short(Policy):
            def can_decide(self, user: Any, approval: Any) -> bool:  # type: ignore[override]
                """Forget the arguments."""
                return True

    class Mixin:
        @staticmethod
        def scope(user: Any) -> str:
            """Need no policy."""
            return ""

    class Fits(Mixin, Policy):
        def can(self, *asked: Any, **more: Any) -> bool:
            """Take everything."""
            return True

    assert Fits().scope(None) == ""


def deaf() -> None:
    """Take no notice, and nothing else."""


def test_functions_that_settings_name(settings: Any) -> None:
    settings.AGENTRUNS_SCANNER = settings.AGENTRUNS_ANCHOR = f"{__name__}.deaf"
    settings.AGENTRUNS_CONNECTION_STATE = f"{__name__}.deaf"
    assert "agentruns.E024" in {each.id for each in check_values(None)}
    settings.AGENTRUNS_REFUSALS = settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.deaf"]
    said = " ".join(str(each.msg) for each in (*check_values(None), *check_notifiers(None)))
    for called in (
        "f(name, media_type, data)",
        "f(session_id, seq, head)",
        "f(connection)",
        "f(error)",
        "f(notice)",
    ):
        assert called in said
    with pytest.raises(TypeError, match=r"is called as f\(notice\)"):
        load_notifier(f"{__name__}.deaf")
