"""The queue: the most urgent first, whose turn it is, and what opens next."""

from __future__ import annotations

from typing import Any

import pytest
from django.urls import reverse

from agentruns import Policy, approve, run_agent
from agentruns.models import Approval
from tests.admin import pages
from tests.admin.pages import leads_to, look, queries, says, send, url
from tests.admin.people import browser, user
from tests.admin.world import World, waiting
from tests.db.helpers import run_out
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db
QUEUE = reverse("admin:agentruns_approval_changelist")


def listed(role: str = "superuser", **query: str) -> list[str]:
    """Return the tools of the cards in a list, in its order."""
    shown = {url(approval): approval.tool_name for approval in Approval.objects.all()}
    return [shown[link] for link in leads_to(pages.listed("approval", role, **query)) if link in shown]


def test_the_riskiest_is_first_then_what_expires_then_what_waits_longest() -> None:
    waiting("old")
    waiting("soon", hours=1)
    waiting("later", hours=9)
    waiting("young")
    waiting("harmless", risk="low", hours=1)
    waiting("dangerous", risk="high")
    waiting("pressing", risk="high", hours=9)
    assert listed() == ["pressing", "dangerous", "soon", "later", "old", "young", "harmless"]
    assert listed(status="all") == ["pressing", "dangerous", "harmless", "young", "later", "soon", "old"]


def test_an_empty_queue_says_that_calls_are_in_doubt(world: World) -> None:
    def said(role: str = "superuser") -> str:
        page = pages.listed("approval", role)
        target = "in-doubt/" if role == "superuser" else "?status=orphaned"
        assert (f"/admin/agentruns/run/{target}" in page.links) == ("in doubt" in page.text)
        return " ".join(
            page.text.partition("Nothing here waits")[2].partition("Absences and delegates")[0].split()
        )

    assert said() == "for a decision."
    world.orphaned("s1")
    assert said() == "for a decision. In 1 run a call is in doubt"
    world.orphaned("s2")
    assert said() == "for a decision. In 2 runs a call is in doubt"
    assert said("viewer") == said(), "who may not resolve sees the runs"
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
    client = browser("decider")
    few = queries(lambda: client.get(QUEUE, {"mine": "yes"}))
    for number in range(7):
        waiting(f"t{number}", approvers="treasurers")
    assert len(queries(lambda: client.get(QUEUE, {"mine": "yes"}))) == len(few)
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
    assert send(second, "deny", "decider", reason="no").url == url(third), "the one after it, not the first"
    assert send(third, "deny", "decider", reason="no").url == url(first), "then from the start"
    answer = send(first, "deny", "decider", reason="no", follow=True)
    assert answer.redirect_chain[-1][0] == QUEUE
    says(answer, "Nothing else waits for you.")
    last, over = waiting("last"), waiting("over", hours=1)
    run_out(over)
    assert listed("decider", mine="yes") == ["last"], "what is over is not mine, and not next"
    assert send(last, "deny", "decider", reason="no").url == QUEUE


def test_the_filtered_list_is_kept_on_the_way() -> None:
    approval, kept = waiting("one"), "?_changelist_filters=tool%3Done"
    waiting("two")
    again = waiting("one", agent="same")
    client = browser("superuser")
    links = look(approval, query=kept).links
    assert QUEUE + "?tool=one" in links, "back"
    assert url(again) + kept in links, "J goes to the next of the same list"
    response = client.post(url(approval, "approve") + kept, {"digest": approval.digest})
    assert response.url == url(again) + kept
    response = client.post(url(again, "approve") + kept, {"digest": again.digest})
    assert response.url == QUEUE + "?tool=one", "two is not of this list"
    odd = waiting("odd")
    for filters in ("foo%3Dbar", "run__x%3D1", "id%3Dx", "status%3Dall%26p%3D99"):  # of no list of ours
        kept = f"?_changelist_filters={filters}"
        look(odd, query=kept)
        assert client.post(url(odd, "approve") + kept, {"digest": odd.digest}).status_code == 302
