"""The queue: the most urgent first, whose turn it is, and what opens next."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from agentruns import Policy, approve, run_agent, tool
from agentruns.models import Approval
from tests.admin.pages import read, url
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.db.helpers import run_out
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db
QUEUE = "admin:agentruns_approval_changelist"


def waiting(name: str, risk: Any = "normal", hours: int = 0, **options: Any) -> Approval:
    def act(number: int = 1) -> str:
        """Act."""
        return "acted"

    lifetime = timedelta(hours=hours) if hours else None
    made = tool(name=name, requires_approval=True, risk=risk, expires_in=lifetime, **options)(act)
    agent = shop_agent(f"agent-{name}", {"tools": [call(name)]}, tools=[made])
    return run_agent(agent, "go", name).pending[0]


def listed(role: str = "superuser", **query: str) -> list[str]:
    """Return the tools of the cards in a list, in its order."""
    page = read(browser(role).get(reverse(QUEUE), query))
    shown = {url(approval): approval.tool_name for approval in Approval.objects.all()}
    links = [link.partition("?")[0] for link in page.links]
    return list(dict.fromkeys(shown[link] for link in links if link in shown))


def test_the_riskiest_is_first_then_what_expires_then_what_waits_longest() -> None:
    waiting("old")
    waiting("soon", hours=1)
    waiting("later", hours=9)
    waiting("young")
    waiting("harmless", risk="low", hours=1)
    waiting("dangerous", risk="high")
    waiting("pressing", risk="high", hours=9)
    order = ["pressing", "dangerous", "soon", "later", "old", "young", "harmless"]
    assert listed() == order
    assert listed(status="all") == ["pressing", "dangerous", "harmless", "young", "later", "soon", "old"]


def test_an_empty_queue_says_that_calls_are_in_doubt(world: World) -> None:
    def said(role: str = "superuser") -> str:
        page = read(browser(role).get(reverse(QUEUE)))
        target = "in-doubt/" if role == "superuser" else "?status=orphaned"
        assert (f"/admin/agentruns/run/{target}" in page.links) == ("in doubt" in page.text)
        return " ".join(page.text.partition("Nothing here waits")[2].partition("0 approvals")[0].split())

    assert said() == "for a decision."
    world.orphaned("s1")
    assert said() == "for a decision. In 1 run a call is in doubt"
    world.orphaned("s2")
    assert said() == "for a decision. In 2 runs a call is in doubt"
    assert said("viewer") == "for a decision. In 2 runs a call is in doubt", (
        "who may not resolve sees the runs"
    )
    assert said("decider") == "for a decision."  # who may not see runs
    world.waiting("s3")
    assert said() == ""


def test_mine_are_those_that_i_can_decide_and_have_not_decided(settings: Any) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    waiting("free")
    waiting("theirs", approvers="treasurers")
    both = waiting("both", approvals=2)
    agent = shop_agent("own", {"tools": [call("refund", cents=9000)]})
    run_agent(agent, "go", "own", actor=user("decider"))
    assert listed("decider", mine="yes") == ["refund", "free", "both"][1:]
    approve(both.pk, user("decider"))
    assert listed("decider", mine="yes") == ["free"]
    assert len(listed("decider")) == 4
    assert listed("viewer", mine="yes") == []
    settings.AGENTRUNS_POLICY = f"{__name__}.Nobody"
    assert listed("superuser", mine="yes") == []


class Nobody(Policy):
    def decidable(self, user: Any, approvals: Any) -> Any:
        """Let nobody decide."""
        return approvals.none()


def test_after_a_decision_the_next_card_that_i_can_decide_opens() -> None:
    first, second = waiting("first", risk="high"), waiting("second")
    waiting("foreign", approvers="treasurers")
    third = waiting("third")
    client = browser("decider")

    def decide(approval: Approval, filters: str = "") -> str:
        data = {"digest": approval.digest, "reason": "no"}
        return str(client.post(url(approval, "deny") + filters, data).url)

    assert decide(second) == url(third), "the one after it, not the first"
    assert decide(third) == url(first), "then from the start"
    answer = client.post(url(first, "deny"), {"digest": first.digest, "reason": "no"}, follow=True)
    assert answer.redirect_chain[-1][0] == reverse(QUEUE)
    assert "Nothing else waits for you." in read(answer).text


def test_the_filtered_list_is_kept_on_the_way() -> None:
    for name in ("one", "two"):
        waiting(name)
    kept = "?_changelist_filters=tool%3Done"
    again = run_agent(
        shop_agent("same", {"tools": [call("one")]}, tools=_tools("one")), "go", "same"
    ).pending[0]
    approval = Approval.objects.get(tool_name="one", run__agent="agent-one")
    client = browser("superuser")
    page = read(client.get(url(approval) + kept))
    assert url(again) + kept in page.links, "J goes to the next of the same list"
    response = client.post(url(approval, "approve") + kept, {"digest": approval.digest})
    assert response.url == url(again) + kept
    response = client.post(url(again, "approve") + kept, {"digest": again.digest})
    assert response.url == reverse(QUEUE) + "?tool=one", "two is not of this list"


def _tools(name: str) -> list[Any]:
    def act(number: int = 2) -> str:
        """Act."""
        return "acted"

    return [tool(name=name, requires_approval=True)(act)]


def test_from_the_index_to_a_decided_card_in_three_clicks(world: World) -> None:
    approval, client = world.waiting(), browser("decider")
    index = read(client.get(reverse("admin:index")))
    assert reverse(QUEUE) in index.links
    queue = read(client.get(reverse(QUEUE)))
    assert url(approval) in [link.partition("?")[0] for link in queue.links]
    card = read(client.get(url(approval)))
    client.post(url(approval, "approve"), card.forms[url(approval, "approve")])
    approval.refresh_from_db()
    assert approval.status == "approved"


def test_what_is_over_is_not_mine_and_not_next() -> None:
    first, over = waiting("first"), waiting("over", hours=1)
    run_out(over)
    assert listed("decider", mine="yes") == ["first"]
    data = {"digest": first.digest, "reason": "no"}
    assert browser("decider").post(url(first, "deny"), data).url == reverse(QUEUE)


def test_mine_costs_the_same_for_more_cards() -> None:
    def cost() -> int:
        with CaptureQueriesContext(connection) as queries:
            listed("decider", mine="yes")
        return len(queries)

    waiting("t0", approvers="treasurers")
    cost()  # logs in
    few = cost()
    for number in range(1, 8):
        waiting(f"t{number}", approvers="treasurers")
    assert cost() == few
