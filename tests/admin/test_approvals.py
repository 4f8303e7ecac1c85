"""Deciding: what is recorded, and what somebody is told who comes too late."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from agentruns import approve, cancel_run, deny, tool
from agentruns.engine.gate import DENIED
from agentruns.models import Approval
from agentruns.services.approvals.decisions import expire_due
from agentruns.services.sweep import sweep
from tests.admin.pages import listed, look, says, send, unchanged, url
from tests.admin.people import browser, user
from tests.admin.world import World, asked
from tests.db.racing import at_once
from tests.effects import Effects
from tests.shop.agents import call, refund

pytestmark = pytest.mark.django_db(transaction=True)
NO_FORMS = ["/admin/logout/"]


def decide(approval: Approval, verb: str, role: str = "superuser", **changed: Any) -> Any:
    return send(approval, verb, role, follow=True, **{"reason": "because", **changed})


def decided(approval: Approval) -> tuple[str, str]:
    approval.refresh_from_db()
    return approval.status, approval.decided_by_name


def gated(**options: Any) -> Approval:
    """Ask for a refund by a tool that has these options too."""
    made = tool(name="gated", requires_approval=True, **options)(refund.fn)
    return asked(call("gated", cents=9000), tools=[made])[0]


def test_approving_twice_is_one_decision(world: World, effects: Effects, requests_commit: str) -> None:
    approval = world.waiting()
    says(decide(approval, "approve", "decider"), "Approved. A worker runs the call.")
    with unchanged():
        says(decide(approval, "approve", "decider"), "Approved by decider on")
    assert decided(approval) == ("approved", "decider")
    assert effects.count() == 0
    row = approval.run.messages.get(kind="approval_decided").payload
    assert (row["actor"]["name"], row["digest"]) == ("decider", approval.digest)
    assert sweep().completed == 1
    assert effects.count() == 1
    page = look(approval, "Approved by decider on", "The call was started.", role="decider")
    assert list(page.forms) == NO_FORMS


def test_denying_needs_a_reason_and_tells_it_to_the_model(world: World, effects: Effects) -> None:
    approval = world.waiting()
    told = ("Nothing was decided yet. Say why, and press Deny again.", "A denial needs a reason")
    for reason in ("", "   \n"):
        with unchanged():
            page = says(decide(approval, "deny", reason=reason), *told, status=400)
        assert DENIED.format(reason="(your reason)") in page.text, "word for word"
        assert page.forms[url(approval, "deny")]["digest"] == approval.digest
        assert url(approval, "approve") not in page.forms, "Enter cannot approve what was to be denied"
        assert "autofocus" in page.html
    answer = decide(approval, "deny", reason="She was refunded by phone.")
    says(answer, "Denied. The call is not run, and the model is told why.")
    assert decided(approval) == ("denied", "superuser")
    entry = LogEntry.objects.get()
    assert (entry.user.get_username(), entry.object_id) == ("superuser", str(approval.pk))
    assert "She was refunded by phone." in entry.get_change_message(), "for the index"
    sweep()
    assert effects.count() == 0
    assert "She was refunded by phone." in approval.run.messages.get(kind="tool_result").payload["content"]


def test_a_card_that_is_not_the_one_shown_is_refused(world: World) -> None:
    approval, client = world.waiting(), browser("superuser")
    with unchanged():
        for verb, digest in product(("approve", "deny"), ("0" * 64, "", "x" * 65, None)):
            sent = {"reason": "x"} if digest is None else {"reason": "x", "digest": digest}
            says(client.post(url(approval, verb), sent), status=409 if digest == "0" * 64 else 400)
    stale = gated(approvals=2)
    approve(stale.pk, user("decider"), arguments={"cents": 7000}, digest=stale.digest)
    with unchanged():
        says(decide(stale, "approve"), "Its arguments were edited since you looked.", "7000", status=409)


def test_two_people_are_needed(world: World) -> None:
    approval = gated(approvals=2)
    assert "Needs 2 people: 0 approved" in look(approval, role="decider").text, "before the press"
    says(decide(approval, "approve", "decider"), "Your approval is recorded: 1 of 2.")
    page = look(approval, "You approved it already; it needs another person.", role="decider")
    assert url(approval, "approve") not in page.forms
    assert url(approval, "deny") in page.forms, "a mind may be changed"
    assert decided(approval) == ("pending", "")
    says(decide(approval, "approve", "decider"), "it takes 2 people", status=409)
    says(decide(approval, "approve"), "Approved. A worker runs the call.")
    page = look(approval)
    assert page.text.count("decider ·") == page.text.count("superuser ·") == 1
    sweep()
    approval = gated(approvals=2)
    for verb in ("approve", "deny"):
        assert decide(approval, verb, "decider").status_code == 200
    assert decided(approval) == ("denied", "decider"), "who approved may still deny"


def test_somebody_else_the_end_of_the_run_or_the_clock_was_faster(world: World, requests_commit: str) -> None:
    approval = world.waiting()
    deny(approval.pk, user("decider"), "no")
    told = "Your decision was not recorded. Denied by decider on"
    for verb, data in {
        "approve": {},
        "deny": {},
        "edit": {"argument-cents": "1"},
        "answer": {"text": "x"},
        "extend": {"hours": "4", "seen": "2026-01-01T00:00:00Z"},
    }.items():
        with unchanged():
            says(decide(approval, verb, **data), told, status=409)
    approval = world.waiting("cancelled")
    cancel_run(approval.run_id, user("superuser"), reason="enough")
    for page in (says(decide(approval, "approve"), status=409), look(approval)):
        assert "Cancelled: its run ended or went on without it." in page.text
        assert list(page.forms) == NO_FORMS
    assert decided(approval) == ("cancelled", "")
    approval = gated(expires_in=timedelta(milliseconds=1))
    assert list(look(approval, "It has expired.").forms) == NO_FORMS
    with unchanged():
        says(decide(approval, "approve"), "expired at", status=409)
    expire_due()
    says(decide(approval, "deny"), "Nobody answered in time", status=409)


def test_who_is_not_among_the_approvers_reads_so_and_is_refused(world: World) -> None:
    approval = gated(approvers="treasurers")
    assert "gated is decided by treasurers; decider is not among them." in look(approval, role="decider").text
    with unchanged():
        says(decide(approval, "approve", "decider"), "decider is not among them", status=403)


def test_the_card_shows_what_is_decided_on(world: World) -> None:
    approval = world.waiting(actor=user("decider"))
    told = (approval.title, "cents", "5000", "number", "refund the lamp", "high", "decider")
    page = look(approval, *told, role="decider")
    assert "Why it is asked" not in page.text, "the tool's rule says nothing more"
    assert page.forms[url(approval, "approve")]["digest"] == approval.digest
    below = page.text[page.text.rindex(approval.title) :]
    assert 0 < below.index("refund the lamp") < below.index("Approve A")
    Approval.objects.filter(pk=approval.pk).update(
        requested_at=timezone.now() - timedelta(hours=3),
        expires_at=timezone.now() + timedelta(hours=5, minutes=1),
    )
    shown = listed("approval").text
    assert "3\xa0hours" in shown and "5\xa0hours" in shown


def test_two_people_at_once_are_one_decision(world: World, requests_commit: str) -> None:
    approval = world.waiting()
    clients = {verb: browser(role) for verb, role in (("approve", "decider"), ("deny", "superuser"))}

    def click(verb: str) -> int:
        data = {"digest": approval.digest, "reason": "now"}
        return int(clients[verb].post(url(approval, verb), data).status_code)

    answers = dict(zip(clients, at_once(*(partial(click, verb) for verb in clients)), strict=True))
    assert sorted(answers.values()) == [302, 409]
    assert approval.run.messages.filter(kind="approval_decided").count() == 1
    won = next(verb for verb, status in answers.items() if status == 302)
    assert decided(approval)[0] == {"approve": "approved", "deny": "denied"}[won]
