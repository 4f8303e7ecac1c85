"""The documentation as a whole: it builds without a warning, and what it leads to or names is there."""

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
    start = (tmp_path / "site/index.html").read_text()
    loaded = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', start)
    assert loaded == []
    assert (tmp_path / "site" / "llms.txt").read_text() == (DOCS / "llms.txt").read_text()


def test_links_of_the_readme_lead_somewhere_and_to_each_page() -> None:
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (ROOT / target).exists(), f"{name}: {target}"
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


# Pages that say which test shows what: every test that they name exists


def rows(page: str, head: str) -> list[tuple[str, str]]:
    """Read the first cell and the rest of each row of a page's tables."""
    return re.findall(rf"^\| (?!{head}|-)(.+?) \| (.+) \|$", (DOCS / page).read_text(), re.MULTILINE)


REQUIREMENTS = rows("reference/requirements.md", "requirement")
INCIDENTS = rows("explanation/incidents.md", "incident")
CLAIMS = rows("../SECURITY.md", "(?:mitigation|done) ")
LINK = re.compile(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github\.com/([\w./-]+)\)")


def existing(shown: str) -> list[tuple[str, str]]:
    """Find the tests that a row names, each of which exists."""
    named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", shown)
    for file, name in named:
        source = (ROOT / "tests" / file).read_text()
        for part in name.split("::"):
            assert re.search(rf"^ *(def|class) {part}\b", source, re.MULTILINE), f"{file} has no {name}"
    return named


def test_each_requirement_is_there_once_with_tests_that_exist_or_a_reason() -> None:
    for requirement, shown in REQUIREMENTS:
        assert existing(shown) or len(shown.split()) > 3, f"{requirement} has neither test nor reason"
    assert len({requirement for requirement, _shown in REQUIREMENTS}) == len(REQUIREMENTS) > 150


def test_each_incident_is_there_once_with_tests_that_exist_and_a_link_that_is_what_it_says() -> None:
    for incident, shown in INCIDENTS:
        assert existing(shown), f"{incident} has no test"
    found = [link for incident, _shown in INCIDENTS for link in LINK.findall(incident)]
    for repository, number, target in found:
        assert target in {f"{repository}/issues/{number}", f"{repository}/pull/{number}"}
    assert all(LINK.match(incident) for incident, _shown in INCIDENTS)
    assert len({*found}) == len(found) >= len(INCIDENTS) >= 28


def test_each_claim_about_security_names_tests_that_exist() -> None:
    for claim, shown in CLAIMS:
        assert existing(shown), f"{claim} has no test"
    lines = (ROOT / "SECURITY.md").read_text().splitlines()
    heads = sum(line.startswith("|---") for line in lines)
    assert len(CLAIMS) == sum(line.startswith("|") for line in lines) - 2 * heads > 40
