"""Every page is usable by everybody: axe, light and dark, on a desk and on a telephone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings

from agentruns import approve, deny
from agentruns.models import Run
from agentruns.services.api_tokens import create_token, revoke
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.admin.world import World
from tests.browser.desk import CARD, CREDIT, MAIL, QUESTION, REFUND, TICKET, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import INDEX, LOGIN, QUEUE, RUNS, Visitor, Visitors, call_path, turn_path

PAGES: dict[str, Callable[[Desk, Visitor], Any]] = {}


def page(show: Callable[[Desk, Visitor], Any]) -> Callable[[Desk, Visitor], Any]:
    """Let a function that opens a page be one of those looked at."""
    PAGES[show.__name__] = show
    return show


@page
def queue(desk: Desk, visitor: Visitor) -> None:
    for what in (REFUND, MAIL, TICKET, CARD, CREDIT, QUESTION):
        desk.one(what)
    visitor.open(QUEUE)


@page
def empty_queue(desk: Desk, visitor: Visitor) -> None:
    visitor.open(QUEUE)


@page
def decided_approvals(desk: Desk, visitor: Visitor) -> None:
    for what in (REFUND, MAIL):
        deny(desk.one(what).pk, user("superuser"), "No.")
    visitor.open(f"{QUEUE}?status=all")


@page
def card(desk: Desk, visitor: Visitor) -> None:
    deny(desk.one().pk, user("superuser"), "He was refunded by phone.")
    visitor.open(desk.ask(REFUND, MAIL)[0])


@page
def card_that_expires_with_every_form_open(desk: Desk, visitor: Visitor) -> None:
    visitor.open(desk.one(CARD))
    visitor.unfold()


@page
def card_of_a_question(desk: Desk, visitor: Visitor) -> None:
    visitor.open(desk.one(QUESTION))
    visitor.unfold()


@page
def card_half_approved(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(CREDIT)
    approve(approval.pk, user("superuser"), digest=approval.digest)
    visitor.open(approval)


@page
def card_decided(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    approve(approval.pk, user("superuser"), digest=approval.digest, reason="He is right.")
    sweep()
    visitor.open(approval)


@page
def card_with_a_mistake(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    visitor.open(approval)
    visitor.page.locator("form").evaluate_all("forms => forms.forEach(form => form.noValidate = true)")
    with visitor.refused(400):
        visitor.choose("Deny")


@page
def card_that_wants_a_password(desk: Desk, visitor: Visitor) -> None:
    visitor.open(desk.one())
    with override_settings(AGENTRUNS_REAUTH_SECONDS=300), visitor.refused(403):
        visitor.choose("Approve")
    visitor.unfold()


@page
def card_refused(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    visitor.open(approval)
    deny(approval.pk, user("decider"), "Repair it.")
    with visitor.refused():
        visitor.choose("Approve")


@page
def erasure(desk: Desk, visitor: Visitor) -> None:
    visitor.open(f"{RUNS}{World().completed().pk}/rows/2/erase/")


@page
def whole_reply(desk: Desk, visitor: Visitor) -> None:
    visitor.open(turn_path(desk.ask(REFUND, MAIL, TICKET)[0].run))


@page
def confirmation(desk: Desk, visitor: Visitor) -> None:
    for what in (REFUND, MAIL):
        desk.one(what)
    visitor.open(QUEUE)
    visitor.select_all()
    visitor.act("Deny selected")


@page
def orphan(desk: Desk, visitor: Visitor) -> None:
    visitor.open(call_path(*desk.in_doubt()))
    visitor.unfold()


@page
def calls_in_doubt(desk: Desk, visitor: Visitor) -> None:
    desk.in_doubt()
    visitor.open(f"{RUNS}in-doubt/")


@page
def done_already(desk: Desk, visitor: Visitor) -> None:
    visitor.open(World().completed())
    visitor.choose("Run again")


@page
def front_page(desk: Desk, visitor: Visitor) -> None:
    desk.one(session="ticket-4")
    deny(desk.one().pk, user("superuser"), "No.")
    for number in range(2):
        failed = World().completed(f"ticket-{number + 5}")
        error = f"ValueError: no lamp {number} is {'very ' * 30}left"
        Run.objects.filter(pk=failed.pk).update(status="failed", error=error)
    visitor.open(INDEX)


@page
def start(desk: Desk, visitor: Visitor) -> None:
    World().completed()
    visitor.open(f"{RUNS}start/")


@page
def nothing_found(desk: Desk, visitor: Visitor) -> None:
    desk.one()
    visitor.open(f"{QUEUE}?q=4711")


@page
def tokens(desk: Desk, visitor: Visitor) -> None:
    create_token(user("decider"), ["runs:read", "approvals:decide"], name="Inbox of the night shift")
    ended, _text = create_token(user("viewer"), ["runs:read"], expires_in=timedelta(days=30))
    revoke(ended.pk, None)
    visitor.open("/admin/agentruns/apitoken/")


@page
def token(desk: Desk, visitor: Visitor) -> None:
    visitor.open(create_token(user("decider"), ["runs:read"])[0])
    visitor.unfold()


@page
def run_that_waits(desk: Desk, visitor: Visitor) -> None:
    visitor.open(desk.ask(REFUND, MAIL)[0].run)
    visitor.unfold()


@page
def run_in_doubt(desk: Desk, visitor: Visitor) -> None:
    visitor.open(desk.in_doubt()[0])
    visitor.unfold()


@page
def run_that_ended(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    approve(approval.pk, user("superuser"), digest=approval.digest, reason="He is right.")
    sweep()
    visitor.open(approval.run)
    visitor.unfold()


@pytest.mark.parametrize("name", PAGES)
def test_everybody_can_use_the_page(desk: Desk, visitor: Visitor, name: str) -> None:
    PAGES[name](desk, visitor)
    assert_sound(visitor.page)


def test_who_may_only_look_can_use_the_card(desk: Desk, visit: Visitors) -> None:
    visitor = visit("viewer")
    visitor.open(desk.one())
    visitor.wait_for("You cannot decide this.")
    assert_sound(visitor.page)


def test_the_login(visit: Visitors) -> None:
    visitor = visit("anonymous")
    visitor.open(LOGIN)
    assert_sound(visitor.page)
