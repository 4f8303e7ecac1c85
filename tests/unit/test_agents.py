from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

import agentruns
from agentruns.agents.agent import (
    Agent,
    _registry,
    autodiscover,
    definition_difference,
    get_agent,
    register,
    registered,
)
from agentruns.exceptions import UnknownAgentError
from agentruns.providers.openai import OpenAIModel
from agentruns.providers.scripted import ScriptedModel
from agentruns.tools import tool
from agentruns.utils import json as canonical
from tests.registry import isolated_registry


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with isolated_registry():
        yield


@tool
def refund(order: str) -> None:
    """Refund."""


@tool(requires_approval=True)
def ship(order: str) -> None:
    """Ship."""


class Answer(BaseModel):
    total: int


class Unspeakable(BaseModel):
    total: Callable[[], int]


def make(name: str = "support", **changes: Any) -> Agent:
    return Agent(name, **{"instructions": "Help.", "model": "claude-sonnet-5-5", **changes})


def elsewhere(source: str, module: str = "shop.agents") -> ModuleType:
    """Import `source` as another module would be."""
    code = ModuleType(module)
    exec(compile("from agentruns.agents.agent import Agent\n" + source, module, "exec"), code.__dict__)
    return code


def test_defaults() -> None:
    agent = make()
    assert (agent.version, agent.max_steps, agent.on_orphan) == ("1", 50, "hold")
    assert (agent.tools, agent.token_budget, agent.deadline, agent.model_params) == ({}, None, None, {})
    assert agent.module == __name__
    assert repr(agent) == "<Agent support version 1>"


def test_tools_by_name() -> None:
    assert make(tools=[refund, ship]).tools == {"refund": refund, "ship": ship}
    assert make("b", tools=iter((refund,))).tools == {"refund": refund}


def test_plain_functions_are_refused() -> None:
    def plain() -> None: ...

    with pytest.raises(TypeError, match=r"plain is not a tool; decorate it with @tool"):
        make(tools=[refund, plain])
    with pytest.raises(TypeError, match="decorate"):
        make(tools=["refund"])
    assert registered() == []


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools named 'refund'"):
        make(tools=[refund, tool(ship.fn, name="refund")])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"name": ""}, ValueError, "name"),
        ({"name": 3}, TypeError, "name"),
        ({"name": "a\nb"}, ValueError, "printable"),
        ({"name": "x" * 101}, ValueError, "100"),
        ({"version": 2}, TypeError, "version"),
        ({"instructions": None}, TypeError, "instructions"),
        ({"instructions": lambda: "x"}, TypeError, "instructions"),
        ({"model": None}, TypeError, "propose"),
        ({"model": ""}, TypeError, "propose"),
        ({"model": ScriptedModel}, TypeError, "propose"),
        ({"max_steps": 0}, ValueError, "max_steps"),
        ({"max_steps": "5"}, TypeError, "max_steps"),
        ({"max_steps": True}, TypeError, "max_steps"),
        ({"max_steps": None}, TypeError, "max_steps"),
        ({"token_budget": 0}, ValueError, "token_budget"),
        ({"token_budget": 1.5}, TypeError, "token_budget"),
        ({"cost_budget": 0}, ValueError, "cost_budget"),
        ({"cost_budget": Decimal(-1)}, ValueError, "cost_budget"),
        ({"cost_budget": float("inf")}, ValueError, "cost_budget"),
        ({"cost_budget": Decimal("sNaN")}, ValueError, "cost_budget"),
        ({"cost_budget": "5"}, TypeError, "cost_budget"),
        ({"cost_budget": True}, TypeError, "cost_budget"),
        ({"output_type": dict}, TypeError, "output_type must be a pydantic model"),
        ({"output_type": Answer(total=1)}, TypeError, "output_type must be a pydantic model"),
        ({"output_type": BaseModel}, TypeError, "output_type has no JSON Schema"),
        ({"output_type": Unspeakable}, TypeError, "output_type has no JSON Schema"),
        ({"deadline": 60}, TypeError, "deadline"),
        ({"deadline": timedelta(0)}, ValueError, "deadline"),
        ({"on_orphan": "guess"}, ValueError, "on_orphan"),
        ({"model_params": [1]}, TypeError, "model_params"),
        ({"model_params": {"a": object()}}, TypeError, "model_params"),
    ],
)
def test_wrong_options_are_refused(changes: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**changes)
    assert registered() == []


def test_the_definition_is_json_part_by_part() -> None:
    agent = make(
        tools=[refund],
        model=ScriptedModel([]),
        model_params={"max_tokens": 5, "stop_sequences": ("a",)},
        deadline=timedelta(hours=1),
        token_budget=100,
        on_orphan="surface",
    )
    definition = agent.definition()
    assert definition == {
        "agent": "support",
        "version": "1",
        "model": "agentruns.providers.scripted.ScriptedModel",
        "model_params": {"max_tokens": 5, "stop_sequences": ["a"]},
        "instructions": "Help.",
        "tools": {"refund": refund.policy()},
        "on_orphan": "surface",
        "max_steps": 50,
        "token_budget": 100,
        "deadline": 3600.0,
    }
    assert canonical.loads(canonical.dumps(definition)) == definition
    assert agent.definition_hash == canonical.digest(definition)


def test_an_agent_without_a_cost_budget_or_an_output_type_keeps_its_definition() -> None:
    """Runs that wait for people across an upgrade go on, so what is new may only show where it is used."""
    assert make().definition().keys() == {
        "agent", "version", "model", "model_params", "instructions", "tools", "on_orphan", "max_steps",
        "token_budget", "deadline",
    }  # fmt: skip


def test_the_definition_holds_no_token_and_does_not_change_when_it_is_renewed() -> None:
    def research(token: str) -> Agent:
        server = {"type": "url", "name": "crm", "url": "https://mcp.example", "authorization_token": token}
        params = {"mcp_servers": [server], "max_tokens": 9}
        return make(model_params=params, unjournaled_tools=True)

    old = research("sesame")
    assert "sesame" not in canonical.dumps(old.definition())
    assert old.definition_hash == research("renewed").definition_hash
    assert old.definition()["model_params"]["max_tokens"] == 9
    assert (old.model_params or {})["mcp_servers"][0]["authorization_token"] == "sesame", "what is sent"


@pytest.mark.parametrize(
    "params",
    [
        {"mcp_servers": [{"type": "url", "name": "crm", "url": "https://mcp.example"}]},
        {"tools": [{"type": "mcp_toolset", "mcp_server_name": "crm"}]},
        {"extra_body": {"tools": [{"type": "mcp", "server_url": "https://mcp.example"}]}},
        {"tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "crm", "connector_id": "crm"}]},
        {"tools": [{"type": "web_search_20260318", "name": "web_search"}]},
        *({"tools": [{"type": kind}]} for kind in ("code_interpreter", "image_generation", "shell")),
        {"web_search_options": {"search_context_size": "low"}},
        {"plugins": [{"id": "web"}]},
        {"prompt": {"id": "pmpt_1"}},
        {"functions": [{"name": "find"}]},
    ],
)
def test_what_the_provider_runs_is_refused_unless_the_agent_says_so(params: dict[str, Any]) -> None:
    (named,) = (params.get("extra_body") or params).keys()
    text = f"runs what {named} of model_params names by itself, without a row before the effect and without"
    with pytest.raises(ValueError, match=text):
        make(model_params=params)
    allowed = make(model_params=params, unjournaled_tools=True)
    assert allowed.definition()["unjournaled_tools"] is True
    harmless = {"mcp_servers": [], "tool_choice": {"type": "allowed_tools", "tools": [{"name": "find"}]}}
    assert make(model_params=harmless).definition().get("unjournaled_tools") is None


def test_no_model_brings_what_the_provider_runs() -> None:
    crm = {"type": "mcp", "server_label": "crm", "server_url": "https://mcp.example"}
    for params in ({"tools": ({"type": "web_search"},)}, {"extra_body": {"plugins": [{"id": "web"}]}}):
        with pytest.raises(ValueError, match="what the provider runs belongs in an agent's model_params"):
            OpenAIModel("gpt-5.4", **params)
    agent = make(model=OpenAIModel("gpt-5.4"), model_params={"tools": [crm]}, unjournaled_tools=True)
    assert agent.definition()["unjournaled_tools"] is True


def test_the_definition_covers_the_cost_budget_and_the_schema_of_the_output() -> None:
    class Other(BaseModel):
        total: str

    plain = make()
    thrifty, typed = make(cost_budget=0.5), make(output_type=Answer)
    assert thrifty.definition() == {**plain.definition(), "cost_budget": "0.5"}
    assert typed.definition() == {**plain.definition(), "output": Answer.model_json_schema()}
    assert thrifty.definition_hash == make(cost_budget=Decimal("0.50")).definition_hash
    assert len({agent.definition_hash for agent in (plain, thrifty, typed, make(output_type=Other))}) == 4
    changed = make(cost_budget=1, output_type=Other).definition()
    assert definition_difference(typed.definition(), changed) == ["cost_budget", "output"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model": "claude-opus-5-5"}, "model"),
        ({"model_params": {"thinking": {"type": "enabled", "budget_tokens": 2048}}}, "model_params"),
        (
            {"model_params": {"tools": [{"type": "web_search_20260318", "name": "web_search"}]}},
            "model_params",
        ),
        ({"instructions": "Help a lot."}, "instructions"),
        ({"tools": [refund, ship]}, "tools.ship (added)"),
    ],
)
def test_what_a_provider_must_not_see_change_within_a_turn_is_pinned(
    changes: dict[str, Any], part: str
) -> None:
    given: dict[str, Any] = {
        "tools": [refund],
        "model_params": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "unjournaled_tools": True,
    }
    before, after = make(**given), make(**{**given, **changes})
    assert definition_difference(before.definition(), after.definition()) == [part]


def test_the_hash_does_not_depend_on_the_order_of_tools() -> None:
    assert make(tools=[refund, ship]).definition_hash == make(tools=[ship, refund]).definition_hash
    assert make().definition_hash != make(tools=[ship]).definition_hash


def test_model_params_are_copied() -> None:
    params = {"metadata": {"user_id": "1"}}
    agent = make(model_params=params)
    params["metadata"]["user_id"] = "2"
    assert agent.model_params == {"metadata": {"user_id": "1"}}


def test_differences_are_named_part_by_part() -> None:
    other = tool(refund.fn, risk="low", description="Other.")
    old = make(tools=[refund, ship]).definition()
    new = make(
        tools=[other, tool(ship.fn, name="send")],
        instructions="Else.",
        model_params={"max_tokens": 1},
        max_steps=3,
    ).definition()
    assert definition_difference(old, old) == []
    assert definition_difference(old, new) == [
        "instructions",
        "max_steps",
        "model_params",
        "tools.refund.description",
        "tools.refund.risk",
        "tools.send (added)",
        "tools.ship (removed)",
    ]

    @tool(name="refund")
    def narrower(order: int) -> None:
        """Refund."""

    assert definition_difference(make(tools=[refund]).definition(), make(tools=[narrower]).definition()) == [
        "tools.refund.input_schema"
    ]


def test_differences_to_a_definition_of_another_release() -> None:
    old = make(tools=[refund]).definition()
    del old["on_orphan"], old["tools"]["refund"]["sensitive"]
    old["tools"]["refund"]["colour"] = 1
    assert definition_difference(old, make(tools=[refund]).definition()) == [
        "on_orphan",
        "tools.refund.colour",
        "tools.refund.sensitive",
    ]
    assert definition_difference({"a": True}, {"a": 1}) == ["a"]
    assert definition_difference({}, {}) == []


def test_the_highest_version_is_found_by_name_alone() -> None:
    one, two, other = make(), make(version="2"), make("other")
    assert get_agent("support") is two
    assert get_agent("support", "1") is one
    assert get_agent(one) is one
    assert get_agent(one, "1") is one
    assert get_agent(one, "2") is two
    assert registered() == [one, two, other]
    again = make()
    assert get_agent("support") is two
    assert registered() == [two, other, again]


@pytest.mark.parametrize(
    "versions",
    [
        ["1", "1.0", "1.0.1", "1.2", "1.10", "2"],
        ["beta", "v1.0", "v1.0rc1", "v9", "v10", "1"],
        ["2024-12-31", "2025-01-02", "0.1", "01", "1"],
        ["\u0663", "0", "3"],
    ],
)
def test_versions_are_ordered_by_their_numbers(versions: list[str]) -> None:
    agents = {version: make(version=version) for version in reversed(versions)}
    for highest in reversed(versions):
        assert get_agent("support") is agents[highest]
        del _registry["support", highest]


def test_unknown_agents_list_the_known_ones() -> None:
    make(), make(version="2")
    with pytest.raises(UnknownAgentError, match=r"'sales' .*support version 1, support version 2") as caught:
        get_agent("sales")
    assert isinstance(caught.value, LookupError)
    with pytest.raises(UnknownAgentError, match="version '3'"):
        get_agent("support", "3")
    with isolated_registry(), pytest.raises(UnknownAgentError, match="none"):
        get_agent("support")


def test_a_module_may_replace_its_own_agent() -> None:
    make()
    changed = make(instructions="Changed.")
    assert get_agent("support") is changed
    assert registered() == [changed]


def test_the_same_definition_from_two_modules_is_no_conflict() -> None:
    make()
    theirs = elsewhere('a = Agent("support", instructions="Help.", model="claude-sonnet-5-5")').a
    assert theirs.module == "shop.agents"
    assert get_agent("support") is theirs


def test_a_different_one_from_another_module_is_a_conflict() -> None:
    mine = make()
    with pytest.raises(ValueError) as caught:
        elsewhere('a = Agent("support", instructions="Else.", model="claude-sonnet-5-5")')
    text = str(caught.value)
    assert all(word in text for word in ("shop.agents", __name__, "instructions", "another version"))
    assert get_agent("support") is mine


def test_the_isolated_registry_comes_and_goes() -> None:
    outer = make()
    with pytest.raises(RuntimeError), isolated_registry():
        assert registered() == []
        make("inner")
        raise RuntimeError
    assert registered() == [outer]
    with isolated_registry():
        register(outer)
        assert get_agent("support") is outer


def test_autodiscover_imports_agents_of_installed_apps() -> None:
    before = sys.modules.pop("tests.shop.agents", None)
    try:
        autodiscover()
        assert "tests.shop.agents" in sys.modules
    finally:
        if before is not None:
            sys.modules["tests.shop.agents"] = before


def test_run_and_start_delegate(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def record(name: str) -> Any:
        def service(*args: Any, **options: Any) -> str:
            calls.append((name, args, options))
            return name

        return service

    for name in ("run_agent", "start_run"):
        monkeypatch.setattr(agentruns, name, record(name), raising=False)
    agent = make()
    result: Any = agent.run("hi", "s", actor=1, idempotency_key="k", store="m")
    assert result == "run_agent"
    result = agent.start("hi", "s", scope="a", context={})
    assert result == "start_run"
    result = asyncio.run(agent.arun("hi"))
    assert result == "run_agent"
    result = asyncio.run(agent.astart("hi", "s", actor=2))
    assert result == "start_run"
    assert calls == [
        ("run_agent", (agent, "hi", "s"), {"actor": 1, "idempotency_key": "k", "store": "m"}),
        ("start_run", (agent, "hi", "s"), {"scope": "a", "context": {}}),
        ("run_agent", (agent, "hi", None), {}),
        ("start_run", (agent, "hi", "s"), {"actor": 2}),
    ]
