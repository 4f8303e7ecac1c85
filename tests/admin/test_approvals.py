"""Deciding: what is recorded, and what somebody is told who comes too late."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from agentruns import approve, cancel_run, deny, run_agent, tool
from agentruns.engine.gate import DENIED
from agentruns.models import Approval
from agentruns.services.approvals import expire_due
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, read, snapshot, url
from tests.admin.people import browser, user
from tests.admin.world import ONCE, World
from tests.db.racing import at_once
from tests.effects import Effects
from tests.shop.agents import call, refund, shop_agent

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("requests_commit")]


def decide(approval: Approval, verb: str, role: str = "superuser", **changed: Any) -> Any:
    data = {"digest": approval.digest, "reason": "because", **changed}
    return browser(role).post(url(approval, verb), data, follow=True)


def decided(approval: Approval) -> tuple[str, str]:
    approval.refresh_from_db()
    return approval.status, approval.decided_by_name


def test_approving_records_and_a_worker_runs_it(world: World, effects: Effects) -> None:
    approval = world.waiting()
    page = read(decide(approval, "approve", "decider"))
    assert "Approved. A worker runs the call." in page.text
    assert decided(approval) == ("approved", "decider")
    assert effects.count() == 0
    row = approval.run.messages.get(kind="approval_decided")
    assert row.payload["actor"]["name"] == "decider"
    assert row.payload["digest"] == approval.digest
    assert sweep().completed == 1
    assert effects.count() == 1
    page = read(browser("decider").get(url(approval)))
    assert "Approved by decider on" in page.text
    assert "The call was started." in page.text
    assert list(page.forms) == ["/admin/logout/"]


def test_denying_needs_a_reason_and_tells_it_to_the_model(world: World, effects: Effects) -> None:
    approval, before = world.waiting(), snapshot()
    for reason in ("", "   \n"):
        response = decide(approval, "deny", reason=reason)
        page = read(response)
        assert response.status_code == 400
        assert "Nothing was decided yet. Say why, and press Deny again." in page.text
        assert "A denial needs a reason" in page.text
        assert DENIED.format(reason="(your reason)") in page.text, "word for word"
        assert page.forms[url(approval, "deny")]["digest"] == approval.digest
        assert url(approval, "approve") not in page.forms, "Enter cannot approve what was to be denied"
        assert "autofocus" in response.content.decode()
        assert snapshot() == before
    page = read(decide(approval, "deny", reason="She was refunded by phone."))
    assert "Denied. The call is not run, and the model is told why." in page.text
    assert decided(approval) == ("denied", "superuser")
    sweep()
    assert effects.count() == 0
    told = approval.run.messages.get(kind="tool_result").payload
    assert "She was refunded by phone." in told["content"]


@ONCE
def test_the_index_says_what_was_decided_lately(world: World) -> None:
    approval = world.waiting()
    decide(approval, "deny", reason="Not today.")
    entry = LogEntry.objects.get()
    assert (entry.user.get_username(), entry.object_id) == ("superuser", str(approval.pk))
    assert "Not today." in entry.get_change_message()


@ONCE
@pytest.mark.parametrize("digest", ["0" * 64, "", None, "x" * 65])
@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_a_card_that_is_not_the_one_shown_is_refused(world: World, verb: str, digest: str | None) -> None:
    approval, before = world.waiting(), snapshot()
    data = {"reason": "x"} if digest is None else {"reason": "x", "digest": digest}
    response = browser("superuser").post(url(approval, verb), data)
    assert response.status_code == (409 if digest == "0" * 64 else 400)
    read(response)
    assert snapshot() == before


def test_a_stale_tab_says_that_the_card_was_edited(world: World) -> None:
    approval = two_needed()
    shown = Approval.objects.get(pk=approval.pk)
    approve(approval.pk, user("decider"), arguments={"cents": 7000}, digest=approval.digest)
    before = snapshot()
    response = decide(shown, "approve")
    page = read(response)
    assert response.status_code == 409
    assert "Its arguments were edited since you looked." in page.text
    assert "7000" in page.text
    assert snapshot() == before


def two_needed() -> Approval:
    both = tool(name="both", requires_approval=True, approvals=2)(refund.fn)
    agent = shop_agent("two", {"tools": [call("both", cents=9000)]}, tools=[both])
    return run_agent(agent, "refund", "two").pending[0]


def test_two_people_are_needed(world: World) -> None:
    approval = two_needed()
    assert "Needs 2 people: 0 approved" in read(browser("decider").get(url(approval))).text, (
        "before the press"
    )
    page = read(decide(approval, "approve", "decider"))
    assert "Your approval is recorded: 1 of 2." in page.text
    page = read(browser("decider").get(url(approval)))
    assert "You approved it already; it needs another person." in page.text
    assert url(approval, "approve") not in page.forms
    assert url(approval, "deny") in page.forms, "a mind may be changed"
    assert decided(approval) == ("pending", "")
    response = decide(approval, "approve", "decider")
    assert response.status_code == 409
    assert "it takes 2 people" in read(response).text
    assert "Approved. A worker runs the call." in read(decide(approval, "approve")).text
    page = read(browser("superuser").get(url(approval)))
    assert page.text.count("decider ·") == page.text.count("superuser ·") == 1


def test_what_one_approved_one_may_still_deny(world: World) -> None:
    approval = two_needed()
    for verb in ("approve", "deny"):
        assert decide(approval, verb, "decider").status_code == 200
    assert decided(approval) == ("denied", "decider")


def test_a_double_click_is_one_decision(world: World) -> None:
    approval = world.waiting()
    decide(approval, "approve")
    before = snapshot()
    response = decide(approval, "approve")
    assert response.status_code == 200
    assert "Approved by superuser on" in read(response).text
    assert snapshot() == before


def test_somebody_else_was_faster(world: World) -> None:
    approval = world.waiting()
    deny(approval.pk, user("decider"), "no")
    before = snapshot()
    for verb, data in {
        "approve": {},
        "deny": {},
        "edit": {"argument-cents": "1"},
        "answer": {"text": "x"},
        "extend": {"hours": "4", "seen": "2026-01-01T00:00:00Z"},
    }.items():
        response = decide(approval, verb, **data)
        page = read(response)
        assert response.status_code == 409
        assert "Your decision was not recorded. Denied by decider on" in page.text
        assert timezone.localtime().strftime("%Y-%m-%d ") in page.text
        assert snapshot() == before


def test_changing_ones_mind_is_told_what_stands(world: World) -> None:
    approval = world.waiting()
    decide(approval, "deny")
    response = decide(approval, "approve")
    assert response.status_code == 409
    assert "Your decision was not recorded. Denied by superuser" in read(response).text


def test_the_run_was_cancelled_meanwhile(world: World) -> None:
    approval = world.waiting()
    cancel_run(approval.run_id, user("superuser"), reason="enough")
    response = decide(approval, "approve")
    assert response.status_code == 409
    for page in (read(response), read(browser("superuser").get(url(approval)))):
        assert "Cancelled: its run ended or went on without it." in page.text
        assert list(page.forms) == ["/admin/logout/"]
    assert decided(approval) == ("cancelled", "")


def test_time_is_over_before_and_after_the_sweep_says_so(world: World) -> None:
    slow = tool(name="slow", requires_approval=True, expires_in=timedelta(milliseconds=1))(refund.fn)
    agent = shop_agent("slow", {"tools": [call("slow", cents=9000)]}, tools=[slow])
    approval = run_agent(agent, "refund", "slow").pending[0]
    page = read(browser("superuser").get(url(approval)))
    assert "It has expired." in page.text
    assert list(page.forms) == ["/admin/logout/"]
    before = snapshot()
    response = decide(approval, "approve")
    assert response.status_code == 409
    assert "expired at" in read(response).text
    assert snapshot() == before
    expire_due()
    page = read(decide(approval, "deny"))
    assert "Nobody answered in time" in page.text


def test_who_is_not_among_the_approvers_reads_so_and_is_refused(world: World) -> None:
    chosen = tool(name="chosen", requires_approval=True, approvers="treasurers")(refund.fn)
    agent = shop_agent("chosen", {"tools": [call("chosen", cents=9000)]}, tools=[chosen])
    approval = run_agent(agent, "refund", "chosen").pending[0]
    before = snapshot()
    page = read(browser("decider").get(url(approval)))
    assert "chosen is decided by treasurers; decider is not among them." in page.text
    response = decide(approval, "approve", "decider")
    assert response.status_code == 403
    assert "decider is not among them" in read(response).text
    assert snapshot() == before


def test_the_requester_may_not_approve_where_the_project_says_so(world: World, settings: Any) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    approval = world.waiting(actor=user("decider"))
    assert decide(approval, "approve", "decider").status_code == 403
    assert decided(approval) == ("pending", "")


@ONCE
def test_the_card_shows_what_is_decided_on(world: World) -> None:
    approval = world.waiting(actor=user("decider"))
    page = read(browser("decider").get(url(approval)))
    for shown in (approval.title, "cents", "5000", "number", "refund the lamp", "high", "decider"):
        assert shown in page.text
    assert "Why it is asked" not in page.text, "the tool's rule says nothing more"
    assert page.forms[url(approval, "approve")]["digest"] == approval.digest
    places = [
        page.text.rindex(approval.title),
        page.text.index("refund the lamp"),
        page.text.index("Approve A"),
    ]
    assert places == sorted(places)


@ONCE
def test_the_list_that_one_came_from_is_kept(world: World) -> None:
    approval = world.waiting()
    client = browser("superuser")
    kept = "?_changelist_filters=status%3Dall%26tool%3Drefund"
    page = read(client.get(url(approval) + kept))
    assert "/admin/agentruns/approval/?status=all&tool=refund" in page.links
    response = client.post(url(approval, "approve") + kept, {"digest": approval.digest})
    assert response.url == "/admin/agentruns/approval/?status=all&tool=refund"


def test_two_people_at_once_are_one_decision(world: World) -> None:
    approval = world.waiting()
    clients = {verb: browser(role) for verb, role in (("approve", "decider"), ("deny", "superuser"))}

    def click(verb: str) -> int:
        data = {"digest": approval.digest, "reason": "now"}
        return int(clients[verb].post(url(approval, verb), data).status_code)

    made = at_once(*(partial(click, verb) for verb in clients))
    answers = dict(zip(clients, made, strict=True))
    assert sorted(answers.values()) == [302, 409]
    assert approval.run.messages.filter(kind="approval_decided").count() == 1
    won = next(verb for verb, status in answers.items() if status == 302)
    assert decided(approval)[0] == {"approve": "approved", "deny": "denied"}[won]


@ONCE
def test_ages_and_expiry_in_the_list(world: World) -> None:
    approval = world.waiting()
    Approval.objects.filter(pk=approval.pk).update(
        requested_at=timezone.now() - timedelta(hours=3),
        expires_at=timezone.now() + timedelta(hours=5, minutes=1),
    )
    page = Page(browser("superuser").get("/admin/agentruns/approval/").content.decode())
    assert "3\xa0hours" in page.text
    assert "5\xa0hours" in page.text
