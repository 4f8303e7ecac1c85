"""Every page is usable by everybody: axe, light and dark, on a desk and on a telephone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from django.test import override_settings
from django.utils import timezone

from agentruns import Pending, approve, deny, run_agent, start_run, tool, wait_for_event, wait_until
from agentruns.models import Run
from agentruns.services.absences import plan_absence
from agentruns.services.api_tokens import create_token, revoke
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.admin.world import World
from tests.browser.desk import CARD, CREDIT, MAIL, QUESTION, REFUND, TICKET, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import INDEX, LOGIN, QUEUE, RUNS, Visitor, Visitors, call_path, turn_path
from tests.rows import write_raw
from tests.shop.agents import call, shop_agent


def lists(desk: Desk, visitor: Visitor) -> Iterator[None]:
    """The queue: empty, full, without a match, about to be denied, and of what was decided."""
    visitor.open(QUEUE)
    yield
    for what in (REFUND, MAIL, TICKET, CARD, CREDIT, QUESTION):
        desk.one(what)
    visitor.open(f"{QUEUE}?q=4711")
    yield
    visitor.open(QUEUE)
    yield
    visitor.select_all()
    visitor.act("Deny selected")
    yield
    deny(desk.one(MAIL).pk, user("superuser"), "No.")
    visitor.open(f"{QUEUE}?status=all")
    yield
    visitor.open(turn_path(desk.ask(REFUND, MAIL, TICKET)[0].run))
    yield


def cards(desk: Desk, visitor: Visitor) -> Iterator[None]:
    """Cards after a denial, of a call that expires and of a question, half approved, and decided."""
    deny(desk.one().pk, user("superuser"), "He was refunded by phone.")
    visitor.open(desk.ask(REFUND, MAIL)[0])
    yield
    for what in (CARD, QUESTION):
        visitor.open(desk.one(what))
        visitor.unfold()
        yield
    for what in (CREDIT, REFUND):
        approval = desk.one(what)
        approve(approval.pk, user("superuser"), digest=approval.digest, reason="He is right.")
        sweep()
        visitor.open(approval)
        yield


def refusals(desk: Desk, visitor: Visitor) -> Iterator[None]:
    """A card that was sent without a reason, without a password, and too late."""
    approval = desk.one()
    visitor.open(approval)
    visitor.page.locator("form").evaluate_all("forms => forms.forEach(form => form.noValidate = true)")
    with visitor.refused(400):
        visitor.choose("Deny")
    yield
    visitor.open(approval)
    with override_settings(AGENTRUNS_REAUTH_SECONDS=300), visitor.refused(403):
        visitor.choose("Approve")
    visitor.unfold()
    yield
    visitor.open(approval)
    deny(approval.pk, user("decider"), "Repair it.")
    with visitor.refused():
        visitor.choose("Approve")
    yield


def runs(desk: Desk, visitor: Visitor) -> Iterator[None]:
    """Runs that wait, are in doubt and have ended, and the forms to erase, to repeat and to start one."""
    ended, (doubt, call_id) = World().completed(), desk.in_doubt()
    approved = desk.one()
    approve(approved.pk, user("superuser"), digest=approved.digest, reason="He is right.")
    sweep()
    for where in (desk.ask(REFUND, MAIL)[0].run, doubt, approved.run, call_path(doubt, call_id)):
        visitor.open(where)
        visitor.unfold()
        yield
    for path in ("in-doubt/", "start/", f"{ended.pk}/rows/2/erase/"):
        visitor.open(f"{RUNS}{path}")
        yield
    visitor.open(ended)
    visitor.choose("Run again")
    yield
    drifted = start_run(shop_agent("desk", max_steps=3, deadline=timedelta(hours=2)), "look A1 up", "s1")
    shop_agent("desk", instructions="Take your time. " * 60, token_budget=5000)
    visitor.open(drifted)
    visitor.unfold()
    yield
    visitor.open(ended)
    visitor.choose("Verify chain")
    yield
    write_raw("agentruns_message", "content", "{", "id", doubt.messages.get(kind="assistant").pk)
    visitor.open(doubt)
    visitor.wait_for("Its journal cannot be read.")
    yield
    visitor.open(RUNS)
    visitor.select_all()
    visitor.act("Cancel selected")
    visitor.wait_for("Cancel these")
    yield


@tool(awaits="payment")
def charge(order: str) -> Pending:
    """Ask the customer to pay."""
    return Pending(f"invoice/{order}/{'7f3a9c' * 10}", timedelta(days=3))


def waits(desk: Desk, visitor: Visitor) -> Iterator[None]:
    """Runs that wait for an event and for a time, a payload that is no JSON, the list and the front page."""
    parcel = {"name": "parcel", "key": "7", "timeout_seconds": 900}
    calls = [{"name": "wait_for_event", "input": parcel}, call("wait_until", at="2999-01-01T00:00:00Z")]
    tools = [charge, wait_for_event, wait_until]
    asked = [{"tools": calls}, {"tools": [call("charge", order="ليلى-1")]}]
    for number, turn in enumerate(asked):
        agent = shop_agent(f"till-{number}", turn, tools=tools)
        visitor.open(Run.objects.get(pk=run_agent(agent, "Charge ليلى for 1.", f"s{number}").run_id))
        visitor.unfold()
        yield
    visitor.open(Run.objects.latest("created_at"))
    with visitor.refused(400):
        visitor.choose("Deliver", **{"What happened": "{paid"})
    yield
    visitor.open(f"{RUNS}?status=waiting")
    yield
    visitor.open(INDEX)
    yield


def absences(desk: Desk, visitor: Visitor) -> Iterator[None]:
    """The absences, and the form of one that cannot be planned."""
    path, today = "/admin/agentruns/approval/absences/", timezone.now()
    plan_absence(user("decider"), user("superuser"), today, today + timedelta(days=7), user("superuser"))
    visitor.open(path)
    yield
    times = {"From": "2031-01-02T08:00", "Until": "2031-01-01T08:00"}
    with visitor.refused(400):
        visitor.choose("Plan the absence", **{"Delegate (a username)": "decider", **times})
    yield


def front(desk: Desk, visitor: Visitor) -> Iterator[None]:
    """The front page, the costs, the app, and the tokens."""
    desk.one(session="ticket-4")
    deny(desk.one().pk, user("superuser"), "No.")
    for number in range(2):
        failed = World().completed(f"ticket-{number + 5}")
        error = f"ValueError: no lamp {number} is {'very ' * 30}left"
        Run.objects.filter(pk=failed.pk).update(status="failed", error=error)
    for path in (INDEX, f"{RUNS}costs/?by=day", "/admin/agentruns/"):
        visitor.open(path)
        yield
    token, _text = create_token(user("decider"), ["runs:read", "approvals:decide"], name="Of the night shift")
    ended, _text = create_token(user("viewer"), ["runs:read"], expires_in=timedelta(days=30))
    revoke(ended.pk, None)
    visitor.open("/admin/agentruns/apitoken/")
    yield
    visitor.open(token)
    visitor.unfold()
    yield


@pytest.mark.parametrize("pages", [lists, cards, refusals, runs, waits, absences, front])
def test_everybody_can_use_the_pages(
    desk: Desk, visitor: Visitor, pages: Callable[[Desk, Visitor], Iterator[None]]
) -> None:
    for _page in pages(desk, visitor):
        assert_sound(visitor.page)


def test_who_may_only_look_and_who_has_to_log_in_can_use_the_page(desk: Desk, visit: Visitors) -> None:
    viewer, guest = visit("viewer"), visit("anonymous")
    viewer.open(desk.one())
    viewer.wait_for("You cannot decide this.")
    assert_sound(viewer.page)
    guest.open(LOGIN)
    assert_sound(guest.page)
