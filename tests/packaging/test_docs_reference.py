"""The pages of reference: every public name, every option, every kind of row, as they are in the code."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand

import agentruns
from agentruns import approve, cancel_run, exceptions, pause_run, run_agent, start_run
from agentruns.journal import events
from agentruns.models import Message
from agentruns.testing import expire_leases, run_until_blocked
from agentruns.testing.crash import crashing_at
from agentruns.tools import Tool
from tests.shop.agents import call, shop_agent

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
COMMANDS = sorted(name for name, app in get_commands().items() if app == "agentruns")


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


# Python


def documented() -> dict[str, ast.arguments]:
    """Read the arguments of each name from the page."""
    found = {}
    for text in re.findall(r"```text\n(\w+\(.*?\))\n```", page("python"), re.DOTALL):
        (function,) = ast.parse(f"def {text}: ...").body
        assert isinstance(function, ast.FunctionDef)
        found[function.name] = function.args
    return found


def test_all_public_names_are_there() -> None:
    callables = {
        name
        for name in agentruns.__all__
        if name != "__version__" and not isinstance(getattr(agentruns, name), Tool)
    }
    callables -= {"ToolRefused"}  # an exception: in the table of errors
    assert {*documented()} == callables
    assert "### `ask_human`" in page("python")


@pytest.mark.parametrize(("name", "given"), sorted(documented().items()))
def test_a_name_takes_what_the_page_says(name: str, given: ast.arguments) -> None:
    named = [*given.args, *given.kwonlyargs]
    defaults = [None] * (len(given.args) - len(given.defaults)) + [*given.defaults, *given.kw_defaults]
    said = {
        each.arg: (
            each in given.kwonlyargs,
            plain(ast.literal_eval(default)) if default else inspect.Parameter.empty,
        )
        for each, default in zip(named, defaults, strict=True)
    }
    if given.kwarg is not None:
        said[given.kwarg.arg] = (False, inspect.Parameter.empty)
    assert said == {
        each.name: (each.kind is each.KEYWORD_ONLY, plain(each.default))
        for each in inspect.signature(getattr(agentruns, name)).parameters.values()
        if not each.name.startswith("_")
    }


def plain(default: Any) -> Any:
    """Make of a default what it is compared by; a factory of a dataclass says no more than that it is one."""
    return (
        "empty" if type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS" or default in ([], {}) else default
    )


def test_all_errors_are_there() -> None:
    known = {
        name for name, one in vars(exceptions).items() if inspect.isclass(one) and issubclass(one, Exception)
    }
    listed = re.findall(r"^\| `(\w+Error|ToolRefused)` \|", page("python"), re.MULTILINE)
    assert len(listed) == len({*listed})
    assert {*listed} == known


# Commands


def test_all_commands_are_there() -> None:
    assert sorted(re.findall(r"^### `(\w+)`", page("commands"), re.MULTILINE)) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_options_of_its_table(name: str) -> None:
    chapter = re.split(r"^##+ ", page("commands").partition(f"### `{name}`\n")[2], flags=re.MULTILINE)[0]
    listed = re.findall(r"^\| `(\S+)[^`]*` \| .", chapter, re.MULTILINE)
    every = BaseCommand().create_parser("manage.py", name)._actions
    common = {option for action in every for option in action.option_strings} | {"--database", "--json"}
    parser = load_command_class("agentruns", name).create_parser("manage.py", name)
    own = [action for action in parser._actions if not common & {*action.option_strings}]
    assert listed == [
        action.option_strings[0] if action.option_strings else action.metavar or action.dest for action in own
    ]


# Events


def members() -> dict[str, set[str]]:
    """Read from the page what the payload of each kind may have."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", page("events"), re.MULTILINE)
    return {kind: {*re.findall(r"`(\w+)`", cell)} for kind, cell in rows}


def test_all_kinds_are_there() -> None:
    constants = {value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)}
    assert {*members()} == constants - {events.COPIED, events.OUTPUT_INVALID, events.MESSAGE}


@pytest.mark.django_db(transaction=True)
def test_rows_have_what_the_page_says() -> None:
    turns = [{"tools": [call("refund", cents=50_000), call("post", text="Hello")]}, {"text": "Done."}]
    agent = shop_agent("shop", *turns)
    result = run_agent(agent, "Refund it", "one", idempotency_key="one")
    approve(result.pending[0].pk, None, arguments={**result.pending[0].arguments, "cents": 1})
    with crashing_at("after_tool"):
        run_until_blocked()
    expire_leases()
    run_until_blocked()
    for change in (pause_run, cancel_run):
        change(start_run(agent, "Refund it", f"to {change.__name__}").pk, None)
    rows = Message.objects.all()
    assert {row.kind for row in rows} >= {"approval_decided", "tool_started", "orphan_found", "run_cancelled"}
    for row in rows:
        assert {*row.payload} - {"v", "copied"} <= members()[row.kind], row.kind
    (calls,) = {frozenset(one) for row in rows.filter(kind="assistant") for one in row.payload["calls"]}
    sentence = page("events").partition("Each of `calls` has")[2].partition("\n\n")[0]
    assert calls <= {*re.findall(r"`(\w+)`", sentence)}


# Permissions


def test_all_permissions_are_there() -> None:
    text = (REFERENCE.parent / "howto" / "permissions.md").read_text()
    models = apps.get_app_config("agentruns").get_models()
    known = {
        *(codename for model in models for codename, _name in model._meta.permissions),
        *(f"view_{name}" for name in ("run", "approval", "apitoken")),
    }
    assert {*re.findall(r"`agentruns\.(\w+)`", text.partition("## Groups")[0])} == known
