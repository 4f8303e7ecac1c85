"""Each code block of README.md and docs/: run from the top of its page to the end with Sybil, or parsed.

A page that has a test of its own is run there. `<!-- fragment -->` before a block of Python says that it is
part of something larger: it is compiled, and what it imports is imported.
"""

from __future__ import annotations

import ast
import configparser
import doctest
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import playwright
import pytest
import yaml
from django.core.management import CommandError, get_commands, load_command_class
from django.dispatch import Signal
from django.template import engines
from sybil import Document, Example, Region
from sybil.evaluators.doctest import DocTestEvaluator
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract.doctest import DocTestStringParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from agentruns import conf, signals
from tests.shop import models

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = {
    "README.md": "test_readme.py", "claude.md": "test_claude_page.py",
    "history.md": "test_history_page.py", "testing.md": "test_plugin.py",
    "tutorial.md": "test_docs_tutorial.py",
}  # fmt: skip
# Commands that are not ours; make is looked up in the Makefile, manage.py's commands in Django.
SHELL = {"pip", "python", "django-admin", "curl", "celery", "cat", "sleep", "uv", "git", "npm", "twine"}
PRELUDE = """
import os
from datetime import timedelta
from pathlib import Path
from django.urls import include, path
BASE_DIR = Path("/srv/shop")
INSTALLED_APPS = []
"""
FENCES = FencedCodeBlockLexer(r"\S*")
DOCTESTS = DocTestStringParser(DocTestEvaluator(doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE))


def blocks(document: Document) -> Iterator[Region]:
    """Find each block of a page, and each example of a Python session, with what evaluates it."""
    elsewhere = Path(document.path).name in RUN_ELSEWHERE
    for region in FENCES(document):
        kind, source = region.lexemes["language"], region.lexemes["source"]
        assert kind in EVALUATORS, f"{document.path}: name the language, such as text: {source}"
        if kind == "pycon" and not elsewhere:
            for example in DOCTESTS(source, document.path):
                example.adjust(region, source)
                yield example
            continue
        region.parsed, region.evaluator = source, EVALUATORS[kind]
        if kind == "python" and document.text.endswith("<!-- fragment -->\n", 0, region.start):
            region.evaluator = fragment
        elif kind == "python" and elsewhere:
            region.evaluator = parsed(ast.parse)
        yield region


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The app of the pages' reader, whose files are modules once the page has shown them."""
    package = ModuleType("shop")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "shop", package)
    monkeypatch.setitem(sys.modules, "shop.models", models)
    monkeypatch.setattr("agentruns.tools.mcp._servers", {})
    before = set(sys.modules)
    for signal in vars(signals).values():
        if isinstance(signal, Signal):
            monkeypatch.setattr(signal, "receivers", [])
    monkeypatch.setenv("AGENTRUNS_WEBHOOK_SECRET", "whsec_bm90aGluZw==")
    for name in ("SLACK_BOT_TOKEN", "SLACK_SIGNING_SECRET"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.chdir(tmp_path)
    yield
    for signal in vars(signals).values():
        if isinstance(signal, Signal):
            signal.sender_receivers_cache.clear()
    for name in set(sys.modules) - before:
        if name.startswith("shop."):
            del sys.modules[name]


def python(example: Example) -> None:
    """Run a block, which may begin with the file that it is."""
    known = dict(example.namespace)
    PythonEvaluator()(example)
    if file := re.match(r"# (shop/\w+)\.py\n", example.parsed):
        module = ModuleType(file[1].replace("/", "."))
        new = {name: one for name, one in example.namespace.items() if known.get(name) is not one}
        module.__dict__.update(new)
        sys.modules[module.__name__] = module
        setattr(sys.modules["shop"], module.__name__.partition(".")[2], module)


def fragment(example: Example) -> None:
    """Compile a block, and import what it imports."""
    for node in ast.walk(ast.parse(example.parsed)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "page", "exec"), {})


def parsed(parse: Callable[[str], object]) -> Callable[[Example], None]:
    """Build the evaluator of a language that a parser must be able to read."""

    def evaluate(example: Example) -> None:
        parse(example.parsed)

    return evaluate


def parsed_with_node(text: str) -> None:
    """Let the interpreter that Playwright brings read a script without running it."""
    node = Path(playwright.__file__).parent / "driver" / "node"
    subprocess.run([node, "--check", "-"], input=text, text=True, check=True, capture_output=True)


def console(example: Example) -> None:
    """Look up each command after a prompt."""
    shell("".join(re.findall(r"^\$ (.*\n)", re.sub(r"\\\n", " ", example.parsed), re.MULTILINE)))


def shell(text: str) -> None:
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.strip() and not line.startswith("#"):
            require_known(line.partition(" # ")[0].strip())


EVALUATORS: dict[str, Callable[[Example], None]] = {
    "python": python,
    "console": console,
    "sh": parsed(shell),
    "json": parsed(json.loads),
    "yaml": parsed(lambda text: list(yaml.safe_load_all(text))),
    "ini": parsed(lambda text: configparser.ConfigParser().read_string(text)),
    "js": parsed(parsed_with_node),
    "django": parsed(lambda text: engines["django"].from_string(text)),
    "css": parsed(lambda text: text.count("{") == text.count("}") or pytest.fail(text)),
    "http": parsed(lambda text: json.loads(text.partition("\n")[2])),
}
EVALUATORS |= dict.fromkeys(("text", "pycon", "{toctree}"), parsed(str))  # nothing to run


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, shop: None) -> None:
    document = Document.parse(str(page), blocks)
    names = document.namespace
    exec(PRELUDE, names)
    names["__name__"] = "shop.page"
    for example in document.examples():
        example.evaluate()
    known = {f"AGENTRUNS_{name}" for name in conf.DEFAULTS}
    assert {name for name in names if name.startswith("AGENTRUNS_")} <= known


def test_pages_that_are_run_elsewhere_are() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert f'"{page}"' in (Path(__file__).parent / test).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_a_sentence_exist_with_their_options(page: Path) -> None:
    """Their arguments may be left out."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for said in re.findall(r"`(manage\.py [^`]+)`", text):
        for name in said.split()[1:2]:
            known = {option for action in parser_of(name)._actions for option in action.option_strings}
            assert {*re.findall(r"(?<!\S)--[\w-]+", said)} <= known, said


def require_known(line: str) -> None:
    """Fail unless a command could be given."""
    if line.startswith("curl "):
        return  # of docs/api.md, whose own test sends it
    for command in re.split(r" && | \| ", line.partition(" > ")[0]):
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        if "manage.py" in words[:2] and words[0] in ("manage.py", "python", ".venv/bin/python"):
            name, *arguments = words[words.index("manage.py") + 1 :]
            try:
                parser_of(name).parse_args(arguments)
            except CommandError as error:
                pytest.fail(f"{line}: {error}")
        elif words[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {*words[1:]} <= {*targets}, line
        elif words[:2] == ["python", "docs/verify_export.py"]:
            assert (ROOT / words[1]).exists()
        else:
            assert words[0] in SHELL | {".", "source", "cd"}, line


def parser_of(name: str) -> Any:
    """Build the parser of a command, which raises where it would end the process."""
    app = get_commands()[name]
    parser = load_command_class(app, name).create_parser("manage.py", name)
    parser.called_from_command_line = False
    for action in parser._actions:
        if action.dest == "database":
            action.choices = None  # those of the page's reader
    return parser
