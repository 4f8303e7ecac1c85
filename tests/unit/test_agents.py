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

from agentruns.agents.agent import (
    Agent,
    _registry,
    autodiscover,
    definition_difference,
    get_agent,
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


def test_tools_are_found_by_name_and_nothing_else_is_one() -> None:
    def plain() -> None: ...

    assert make(tools=[refund, ship]).tools == {"refund": refund, "ship": ship}
    assert make("b", tools=iter((refund,))).tools == {"refund": refund}
    before = registered()
    with pytest.raises(TypeError, match=r"plain is not a tool; decorate it with @tool"):
        make(tools=[refund, plain])
    with pytest.raises(TypeError, match="decorate"):
        make(tools=["refund"])
    with pytest.raises(ValueError, match="two tools named 'refund'"):
        make(tools=[refund, tool(ship.fn, name="refund")])
    assert registered() == before


NO_MODEL, NO_SCHEMA = "output_type must be a pydantic model", "output_type has no JSON Schema"
WRONG: list[tuple[str, type[Exception], str, list[Any]]] = [
    ("name", ValueError, "name", [""]),
    ("name", TypeError, "name", [3]),
    ("name", ValueError, "printable", ["a\nb"]),
    ("name", ValueError, "100", ["x" * 101]),
    ("version", TypeError, "version", [2]),
    ("instructions", TypeError, "instructions", [None, lambda: "x"]),
    ("model", TypeError, "propose", [None, "", ScriptedModel]),
    ("max_steps", ValueError, "max_steps", [0]),
    ("max_steps", TypeError, "max_steps", ["5", True, None]),
    ("token_budget", ValueError, "token_budget", [0]),
    ("token_budget", TypeError, "token_budget", [1.5]),
    (
        "cost_budget",
        ValueError,
        "cost_budget",
        [0, Decimal(-1), float("inf"), Decimal("sNaN"), "", "much", "-2"],
    ),
    ("cost_budget", TypeError, "cost_budget", [b"5", True]),
    ("output_type", TypeError, NO_MODEL, [dict, Answer(total=1)]),
    ("output_type", TypeError, NO_SCHEMA, [BaseModel, Unspeakable]),
    ("deadline", TypeError, "deadline", [60]),
    ("deadline", ValueError, "deadline", [timedelta(0)]),
    ("on_orphan", ValueError, "on_orphan", ["guess"]),
    ("model_params", TypeError, "model_params", [[1], {"a": object()}]),
]


@pytest.mark.parametrize(("option", "error", "words", "values"), WRONG)
def test_wrong_options_are_refused(
    option: str, error: type[Exception], words: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(error, match=words):
            make(**{"name": "support", option: value})
    assert registered() == []


def test_the_definition_is_json_part_by_part() -> None:
    """Runs that wait for people across an upgrade go on, so what is new may only show where it is used."""
    params = {"max_tokens": 5, "stop_sequences": ("a",)}
    limits: dict[str, Any] = {"deadline": timedelta(hours=1), "token_budget": 100, "on_orphan": "surface"}
    agent = make(tools=[refund], model=ScriptedModel([]), model_params=params, **limits)
    definition = agent.definition()
    assert definition == {
        "agent": "support", "version": "1", "model": "agentruns.providers.scripted.ScriptedModel",
        "model_params": {"max_tokens": 5, "stop_sequences": ["a"]}, "instructions": "Help.",
        "tools": {"refund": refund.policy()}, "on_orphan": "surface", "max_steps": 50, "token_budget": 100,
        "deadline": 3600.0,
    }  # fmt: skip
    assert canonical.loads(canonical.dumps(definition)) == definition
    assert agent.definition_hash == canonical.digest(definition)


def test_the_definition_holds_no_token_and_does_not_change_when_it_is_renewed() -> None:
    def research(token: str) -> Agent:
        server = {"type": "url", "name": "crm", "url": "https://mcp.example", "authorization_token": token}
        params = {"mcp_servers": [server], "max_tokens": 9}
        made = make(model_params=params, unjournaled_tools=True)
        server["authorization_token"] = "changed"
        return made

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


def test_an_agent_trusts_tools_of_its_own_that_are_declared_untrusted() -> None:
    mail = tool(refund.fn, name="mail", untrusted=True)
    assert make(tools=[mail], trusts=["mail"]).definition()["trusts"] == ["mail"]
    assert "trusts" not in make(tools=[mail]).definition()
    for trusts, error, text in (
        (["web"], ValueError, "Agent 'support': trusts names 'web', which is none of its tools."),
        (["refund"], ValueError, "trusts names 'refund', which is not declared untrusted."),
        ("mail", TypeError, "trusts must be a list of names of tools, not 'mail'."),
    ):
        with pytest.raises(error, match=text):
            make(tools=[mail, refund], trusts=trusts)


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
    assert {make(cost_budget=same).definition_hash for same in (0.5, Decimal("0.50"), "0.50")} == {
        thrifty.definition_hash
    }
    assert len({agent.definition_hash for agent in (plain, thrifty, typed, make(output_type=Other))}) == 4
    changed = make(cost_budget=1, output_type=Other).definition()
    assert definition_difference(typed.definition(), changed) == ["cost_budget", "output"]


def test_the_hash_does_not_depend_on_the_order_of_tools() -> None:
    assert make(tools=[refund, ship]).definition_hash == make(tools=[ship, refund]).definition_hash
    assert make().definition_hash != make(tools=[ship]).definition_hash


def test_differences_are_named_part_by_part() -> None:
    other = tool(refund.fn, risk="low", description="Other.")
    old = make(tools=[refund, ship]).definition()
    new = make(
        tools=[other, tool(ship.fn, name="send")], instructions="Else.", model="claude-opus-5-5",
        model_params={"max_tokens": 1}, max_steps=3,
    ).definition()  # fmt: skip
    assert definition_difference(old, old) == []
    assert definition_difference(old, new) == [
        "instructions", "max_steps", "model", "model_params", "tools.refund.description",
        "tools.refund.risk", "tools.send (added)", "tools.ship (removed)",
    ]  # fmt: skip

    @tool(name="refund")
    def narrower(order: int) -> None:
        """Refund."""

    before, after = (make(tools=[each]).definition() for each in (refund, narrower))
    assert definition_difference(before, after) == ["tools.refund.input_schema"]


def test_differences_to_a_definition_of_another_release() -> None:
    old = make(tools=[refund]).definition()
    del old["on_orphan"], old["tools"]["refund"]["sensitive"]
    old["tools"]["refund"]["colour"] = 1
    parts = definition_difference(old, make(tools=[refund]).definition())
    assert parts == ["on_orphan", "tools.refund.colour", "tools.refund.sensitive"]
    assert definition_difference({"a": True}, {"a": 1}) == ["a"]
    assert definition_difference({}, {}) == []


def test_the_highest_version_is_found_by_name_alone() -> None:
    one, two, other = make(), make(version="2"), make("other")
    assert get_agent("support") is get_agent(one, "2") is two
    assert get_agent("support", "1") is get_agent(one) is get_agent(one, "1") is one
    assert registered() == [one, two, other]
    again = make()
    assert get_agent("support") is two
    assert registered() == [two, other, again]


@pytest.mark.parametrize(
    "versions",
    [
        ["1", "1.0", "1.0.1", "1.2", "1.10", "2"], ["beta", "v1.0", "v1.0rc1", "v9", "v10", "1"],
        ["2024-12-31", "2025-01-02", "0.1", "01", "1"], ["\u0663", "0", "3"],
    ],
)  # fmt: skip
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


def test_a_module_may_replace_its_own_agent_and_another_declare_only_the_same() -> None:
    make()
    mine = make(instructions="Changed.")
    assert registered() == [mine]
    with pytest.raises(ValueError) as caught:
        elsewhere('a = Agent("support", instructions="Else.", model="claude-sonnet-5-5")')
    assert get_agent("support") is mine
    text = str(caught.value)
    assert all(word in text for word in ("shop.agents", __name__, "instructions", "another version"))
    make()
    theirs = elsewhere('a = Agent("support", instructions="Help.", model="claude-sonnet-5-5")').a
    assert (theirs.module, repr(theirs)) == ("shop.agents", "<Agent support version 1>")
    assert get_agent("support") is theirs


def test_autodiscover_imports_agents_of_installed_apps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tests.shop.agents", raising=False)
    autodiscover()
    assert "tests.shop.agents" in sys.modules


@pytest.mark.django_db(transaction=True)
def test_run_and_start_and_their_awaitable_forms() -> None:
    agent = make(model=ScriptedModel([{"text": "done"}]))
    result = agent.run("hi", "s1", idempotency_key="k")
    assert (result.output, agent.run("hi", "s1", idempotency_key="k").run_id) == ("done", result.run_id)
    run = agent.start("hi", "s2", context={"tenant": 7})
    assert (run.status, run.session.key, run.context) == ("queued", "s2", {"tenant": 7})
    assert asyncio.run(agent.arun("hi")).output == "done"
    run = asyncio.run(agent.astart("hi", "s3", idempotency_key="q"))
    assert (run.status, run.idempotency_key) == ("queued", "q")
