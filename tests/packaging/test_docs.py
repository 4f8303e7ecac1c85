"""The documentation as a whole: it builds without a warning, and what leads somewhere leads there."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

import agentruns
from tests.programs import ROOT, run_program
from tests.registry import isolated_registry

DOCS = ROOT / "docs"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees"]
    run_program(*words, DOCS, tmp_path / "site")
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(DOCS).with_suffix(".html")).exists()
    loaded = re.findall(
        r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', (tmp_path / "site/index.html").read_text()
    )
    assert loaded == []
    assert (tmp_path / "site" / "llms.txt").read_text() == (DOCS / "llms.txt").read_text()


def test_links_of_the_readme_lead_somewhere() -> None:
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (ROOT / target).exists(), f"{name}: {target}"


def test_each_page_is_linked_from_the_readme() -> None:
    links = {*re.findall(r"\]\((docs/[^)#]+\.md)", (ROOT / "README.md").read_text())}
    pages = {str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")}
    assert pages - links == {"docs/index.md"}  # the start of the site, which the README is here


def test_the_page_for_language_models_is_true() -> None:
    page = (DOCS / "llms.txt").read_text()
    for names in re.findall(r"from agentruns import (.*)", page):
        assert {*names.split(", ")} <= {*agentruns.__all__}
    (declared,) = (
        block
        for block in re.findall(r"(?:^    .*\n|^\n)+", page, re.MULTILINE)
        if "Agent(" in block and "@tool" in block
    )
    with isolated_registry():
        exec(compile(ast.parse(textwrap.dedent(declared)), "llms.txt", "exec"), {"__name__": "page"})
    said = page.partition("## Pages")[2]
    folder = DOCS
    for name in re.findall(r"[\w/-]+\.(?:md|json)", said):
        if "/" in name:
            folder = (DOCS / name).parent
        assert (DOCS / name).exists() or (folder / name).exists(), name


def test_the_colours_for_themes_are_those_that_the_console_uses() -> None:
    used = re.findall(r"var\((--(?!ar-)[\w-]+)", (ROOT / "agentruns/static/agentruns/admin.css").read_text())
    (block,) = re.findall(r"```css\n(.*?)```", (DOCS / "howto" / "themes.md").read_text(), re.DOTALL)
    assert {*re.findall(r"(--[\w-]+):", block)} == {*used}
