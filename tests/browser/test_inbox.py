"""docs/inbox: an inbox that knows only the OpenAPI document, under the strictest policy."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth import get_user_model
from playwright.sync_api import Locator, Route, expect

from agentruns import Agent, approve, run_agent, tool
from agentruns.services.api_tokens import create_token, revoke
from agentruns.testing import ScriptedModel
from tests.admin.people import user
from tests.browser.desk import CREDIT, MAIL, QUESTION, REFUND, TICKET, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitor, Visitors, decided
from tests.shop.agents import call

LIST = "**/api/approvals?status=pending"
HOSTILE = "Fine <img src=x onerror=alert(1)> \u202etoday"

# Where the first match of each pattern is drawn, by its left edge.
PLACES = """(box, patterns) => patterns.map((pattern) => {
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const found = new RegExp(pattern).exec(node.data);
    if (!found) continue;
    const range = document.createRange();
    range.setStart(node, found.index);
    range.setEnd(node, found.index + found[0].length);
    return range.getBoundingClientRect().left;
  }
})"""


@pytest.fixture
def inbox(visit: Visitors) -> Visitor:
    """Somebody without a session, in front of the inbox."""
    visitor = visit("anonymous")
    visitor.open("/inbox/index.html")
    return visitor


def card(inbox: Visitor, title: str) -> Locator:
    return inbox.page.locator("article").filter(has=inbox.page.get_by_role("heading", name=title))


def hold_polls(inbox: Visitor) -> Route:
    """Hold a poll back until it is continued: until then the page learns nothing by itself."""
    held: list[Route] = []
    with inbox.page.expect_request(LIST):
        inbox.page.route(LIST, lambda route: held.append(route))
    while not held:  # the route is told right after the request
        inbox.page.evaluate("0")
    return held[0]


def test_an_inbox_of_another_language(inbox: Visitor, desk: Desk) -> None:
    superuser, page = user("superuser"), inbox.page
    refund, ticket, mail, _question = desk.ask(REFUND, TICKET, MAIL, QUESTION, actor=superuser)
    hostile = desk.one({"name": "send_mail", "input": {"to": "x@y.z", "subject": HOSTILE, "body": "Hi"}})
    token, text = create_token(superuser, ["runs:read", "approvals:decide"])

    with inbox.refused(401):
        page.get_by_label("API token").fill("ar_mistyped")
        page.get_by_role("button", name="Open").click()
    inbox.wait_for("not that of a valid token")
    page.get_by_label("API token").fill(text)
    page.get_by_role("button", name="Open").click()
    inbox.wait_for("5 waiting")
    assert page.evaluate("Object.keys(localStorage).length") == 0
    assert_sound(page)

    first = card(inbox, "Refund 349.00 EUR for order 1004")
    about = r"high risk, requested by superuser \(agent helpdesk\), (just now|\d+ minutes ago)"
    expect(first.locator(".about")).to_have_text(re.compile(about))
    assert "cents: 34900" in first.locator("pre").inner_text()
    first.get_by_role("button", name="Approve").click()
    inbox.wait_for("You decided: approved. A worker does the rest.")
    assert decided(refund) == ("approved", "superuser")

    second = card(inbox, "Close ticket 4")
    second.get_by_label("Reason").fill("It is still open.")
    second.get_by_role("button", name="Deny").click()
    inbox.wait_for("You decided: denied.")
    assert (decided(ticket), ticket.reason) == (("denied", "superuser"), "It is still open.")

    asked = page.locator("article").filter(has_text="Do we send one?")
    asked.get_by_label("Its result").fill("Yes, a new one")
    asked.get_by_role("button", name="Answer").click()
    inbox.wait_for("You decided: answered.")

    held = hold_polls(inbox)
    approve(mail.pk, user("decider"))
    with inbox.refused(409):
        card(inbox, "Mail to david").get_by_role("button", name="Approve").click()
    inbox.wait_for("It is approved by decider, ")
    held.continue_()
    page.unroute(LIST)

    # What a model wrote is a text, and shows what it hides.
    assert "<img src=x onerror=alert(1)> \\u202etoday" in card(inbox, "Mail to x@y.z").inner_text()

    credit = desk.one(CREDIT, actor=superuser)
    approve(hostile.pk, user("decider"))
    two = card(inbox, "Credit 150.00 EUR")
    two.get_by_role("button", name="Approve").click()
    inbox.wait_for("1 of 2 agreed")
    assert decided(credit)[0] == "pending"
    card(inbox, "Mail to x@y.z").get_by_text("It is approved by decider").wait_for()

    with inbox.refused(401):
        revoke(token.pk, superuser)
    page.get_by_label("API token").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


@tool(requires_approval=True, describe=lambda args: f"Voucher of 5.00 EUR to {args['to']}")
def voucher(to: str, cents: int) -> str:
    """Send a voucher."""
    return "sent"


def test_names_written_from_right_to_left_stand_where_the_sentence_has_them(inbox: Visitor) -> None:
    users, page = get_user_model().objects, inbox.page
    asks, decides = users.create_user("محمد"), users.create_superuser("حسن")
    turn = {"tools": [call("voucher", to="ليلى", cents=502)]}
    agent = Agent("وكيل 2", instructions="Serve.", tools=[voucher], model=ScriptedModel([turn]))
    (approval,) = run_agent(agent, "5.00 ليلى", "طلب 2", actor=asks).pending
    _token, text = create_token(user("superuser"), ["runs:read", "approvals:decide"])
    page.get_by_label("API token").fill(text)
    page.get_by_role("button", name="Open").click()
    inbox.wait_for("1 waiting")
    words = r"requested by محمد \(agent وكيل 2\), (just now|\d+ minutes ago)"
    expect(page.locator(".about").first).to_have_text(re.compile(words))
    assert page.locator("pre").first.inner_text() == "cents: 502\nto: ليلى"
    approve(approval.pk, decides)
    inbox.wait_for("It is approved by حسن, ")
    name, date = page.locator(".outcome").first.evaluate(PLACES, ["حسن", r"\d"])
    assert name < date  # else it reads as if the date came first


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (502, "<html>Bad gateway</html>", "The service answered 502. Try again."),
        (422, '{"detail": [{"msg": "none"}]}', "The service answered 422. Try again."),
        (200, "<html>Wi-Fi: sign in</html>", "There is no connection at the moment. Try again."),
        (0, "", "There is no connection at the moment. Try again."),
    ],
)
def test_a_refusal_of_the_inbox_is_a_sentence(
    inbox: Visitor, desk: Desk, status: int, body: str, sentence: str
) -> None:
    page, superuser = inbox.page, user("superuser")
    refund = desk.one(REFUND, actor=superuser)
    _token, text = create_token(superuser, ["runs:read", "approvals:decide"])
    held = list[Route]()
    page.get_by_label("API token").fill(text)
    page.get_by_role("button", name="Open").click()
    inbox.wait_for("1 waiting")

    def refuse(route: Route) -> None:
        held.append(route)
        route.fulfill(status=status, body=body) if status else route.abort()

    inbox.expected.add(status)
    page.route("**/approve", refuse)
    page.route(LIST, refuse)
    approve_it = page.get_by_role("button", name="Approve")
    page.evaluate("document.querySelectorAll('form[data-verb=approve]')[0].requestSubmit()")
    expect(page.locator(".outcome")).to_have_text(sentence)
    expect(page.locator("#status")).to_have_text(sentence)
    page.unroute_all()
    approve_it.dblclick()
    inbox.wait_for("You decided: approved.")
    assert decided(refund) == ("approved", "superuser")
    inbox.complaints.clear()
