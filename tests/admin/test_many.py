"""The lists beside very many runs: an index finds each page, and what is found is what was meant."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from agentruns import Policy, approve, run_agent, tool
from agentruns.admin import base, filters
from agentruns.admin.filters import names
from agentruns.models import Approval, ContextValue, Review, Run, Session
from agentruns.services.permissions import decidable, decidable_by
from tests.admin.pages import Page, read, url
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.db.crowds import ID, multiply, plan
from tests.db.helpers import run_out
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db
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


def asked(model: str, query: str) -> tuple[Page, list[str]]:
    """Return a list, and what was asked of the tables that grow."""
    client, where = browser("superuser"), reverse(f"admin:agentruns_{model}_changelist")
    with CaptureQueriesContext(connection) as queries:
        page = read(client.get(f"{where}?{query}"))
    tables = ('FROM "agentruns_run"', 'FROM "agentruns_approval"')
    return page, [each["sql"] for each in queries if any(table in each["sql"] for table in tables)]


@pytest.mark.parametrize(
    ("model", "query", "index"),
    [
        ("run", "", "agentruns_run_newest"),
        ("run", "status=failed", "agentruns_run_status"),
        ("run", "agent=completed-rare", "agentruns_run_agent"),
        ("run", "review=good", "agentruns_review_rating"),
        ("run", "q=RARE", "agentruns_key_begins"),
        ("run", "q=ros", "agentruns_requester_begins"),
        ("approval", "status=all", "agentruns_approval_newest"),
        ("approval", "status=all&q=rare", "agentruns_key_begins"),
    ],
)
def test_an_index_finds_a_page(
    many: Run, model: str, query: str, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few of them, as beside a million: of two rows in three a planner may well read the whole table.
    monkeypatch.setattr(filters, "SEARCHED", 200)
    page, queries = asked(model, query)
    plans = {sql: plan(sql) for sql in queries}
    assert any(index in used for used in plans.values()), plans
    for used in (used for sql, used in plans.items() if "WHERE" in sql):
        whole = [line for line in used.splitlines() if "SCAN agentruns" in line or "Seq Scan" in line]
        assert not [line for line in whole if "INDEX" not in line], used
    shown = [link for link in page.links if link.startswith(url(many))]
    assert bool(shown) == (model == "run" and query not in ("", "status=failed")), "the newest are others"


def test_the_queue_opens_by_its_index(many: Run) -> None:
    multiply(Approval, 500, id=ID[connection.vendor].format(f"n + {MANY}"), call_id="'call-' || n")
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    _page, queries = asked("approval", "")
    # SQLite knows no order of it in which NULL is the last.
    index = "agentruns_queue" if connection.vendor == "postgresql" else "agentruns_"
    (shown,) = [sql for sql in queries if "ORDER BY" in sql and "LIMIT" in sql]
    assert index in plan(shown), plan(shown)
    assert "Seq Scan" not in plan(shown)


def test_each_name_once_in_order(many: Run) -> None:
    assert names("default", Run, "agent") == [
        "agent-0", "agent-1", "agent-2", "completed-rare", "gated-waiting",
    ]  # fmt: skip
    assert names("default", Approval, "tool_name") == ["refund", "tool-0", "tool-1", "tool-2"]
    Approval.objects.all().delete()
    assert names("default", Approval, "tool_name") == []


def test_digits_may_be_of_an_id_of_a_key_or_of_a_requester(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert found("beefy") == found("dead") == set()
    monkeypatch.setattr(filters, "MOST", 1)
    assert found("beef") == {named.pk, other.pk}, "of more than are counted, those started last"


def test_a_long_list_of_approvals_is_not_counted_to_its_end(
    many: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.counted, "__defaults__", (100,))
    text = " ".join(asked("approval", "status=all")[0].text.split())
    assert "100+ approvals" in text
    assert "Only 100 are counted and paged through." in text
    assert "1 approval " in " ".join(asked("approval", "")[0].text.split())


def test_an_append_writes_no_index_for_a_search_by_digest(world: World) -> None:
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, Run._meta.db_table)
    of_digest = [
        name for name, index in found.items() if index["index"] and "definition_id" in index["columns"]
    ]
    assert len(of_digest) == 1


def waiting(name: str, actor: Any = None, **options: Any) -> Approval:
    def act(number: int = 1) -> str:
        """Act."""
        return "acted"

    made = tool(name=name, requires_approval=True, **options)(act)
    agent = shop_agent(f"agent-{name}", {"tools": [call(name)]}, tools=[made])
    return run_agent(agent, "go", name, actor=actor).pending[0]


@pytest.mark.parametrize("requester_may", [True, False])
@pytest.mark.parametrize("rule", ["agentruns.Policy", "tests.admin.test_many.OnlyTwos"])
def test_mine_are_those_that_people_says(settings: Any, requester_may: bool, rule: str) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = requester_may
    decider = user("decider")
    decider.groups.add(Group.objects.create(name="treasurers"))
    waiting("free")
    for number, approvers in enumerate(("treasurers", "auditors", "decide_approval", "approval")):
        waiting(f"a{number}", approvers=approvers)
    waiting("full", approvers="agentruns.decide_approval")
    waiting("other", approvers="agentruns.resume_run")
    waiting("own", decider)
    waiting("foreign", user("viewer"))
    run_out(waiting("late", expires_in=timedelta(hours=1)))
    approve(waiting("given2", approvals=2).pk, decider)
    approve(waiting("half2", approvals=2).pk, user("revealer"))
    settings.AGENTRUNS_POLICY = rule
    told = {}
    for role in ("decider", "revealer", "superuser", "viewer", "staff"):
        who, pending = user(role), Approval.objects.pending()
        expected = {card.tool_name for card in decidable(who, list(pending.select_related("run")))}
        assert {card.tool_name for card in decidable_by(who, pending)} == expected, role
        told[role] = len(expected)
        if role != "staff" and role != "viewer":
            figures = " ".join(read(browser(role).get(reverse("admin:index"))).text.split())
            assert f" {len(expected)} waiting for you" in figures
    assert told["viewer"] == told["staff"] == 0
    assert told["superuser"] > told["decider"] > 0 or rule != "agentruns.Policy"


class OnlyTwos(Policy):
    """Lets people decide about tools whose names end with a 2."""

    def decidable(self, user: Any, approvals: Any) -> Any:
        return approvals.filter(tool_name__endswith="2")

    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        return approval.tool_name.endswith("2")
