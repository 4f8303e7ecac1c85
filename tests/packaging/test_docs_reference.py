"""The pages of reference: every public name, every option, every kind of row, as they are in the code."""

from __future__ import annotations

import ast
import inspect
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand

import agentruns
from agentruns import exceptions
from agentruns.tools import Tool

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
COMMANDS = sorted(name for name, app in get_commands().items() if app == "agentruns")


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


def documented() -> dict[str, ast.arguments]:
    """Read the arguments of each name from the page."""
    found = {}
    for text in re.findall(r"```text\n(\w+\(.*?\))\n```", page("python"), re.DOTALL):
        (function,) = ast.parse(f"def {text}: ...").body
        assert isinstance(function, ast.FunctionDef)
        found[function.name] = function.args
    return found


def test_all_public_names_errors_commands_and_permissions_are_there() -> None:
    public = {*agentruns.__all__} - {"__version__", "ToolRefused"}  # an exception: in the table of errors
    assert {*documented()} == {name for name in public if not isinstance(getattr(agentruns, name), Tool)}
    assert "### `ask_human`" in page("python")
    listed = re.findall(r"^\| `(\w+Error|ToolRefused)` \|", page("python"), re.MULTILINE)
    known = [one for one in vars(exceptions).values() if inspect.isclass(one) and issubclass(one, Exception)]
    assert sorted(listed) == sorted(one.__name__ for one in known)
    assert sorted(re.findall(r"^### `(\w+)`", page("commands"), re.MULTILINE)) == COMMANDS
    text = (REFERENCE.parent / "howto" / "permissions.md").read_text()
    models = apps.get_app_config("agentruns").get_models()
    permissions = {codename for model in models for codename, _name in model._meta.permissions}
    permissions |= {f"view_{name}" for name in ("run", "approval", "apitoken", "approvalrule")}
    assert {*re.findall(r"`agentruns\.(\w+)`", text.partition("## Groups")[0])} == permissions


@pytest.mark.parametrize(("name", "given"), sorted(documented().items()))
def test_a_name_takes_what_the_page_says(name: str, given: ast.arguments) -> None:
    named = [*given.args, *given.kwonlyargs]
    defaults = [None] * (len(given.args) - len(given.defaults)) + [*given.defaults, *given.kw_defaults]
    nothing = inspect.Parameter.empty
    said = {
        each.arg: (each in given.kwonlyargs, plain(value(default)) if default else nothing)
        for each, default in zip(named, defaults, strict=True)
    }
    if given.kwarg is not None:
        said[given.kwarg.arg] = (False, nothing)
    assert said == {
        each.name: (each.kind is each.KEYWORD_ONLY, plain(each.default))
        for each in inspect.signature(getattr(agentruns, name)).parameters.values()
        if not each.name.startswith("_")
    }


def value(default: ast.expr) -> Any:
    """Read a default of the page: a literal, or a timedelta."""
    if isinstance(default, ast.Call):
        return timedelta(**{each.arg: ast.literal_eval(each.value) for each in default.keywords if each.arg})
    return ast.literal_eval(default)


def plain(default: Any) -> Any:
    """Make of a default what it is compared by; a factory of a dataclass says no more than that it is one."""
    is_factory = type(default).__name__ == "_HAS_DEFAULT_FACTORY_CLASS"
    return "empty" if is_factory or default in ([], {}) else default


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


# Permissions
