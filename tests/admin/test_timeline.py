"""The timeline on the page of a run: what it draws, what it says in words, and where it leads."""

from __future__ import annotations

import re

import pytest
from django.test import override_settings

from agentruns import approve, resolve_orphan, run_agent, tool
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.admin.conftest import World
from tests.admin.pages import Page, read, url
from tests.admin.people import browser, user
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db

LINES = "ar-timeline-lines"


def page(run: Run, query: str = "") -> Page:
    return read(browser("viewer").get(url(run) + query))


def told(run: Run) -> list[tuple[str, str]]:
    return [(what, outcome) for _row, _start, _length, what, outcome in page(run).cells(LINES)]


def test_an_approved_call_from_the_task_to_the_end(world: World) -> None:
    approval = world.waiting()
    assert told(approval.run)[-1] == ("Approval of refund", "")
    approve(approval.pk, user("superuser"), digest=approval.digest)
    sweep()
    found = told(approval.run)
    assert found[0] == ("Model request 1", "asked for 1 call")
    for line in (("Approval of refund", "Approved"), ("Tool refund", "Tool finished"), ("Completed", "")):
        assert line in found


def test_a_call_in_doubt_and_its_verdict(world: World) -> None:
    run = world.orphaned()
    found = told(run)
    for line in (("Tool dies", "left no result"), ("Call of dies in doubt", ""), ("Verdict on dies", "")):
        assert line in found
    call_id = run.messages.get(kind="orphan_found").call_id
    resolve_orphan(run.pk, call_id, "occurred", user("superuser"), result="sent", evidence="seen")
    assert ("Verdict on dies", "Verdict: it happened") in told(run)


def test_each_bar_leads_to_its_row(world: World) -> None:
    run = world.completed()
    shown = page(run)
    started = run.messages.get(kind="tool_started").seq
    target = f"{url(run)}?after={started - 1}#row-{started}"
    assert shown.links.count(target) == 2  # the bar, and the line of the table
    assert f'id="row-{started}"' in browser("viewer").get(target).content.decode()


def test_of_a_long_run_the_last_rows_are_drawn_and_that_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentruns.admin.runs.timeline.ROWS", 4)
    shown = page(world.completed())  # seven rows
    assert "Only the last rows are drawn, from row 4 on; the journal has all of them." in shown.text
    assert len(shown.cells(LINES)) == 3
    monkeypatch.setattr("agentruns.admin.runs.timeline.ROWS", 7)
    assert "Only the last rows" not in page(world.completed("other")).text


def test_names_of_tools_are_hostile_text_and_numbers_follow_no_locale(world: World) -> None:
    @tool(name="x" * 30 + "_drop")
    def bad() -> str:
        """Do it."""
        return "done"

    agent = shop_agent("odd", {"tools": [call(bad.name), call("</title><script>\u202e")]}, tools=[bad])
    run = Run.objects.get(pk=run_agent(agent, "go", "odd", idempotency_key="k").run_id)
    with override_settings(LANGUAGE_CODE="de", USE_THOUSAND_SEPARATOR=True):
        html = browser("viewer").get(url(run)).content.decode()
    assert "</title><script>" not in html
    assert not re.search(r'(x|y|width|height)="[^"]*,', html)
    assert not re.search(r'style="', html)
