"""The search of the lists: it finds what their rows and cards show, and tells nothing of what is masked."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from agentruns import approve, run_agent, start_run, tool
from agentruns.admin import filters
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, read, url
from tests.admin.people import browser, user
from tests.admin.world import World, secretive
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db
RUNS, QUEUE = "admin:agentruns_run_changelist", "admin:agentruns_approval_changelist"


def listed(name: str, role: str = "superuser", **query: str) -> Page:
    response = browser(role).get(reverse(name), query)
    assert response.status_code == 200
    return read(response)


def found(page: Page, obj: Any) -> bool:
    return any(link.startswith(url(obj)) for link in page.links)


@tool(
    name="refund",
    requires_approval=True,
    sensitive=["iban"],
    describe=lambda args: f"Refund order {args['order']}",
    preview=lambda args: {"before": {"customer": "Ms Sample"}, "after": {"account": args["iban"]}},
)
def refund(order: int, iban: str) -> str:
    """Refund an order."""
    return "done"


def asked(session: str = "ticket-7", actor: Any = None) -> Any:
    agent = shop_agent("helpdesk", {"tools": [call("refund", order=4117, iban="DE77-4321")]}, tools=[refund])
    return run_agent(agent, "Ben: the kettle of DE77-4321 broke\nand more", session, actor=actor).pending[0]


def test_an_approval_is_found_by_all_that_its_card_shows(world: World) -> None:
    approval, other = asked(actor=user("viewer")), world.waiting("other", 5000)
    whole = str(approval.run_id)
    terms = ("4117", "order 41", "ket-7", "iewe", "ms sample", "ben: the kettle", "ticket", whole)
    for term in terms:
        page = listed(QUEUE, q=term)
        assert found(page, approval), term
        assert not found(page, other), term
    assert found(listed(QUEUE, q="5000"), other)
    assert found(listed(QUEUE, "decider", q="4117"), approval)
    assert not found(listed(QUEUE, "decider", q="the kettle"), approval), "of a run that they may not see"
    assert not found(listed(QUEUE, "decider", q="and more"), approval), "no more than the first line"


def test_a_run_is_found_by_its_whole_task_its_error_and_its_answer(world: World) -> None:
    says = shop_agent("says", {"text": "Refunded order 1002 for Ben Okafor."})
    done = run_agent(says, "Mail\nof Ada", "s1").run_id
    fails = shop_agent("fails", {"tools": [call("lookup", number="A1")]}, max_steps=1)
    failed = run_agent(fails, "Another", "s2").run_id
    runs = {str(run.pk): run for run in Run.objects.all()}
    error = runs[str(failed)].error
    assert error
    for wanted, terms in ((done, ("okafor", "order 1002", "of ada")), (failed, (error[:30],))):
        for term in terms:
            page = listed(RUNS, q=term)
            assert [key for key, run in runs.items() if found(page, run)] == [wanted], term


def test_a_run_is_found_by_what_its_line_says_of_it(world: World) -> None:
    run, other = world.completed("one"), world.completed("two")
    Run.objects.filter(pk=run.pk).update(output="I refunded **24.90 EUR** for `order 1002`.")
    Run.objects.filter(pk=other.pk).update(status="failed", error="ValueError: parcel 3 has no label")
    for term, found_run, not_found in (
        ("refunded 24.90 EUR for order 1002.", run, other),
        ("refunded **24.90", run, other),
        ("no label (ValueError)", other, run),
        ("ValueError: parcel", other, run),
    ):
        page = listed(RUNS, q=term)
        assert (found(page, found_run), found(page, not_found)) == (True, False), term


@pytest.mark.parametrize("term", ["DE77", "4321", "77-43", "de77-4321"])
@pytest.mark.parametrize("name", [RUNS, QUEUE])
def test_no_search_tells_what_is_masked(world: World, term: str, name: str) -> None:
    approval = asked()
    approve(approval.pk, user("superuser"))
    sweep()
    masked = asked("ticket-8")
    for role in ("superuser", "viewer"):
        page = listed(name, role, q=term)
        assert not found(page, masked)
        assert not found(page, masked.run)
        assert f"No match for {term}" in " ".join(page.text.split())


def test_a_context_too_is_found_as_it_is_shown(settings: Any, world: World) -> None:
    agent = shop_agent("plain", {"text": "done"})
    run = start_run(agent, "go", "s1", context={"tenant": "acme-11", "card": 12})
    for term in ("cme-1", "tenant:acme-11", "card:12"):
        assert found(listed(RUNS, q=term), run), term
    settings.AGENTRUNS_REDACT = f"{__name__}.without_acme"
    assert not found(listed(RUNS, q="acme"), run)


def test_no_search_finds_the_beginning_of_a_name_that_is_redacted(settings: Any, world: World) -> None:
    approval = world.waiting("acme-4711", actor=user("viewer"))
    for name, obj in ((RUNS, approval.run), (QUEUE, approval)):
        for term in ("a", "acme-4", "acme-4711"):
            assert found(listed(name, q=term), obj), term
    settings.AGENTRUNS_REDACT = f"{__name__}.without_acme"
    for name, obj in ((RUNS, approval.run), (QUEUE, approval)):
        for term in ("acme", "acme-4", "acme-4711"):
            assert not found(listed(name, q=term), obj), term
        for term in ("[...]-47", "view"):
            assert found(listed(name, q=term), obj), term


def without_acme(text: str) -> str:
    return text.replace("acme", "[...]")


def test_what_is_masked_pushes_nothing_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world.queued("find-me")
    Run.objects.filter(pk=run.pk).update(title="about DE77")
    asked()
    monkeypatch.setattr(filters, "SEARCHED", 2)
    assert found(listed(RUNS, q="DE77"), run)


def test_an_empty_answer_says_so_and_how_far_was_looked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        world.waiting(f"w{number}", 5000 + number, tools=[secretive])
    page = listed(QUEUE, q="<b>4118")
    text = " ".join(page.text.split())
    assert "No match for <b>4118; 3 wait. Clear the search" in text
    assert "Nothing here waits" not in text
    assert "?" in page.links, "the list without the search"
    assert "Words were looked for" not in text
    monkeypatch.setattr(filters, "SEARCHED", 2)
    for name in (RUNS, QUEUE):
        assert "Words were looked for in the newest" in listed(name, q="5001").text
    assert "No match for x. Clear the search" in " ".join(listed(RUNS, q="x").text.split())


def test_a_search_among_those_that_wait_says_what_is_decided(world: World) -> None:
    decided, other = asked(), world.waiting("other", 5000)
    assert found(listed(QUEUE, q="4117"), decided)
    approve(decided.pk, user("superuser"))
    page = listed(QUEUE, q="4117")
    text = " ".join(page.text.split())
    assert "No match for 4117; 1 waits. 1 that is decided matches. Clear the search" in text
    (link,) = {link for link in page.links if "q=4117" in link and "status=all" in link and "o=" not in link}
    assert found(read(browser("superuser").get(reverse(QUEUE) + link)), decided)
    assert "decided match" not in listed(QUEUE, q="nothing").text
    assert "decided match" not in listed(QUEUE, "viewer", q="nothing").text
    assert found(listed(QUEUE, q="5000"), other)


def test_a_search_reads_no_arguments_and_previews_without_a_bound(world: World) -> None:
    long, short = world.waiting("long", 4711), world.waiting("short", 4711)
    words = {"cents": 4711, "text": "x" * filters.SHORT}
    Approval.objects.filter(pk=long.pk).update(arguments=words, title="Refund")
    with CaptureQueriesContext(connection) as queries:
        page = listed(QUEUE, q="4711")
    assert (found(page, long), found(page, short)) == (False, True)
    texts = [query["sql"] for query in queries if '"agentruns_approval"."arguments"' in query["sql"]]
    assert texts
    assert all("LENGTH" in text for text in texts), "only with their length"


def test_a_row_leads_to_the_runs_of_its_session_agent_and_requester(world: World) -> None:
    run, other = world.waiting("one", actor=user("viewer")).run, world.completed("two")
    page = listed(RUNS)
    for query in (f"session={run.session_id}", f"requester={run.owner_id}", f"agent={run.agent}"):
        assert f"?{query}" in page.links
        name, _, value = query.partition("=")
        narrowed = listed(RUNS, **{name: value})
        assert (found(narrowed, run), found(narrowed, other)) == (True, False)
    for query in ("session=x", "requester=x", "session=", f"requester={2**70}"):
        name, _, value = query.partition("=")
        assert found(listed(RUNS, **{name: value}), run) == (not value)


def test_people_find_what_was_approved_and_done(world: World) -> None:
    approval = world.waiting()
    approve(approval.pk, user("superuser"))
    assert found(listed(QUEUE, status="approved"), approval)
    sweep()
    page = listed(QUEUE, status="approved")
    assert found(page, approval)
    assert "approved, done" in page.text
    assert "consumed" not in page.text
