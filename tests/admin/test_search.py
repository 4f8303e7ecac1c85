"""The search of the lists: it finds what rows and cards show, tells nothing of what is masked, and scales."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection
from django.urls import reverse

from agentruns import Policy, approve, run_agent, start_run, tool
from agentruns.admin import base, filters
from agentruns.admin.filters import names
from agentruns.models import Approval, ContextValue, Review, Run, Session
from agentruns.services.permissions import decidable, decidable_by
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, leads_to, listed, queries, read, url, words
from tests.admin.people import browser, user
from tests.admin.world import World, ran, secretive, waiting
from tests.db.crowds import ID, multiply, plan
from tests.db.helpers import run_out
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db
QUEUE = "/admin/agentruns/approval/"


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


def kettle(session: str = "ticket-7", actor: Any = None) -> Any:
    agent = shop_agent("helpdesk", {"tools": [call("refund", order=4117, iban="DE77-4321")]}, tools=[refund])
    return run_agent(agent, "Ben: the kettle of DE77-4321 broke\nand more", session, actor=actor).pending[0]


def test_an_approval_is_found_by_all_that_its_card_shows(world: World) -> None:
    approval, other = kettle(actor=user("viewer")), world.waiting("other", 5000)
    whole = str(approval.run_id)
    terms = ("4117", "order 41", "ket-7", "iewe", "ms sample", "ben: the kettle", "ticket", whole)
    for term in terms:
        page = listed("approval", q=term)
        assert found(page, approval), term
        assert not found(page, other), term
    assert found(listed("approval", q="5000"), other)
    assert found(listed("approval", "decider", q="4117"), approval)
    for task in ("the kettle", "and more"):  # of a run that a decider may not see
        assert not found(listed("approval", "decider", q=task), approval), task


def test_a_run_is_found_by_its_whole_task_its_error_and_its_answer(world: World) -> None:
    """And by what its line says of it."""
    done = ran("says", {"text": "I refunded **24.90 EUR** for `order 1002`."}, text="Mail\nof Ada")
    looks = {"tools": [call("lookup", number="A1")]}
    failed = ran("fails", looks, text="Another", session="s2", max_steps=1, on_budget="fail")
    assert failed.error
    other = world.completed("two")
    Run.objects.filter(pk=other.pk).update(status="failed", error="ValueError: parcel 3 has no label")
    for wanted, terms in (
        (done, ("24.90", "order 1002", "of ada", "refunded 24.90 EUR for order 1002.", "refunded **24.90")),
        (failed, (failed.error[:30],)),
        (other, ("no label (ValueError)", "ValueError: parcel")),
    ):
        for term in terms:
            page = listed("run", q=term)
            assert [run for run in (done, failed, other) if found(page, run)] == [wanted], term


def test_no_search_tells_what_is_masked(world: World) -> None:
    approve(kettle().pk, user("superuser"))
    sweep()
    masked = kettle("ticket-8")
    for name, role, term in product(("run", "approval"), ("superuser", "viewer"), ("DE77", "4321", "77-43")):
        page = listed(name, role, q=term)
        assert not found(page, masked) and not found(page, masked.run)
        assert f"No match for {term}" in words(page)


def test_no_search_finds_a_name_or_a_context_that_is_redacted(settings: Any, world: World) -> None:
    approval = world.waiting("acme-4711", actor=user("viewer"))
    agent = shop_agent("plain", {"text": "done"})
    run = start_run(agent, "go", "s1", context={"tenant": "acme-11", "card": 12})
    for term in ("cme-1", "tenant:acme-11", "card:12"):
        assert found(listed("run", q=term), run), term
    for name, obj in (("run", approval.run), ("approval", approval)):
        for term in ("a", "acme-4", "acme-4711"):
            assert found(listed(name, q=term), obj), term
    settings.AGENTRUNS_REDACT = f"{__name__}.without_acme"
    assert not found(listed("run", q="acme"), run)
    for name, obj in (("run", approval.run), ("approval", approval)):
        for term in ("acme", "acme-4", "acme-4711"):
            assert not found(listed(name, q=term), obj), term
        for term in ("[...]-47", "view"):
            assert found(listed(name, q=term), obj), term


def without_acme(text: str) -> str:
    return text.replace("acme", "[...]")


@pytest.mark.parametrize("model", ["approval", "run", "apitoken"])
def test_no_list_repeats_a_nul_of_its_url(model: str, world: World) -> None:
    world.waiting("letters")
    reader = browser("superuser")
    names = [
        "same",
        "mine",
        "status",
        "agent",
        "tool",
        "session",
        "requester",
        "cause",
        "review",
        "q",
        "o",
        "all",
    ]
    for name in (*names, "started_from", "started_to", "p", "e", "_changelist_filters", "unknown"):
        answer = reader.get(f"/admin/agentruns/{model}/?{name}=a%00b", follow=True)
        assert (answer.status_code, b"\0" in answer.content) == (200, False), name
    found = {each: reader.get(f"/admin/agentruns/run/?q=let{each}ters") for each in ("", "%00")}
    assert len({page.content.count(b"/change/") for page in found.values()}) == 1


def test_an_empty_answer_says_how_far_was_looked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        world.waiting(f"w{number}", 5000 + number, tools=[secretive])
    page = listed("approval", q="<b>4118")
    text = words(page)
    assert "No match for <b>4118; 3 wait. Clear the search" in text
    assert "Nothing here waits" not in text
    assert "?" in page.links, "the list without the search"
    assert "Words were looked for" not in text
    run = world.queued("find-me")
    Run.objects.filter(pk=run.pk).update(title="about DE77")
    kettle()
    monkeypatch.setattr(filters, "SEARCHED", 2)
    assert found(listed("run", q="DE77"), run), "what is masked pushes nothing out"
    for name in ("run", "approval"):
        assert "Words were looked for in the newest" in listed(name, q="5001").text
    assert "No match for x. Clear the search" in words(listed("run", q="x"))


def test_a_search_among_those_that_wait_says_what_is_decided(world: World) -> None:
    decided, other = kettle(), world.waiting("other", 5000)
    assert found(listed("approval", q="4117"), decided)
    approve(decided.pk, user("superuser"))
    page = listed("approval", q="4117")
    text = words(page)
    assert "No match for 4117; 1 waits. 1 that is decided matches. Clear the search" in text
    (link,) = {link for link in page.links if "q=4117" in link and "status=all" in link and "o=" not in link}
    assert found(read(browser("superuser").get(QUEUE + link)), decided)
    assert "decided match" not in listed("approval", q="nothing").text
    assert "decided match" not in listed("approval", "viewer", q="nothing").text
    assert found(listed("approval", q="5000"), other)
    assert found(listed("approval", status="approved"), decided)
    sweep()
    page = listed("approval", status="approved")
    assert found(page, decided)
    assert ("approved, done" in page.text, "consumed" in page.text) == (True, False)


def test_a_search_reads_no_arguments_and_previews_without_a_bound(world: World) -> None:
    long, short = world.waiting("long", 4711), world.waiting("short", 4711)
    words = {"cents": 4711, "text": "x" * filters.SHORT}
    Approval.objects.filter(pk=long.pk).update(arguments=words, title="Refund")
    page = listed("approval", q="4711")
    assert (found(page, long), found(page, short)) == (False, True)
    asked = queries(lambda: listed("approval", q="4711"))
    texts = [sql for sql in asked if '"agentruns_approval"."arguments"' in sql]
    assert texts
    assert all("LENGTH" in text for text in texts), "only with their length"


def test_a_row_leads_to_the_runs_of_its_session_agent_and_requester(world: World) -> None:
    run, other = world.waiting("one", actor=user("viewer")).run, world.completed("two")
    page = listed("run")
    for query in (f"session={run.session_id}", f"requester={run.owner_id}", f"agent={run.agent}"):
        assert f"?{query}" in page.links
        name, _, value = query.partition("=")
        narrowed = listed("run", **{name: value})
        assert (found(narrowed, run), found(narrowed, other)) == (True, False)
    for query in ("session=x", "requester=x", "session=", f"requester={2**70}"):
        name, _, value = query.partition("=")
        assert found(listed("run", **{name: value}), run) == (not value)


MANY = 3000


@pytest.fixture
def many(world: World) -> Run:
    """A run whose session, requester and agent nobody else has, and very many others."""
    one = world.completed("rare")
    Session.objects.update(owner_name="Rosa")
    Run.objects.update(owner_name="Rosa")
    made = ID[connection.vendor].format
    waiting = world.waiting("waiting")
    multiply(Session, MANY, id=made("n"), key="'order-' || n", owner_name="'user-' || n")
    ended = {"status": "'completed'", "idempotency_key": "''", "agent": "'agent-' || (n % 3)"}
    multiply(Run, MANY, id=made("n"), session_id=made("n"), **ended)
    decided = {"status": "'consumed'", "tool_name": "'tool-' || (n % 3)"}
    multiply(Approval, MANY, id=made("n"), run_id=made("n"), **decided)
    assert waiting.pk == Approval.objects.latest("id").pk
    ContextValue.objects.create(run=one, key="order", value="A1")
    multiply(ContextValue, MANY, id="n + 1000000", run_id=made("n"), value="'A' || n")
    Review.objects.create(run=one, rating=1, assignee_id=1)
    multiply(Review, MANY, run_id=made("n"), rating="0", assignee_id="n + 1")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return one


def grown(model: str, **query: str) -> list[str]:
    """Find what a list asks of the tables that grow."""
    tables = ('FROM "agentruns_run"', 'FROM "agentruns_approval"')
    return [sql for sql in queries(lambda: listed(model, **query)) if any(table in sql for table in tables)]


@pytest.mark.parametrize(
    ("model", "query", "index"),
    [
        ("run", {}, "agentruns_run_newest"),
        ("run", {"status": "failed"}, "agentruns_run_status"),
        ("run", {"agent": "completed-rare"}, "agentruns_run_agent"),
        ("run", {"review": "good"}, "agentruns_review_rating"),
        ("run", {"q": "RARE"}, "agentruns_key_begins"),
        ("run", {"q": "ros"}, "agentruns_requester_begins"),
        ("approval", {"status": "all"}, "agentruns_approval_newest"),
        ("approval", {"status": "all", "q": "rare"}, "agentruns_key_begins"),
    ],
)
def test_an_index_finds_a_page(
    many: Run, model: str, query: dict[str, str], index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few of them, as beside a million: of two rows in three a planner may well read the whole table.
    monkeypatch.setattr(filters, "SEARCHED", 200)
    plans = {sql: plan(sql) for sql in grown(model, **query)}
    assert any(index in used for used in plans.values()), plans
    for used in (used for sql, used in plans.items() if "WHERE" in sql):
        whole = [line for line in used.splitlines() if "SCAN agentruns" in line or "Seq Scan" in line]
        assert not [line for line in whole if "INDEX" not in line], used
    is_found = url(many) in leads_to(listed(model, **query))
    assert is_found == (model == "run" and query not in ({}, {"status": "failed"})), "the newest are others"


def test_the_queue_opens_by_its_index(many: Run) -> None:
    multiply(Approval, 500, id=ID[connection.vendor].format(f"n + {MANY}"), call_id="'call-' || n")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    # SQLite knows no order of it in which NULL is the last.
    index = "agentruns_queue" if connection.vendor == "postgresql" else "agentruns_"
    (shown,) = [sql for sql in grown("approval") if "ORDER BY" in sql and "LIMIT" in sql]
    assert index in plan(shown), plan(shown)
    assert "Seq Scan" not in plan(shown)


def test_a_long_list_of_approvals_is_not_counted_to_its_end(
    many: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.counted, "__defaults__", (100,))
    text = words(listed("approval", status="all"))
    assert "100+ approvals" in text
    assert "Only 100 are counted and paged through." in text
    assert "1 approval " in words(listed("approval"))
    assert names("default", Run, "agent") == [
        "agent-0", "agent-1", "agent-2", "completed-rare", "gated-waiting",
    ]  # fmt: skip
    assert names("default", Approval, "tool_name") == ["refund", "tool-0", "tool-1", "tool-2"]
    Approval.objects.all().delete()
    assert names("default", Approval, "tool_name") == []


def test_digits_may_be_of_an_id_a_key_or_a_requester(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    card = world.waiting("BEEF-42")
    keyed, other = card.run, world.completed("other")
    named = world.completed("named")
    Session.objects.filter(pk=named.session_id).update(owner_name="Beefeater")
    Run.objects.filter(pk=other.pk).update(session=keyed.session_id, owner_name="")

    def found(term: str, model: Any = Run, prefix: str = "") -> set[Any]:
        which = filters.matching(term, Run.objects.all(), prefix)
        return set(model.objects.filter(which).values_list("pk", flat=True))

    assert found("beef") == {keyed.pk, other.pk, named.pk}
    assert found("beef-4") == {keyed.pk, other.pk}
    assert found("beef", Approval, "run__") == {card.pk}
    assert found(str(keyed.pk)) == {keyed.pk}
    assert found(str(keyed.pk)[:4]) == {keyed.pk, other.pk, named.pk}
    assert found(str(keyed.pk)[:4], Approval, "run__") == {card.pk}
    assert found("beefy") == found("dead") == found("%") == found("beef%' OR 1=1") == set()
    for whole in (str(keyed.pk).upper(), str(keyed.pk)[:18], keyed.pk.hex, str(keyed.pk)[:-1]):
        assert keyed.pk in found(whole), whole
    monkeypatch.setattr(filters, "MOST", 1)
    assert found("beef") == {named.pk, other.pk}, "of more than are counted, those started last"


def test_an_append_writes_no_index_for_a_search_by_digest(db: None) -> None:
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, Run._meta.db_table)
    assert sum("definition_id" in each["columns"] for each in found.values() if each["index"]) == 1


@pytest.mark.parametrize("requester_may", [True, False])
@pytest.mark.parametrize("rule", ["agentruns.Policy", f"{__name__}.OnlyTwos"])
def test_mine_are_those_that_people_says(settings: Any, requester_may: bool, rule: str) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = requester_may
    decider = user("decider")
    decider.groups.add(Group.objects.create(name="treasurers"))
    waiting("free")
    for number, approvers in enumerate(("treasurers", "auditors", "decide_approval", "approval")):
        waiting(f"a{number}", approvers=approvers)
    waiting("full", approvers="agentruns.decide_approval")
    waiting("other", approvers="agentruns.resume_run")
    waiting("own", actor=decider)
    waiting("foreign", actor=user("viewer"))
    run_out(waiting("late", hours=1))
    approve(waiting("given2", approvals=2).pk, decider)
    approve(waiting("half2", approvals=2).pk, user("revealer"))
    settings.AGENTRUNS_POLICY = rule
    told = {}
    for role in ("decider", "revealer", "superuser", "viewer", "staff"):
        who, pending = user(role), Approval.objects.pending()
        expected = {card.tool_name for card in decidable(who, list(pending.select_related("run")))}
        assert {card.tool_name for card in decidable_by(who, pending)} == expected, role
        told[role] = len(expected)
        if expected:
            figures = words(read(browser(role).get(reverse("admin:index"))))
            assert f" {len(expected)} waiting for you" in figures
    assert told["viewer"] == told["staff"] == 0
    assert told["superuser"] > told["decider"] > 0 or rule != "agentruns.Policy"


class OnlyTwos(Policy):
    """Lets people decide about tools whose names end with a 2."""

    def decidable(self, user: Any, approvals: Any) -> Any:
        return approvals.filter(tool_name__endswith="2")

    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        return approval.tool_name.endswith("2")
