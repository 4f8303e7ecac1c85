"""The queue: what is urgent comes first, and each person finds what is theirs to decide."""

from __future__ import annotations

from agentruns import approve
from tests.admin.people import user
from tests.browser.desk import CARD, CREDIT, MAIL, REFUND, TICKET, Desk
from tests.browser.visitor import QUEUE, Visitor, Visitors


def titles(visitor: Visitor) -> list[str]:
    """Return what is asked, in the order of the page."""
    links = visitor.page.locator("#result_list tbody th a").all()
    return [link.inner_text().splitlines()[0] for link in links]


def choose(visitor: Visitor, name: str) -> None:
    """Choose something beside the list."""
    visitor.click(visitor.page.locator("#changelist-filter").get_by_role("link", name=name, exact=True))


def test_risk_comes_first_and_then_what_expires(desk: Desk, visitor: Visitor) -> None:
    asked = [desk.one(what) for what in (TICKET, MAIL, CARD, REFUND, CREDIT)]
    ticket, mail, card, refund, credit = [approval.title for approval in asked]
    visitor.open(QUEUE)
    assert titles(visitor) == [refund, credit, card, mail, ticket]


def test_mine_to_decide(desk: Desk, visit: Visitors) -> None:
    mail, credit = desk.one(MAIL), desk.one(CREDIT)
    approve(credit.pk, user("decider"), digest=credit.digest)
    visitor = visit("decider")
    visitor.open(QUEUE)
    assert titles(visitor) == [credit.title, mail.title]
    choose(visitor, "mine to decide")
    visitor.page.wait_for_url("**mine=yes*")
    assert titles(visitor) == [mail.title]


def test_by_tool_by_agent_and_by_status(desk: Desk, visitor: Visitor) -> None:
    mail, refund = desk.one(MAIL), Desk("billing").one(REFUND)
    visitor.open(QUEUE)
    choose(visitor, "send_mail")
    visitor.page.wait_for_url("**tool=send_mail*")
    assert titles(visitor) == [mail.title]
    visitor.open(QUEUE)
    choose(visitor, "billing")
    visitor.page.wait_for_url("**agent=billing*")
    assert titles(visitor) == [refund.title]
    approve(refund.pk, user("superuser"), digest=refund.digest)
    visitor.open(QUEUE)
    assert titles(visitor) == [mail.title]
    choose(visitor, "approved")
    visitor.page.wait_for_url("**status=approved*")
    assert titles(visitor) == [refund.title]


def test_who_may_not_decide_has_no_actions(desk: Desk, visit: Visitors) -> None:
    approval = desk.one()
    visitor = visit("viewer")
    visitor.open(QUEUE)
    assert titles(visitor) == [approval.title]
    assert visitor.page.get_by_role("checkbox").count() == 0


def test_an_empty_queue_says_so(visitor: Visitor) -> None:
    visitor.open(QUEUE)
    assert "0 approvals" in visitor.text
