"""The code of README.md and docs/: each block is run, from the top of its page to the end, or parsed.

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
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import playwright
import pytest
import yaml
from django.core.management import CommandError, get_commands, load_command_class
from django.dispatch import Signal
from django.template import engines

from agentruns import conf, signals
from tests.shop import models

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = {DOCS / "reference" / "requirements.md"}
PAGES = [ROOT / "README.md", *sorted({*DOCS.rglob("*.md")} - WRITTEN)]
RUN_ELSEWHERE = {
    "README.md": "test_readme.py",
    "claude.md": "test_claude_page.py",
    "history.md": "test_history_page.py",
    "testing.md": "test_plugin.py",
    "tutorial.md": "test_docs_tutorial.py",
}
BLOCK = re.compile(
    r"(?P<mark><!-- fragment -->\n)?^(?P<indent> *)```(?P<kind>\S*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
# What a shell is told that is not ours; make is looked up in the Makefile, manage.py's commands in Django.
SHELL = {"pip", "python", "django-admin", "curl", "celery", "cat", "sleep", "uv", "git", "npm", "twine"}
PRELUDE = """
import os
from datetime import timedelta
from pathlib import Path
from django.urls import include, path
BASE_DIR = Path("/srv/shop")
INSTALLED_APPS = []
"""


class Block(NamedTuple):
    """A block of code as a page has it."""

    kind: str
    text: str
    is_fragment: bool


def blocks(page: Path) -> list[Block]:
    return [
        Block(found["kind"], textwrap.dedent(found["text"]), bool(found["mark"]))
        for found in BLOCK.finditer(page.read_text())
    ]


@pytest.fixture
def shop(agents: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The app of the pages' reader, whose files are modules once the page has shown them."""
    package = ModuleType("shop")
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "shop", package)
    monkeypatch.setitem(sys.modules, "shop.models", models)
    before = set(sys.modules)
    for signal in vars(signals).values():
        if isinstance(signal, Signal):
            monkeypatch.setattr(signal, "receivers", [])
    monkeypatch.setenv("AGENTRUNS_WEBHOOK_SECRET", "whsec_bm90aGluZw==")
    monkeypatch.chdir(tmp_path)
    yield
    for signal in vars(signals).values():
        if isinstance(signal, Signal):
            signal.sender_receivers_cache.clear()
    for name in set(sys.modules) - before:
        if name.startswith("shop."):
            del sys.modules[name]


def python(text: str, names: dict[str, Any]) -> None:
    """Run a block, which may begin with the file that it is."""
    known = dict(names)
    exec(compile(text, "page", "exec", dont_inherit=True), names)
    if file := re.match(r"# (shop/\w+)\.py\n", text):
        module = ModuleType(file[1].replace("/", "."))
        module.__dict__.update({name: one for name, one in names.items() if known.get(name) is not one})
        sys.modules[module.__name__] = module
        setattr(sys.modules["shop"], module.__name__.partition(".")[2], module)


def pycon(text: str, names: dict[str, Any]) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(text, names, "page", None, None)
    report: list[str] = []
    ran = doctest.DocTestRunner(verbose=False, optionflags=flags).run(
        test, out=report.append, clear_globs=False
    )
    assert not ran.failed, "".join(report)
    names.update(test.globs)


def imported(text: str) -> None:
    """Compile a block, and import what it imports."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            exec(compile(ast.Module([node], []), "page", "exec"), {})


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, shop: None) -> None:
    names: dict[str, Any] = {"__name__": "shop.page"}
    exec(PRELUDE, names)
    elsewhere = page.name in RUN_ELSEWHERE
    for block in blocks(page):
        if block.kind == "python" and block.is_fragment:
            imported(block.text)
        elif block.kind == "python" and elsewhere:
            ast.parse(block.text)
        elif block.kind == "python":
            python(block.text, names)
        elif block.kind == "pycon" and not elsewhere:
            pycon(block.text, names)
    known = {f"AGENTRUNS_{name}" for name in conf.DEFAULTS}
    assert {name for name in names if name.startswith("AGENTRUNS_")} <= known


def test_pages_that_are_run_elsewhere_are() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert f'"{page}"' in (Path(__file__).parent / test).read_text()


def parsed_with_node(text: str) -> None:
    """Let the interpreter that Playwright brings read a script without running it."""
    node = Path(playwright.__file__).parent / "driver" / "node"
    subprocess.run([node, "--check", "-"], input=text, text=True, check=True, capture_output=True)


OTHERS = {
    "json": json.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "ini": lambda text: configparser.ConfigParser().read_string(text),
    "js": parsed_with_node,
    "django": lambda text: engines["django"].from_string(text),
    "css": lambda text: text.count("{") == text.count("}") or pytest.fail(text),
    "http": lambda text: json.loads(text.partition("\n")[2]),
    "text": lambda text: None,  # pictures made of letters, and what programs print
    "{toctree}": lambda text: None,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_no_python_can_be_read(page: Path) -> None:
    for block in blocks(page):
        if block.kind not in ("python", "pycon", "console", "sh"):
            assert block.kind in OTHERS, f"Say what it is, for example text: {block.text}"
            OTHERS[block.kind](block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist_with_their_options(page: Path) -> None:
    for block in blocks(page):
        if block.kind in ("console", "sh"):
            for line in commands(block):
                require_known(line)
    # And those in the middle of a sentence, whose arguments may be left out.
    for said in re.findall(
        r"`(manage\.py [^`]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    ):
        for name in said.split()[1:2]:
            known = {option for action in parser_of(name)._actions for option in action.option_strings}
            assert {*re.findall(r"(?<!\S)--[\w-]+", said)} <= known, said


def commands(block: Block) -> Iterator[str]:
    """Yield each command of a block; in a console those after the prompt."""
    lines = re.sub(r"\\\n", " ", block.text).splitlines()
    if block.kind == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    yield from (
        line.partition(" # ")[0].strip() for line in lines if line.strip() and not line.startswith("#")
    )


def require_known(line: str) -> None:
    """Fail unless a command could be given."""
    if line.startswith("curl "):
        return  # of docs/api.md, whose own test sends it
    for command in re.split(r" && | \| ", line.partition(" > ")[0]):
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        if words[:2] == ["python", "manage.py"] or words[0] == "manage.py":
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
    """Return the parser of a command, which raises where it would end the process."""
    app = get_commands()[name]
    parser = load_command_class(app, name).create_parser("manage.py", name)
    parser.called_from_command_line = False
    for action in parser._actions:
        if action.dest == "database":
            action.choices = None  # those of the page's reader
    return parser
