"""Pages that say which test shows what: every test that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"


def rows(page: str, head: str) -> list[tuple[str, str]]:
    """Return the first cell and the rest of each row of a page's tables."""
    return re.findall(rf"^\| (?!{head}|-)(.+?) \| (.+) \|$", (DOCS / page).read_text(), re.MULTILINE)


REQUIREMENTS = rows("reference/requirements.md", "requirement")
INCIDENTS = rows("explanation/incidents.md", "incident")
CLAIMS = rows("../SECURITY.md", "(?:mitigation|done) ")
LINK = re.compile(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github\.com/([\w./-]+)\)")


def existing(shown: str) -> list[tuple[str, str]]:
    """Return the tests that a row names, each of which exists."""
    named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", shown)
    for file, name in named:
        source = (TESTS / file).read_text()
        for part in name.split("::"):
            assert re.search(rf"^ *(def|class) {part}\b", source, re.MULTILINE), f"{file} has no {name}"
    return named


@pytest.mark.parametrize(("requirement", "shown"), REQUIREMENTS)
def test_a_requirement_names_tests_that_exist_or_a_reason(requirement: str, shown: str) -> None:
    assert existing(shown) or len(shown.split()) > 3, f"{requirement} has neither test nor reason"


def test_each_requirement_is_there_once() -> None:
    assert len({requirement for requirement, _shown in REQUIREMENTS}) == len(REQUIREMENTS) > 150


@pytest.mark.parametrize(("incident", "shown"), INCIDENTS)
def test_an_incident_names_a_test_that_exists(incident: str, shown: str) -> None:
    assert existing(shown), f"{incident} has no test"


def test_each_incident_is_there_once_and_its_link_is_what_it_says() -> None:
    found = [link for incident, _shown in INCIDENTS for link in LINK.findall(incident)]
    for repository, number, target in found:
        assert target in {f"{repository}/issues/{number}", f"{repository}/pull/{number}"}
    assert all(LINK.match(incident) for incident, _shown in INCIDENTS)
    assert len({*found}) == len(found) >= len(INCIDENTS) >= 28


@pytest.mark.parametrize(("claim", "shown"), CLAIMS)
def test_a_claim_about_security_names_a_test_that_exists(claim: str, shown: str) -> None:
    assert existing(shown), f"{claim} has no test"


def test_no_table_of_security_is_left_out() -> None:
    lines = (DOCS.parent / "SECURITY.md").read_text().splitlines()
    heads = sum(line.startswith("|---") for line in lines)
    assert len(CLAIMS) == sum(line.startswith("|") for line in lines) - 2 * heads > 40
