"""Deciding as people do: by mouse, by keyboard, on a telephone, twice, several at a time."""

from __future__ import annotations

from itertools import product
from typing import Any

from agentruns.models import Approval
from tests.admin.people import user
from tests.browser.desk import MAIL, REFUND, TICKET, Desk
from tests.browser.visitor import INDEX, LOGIN, QUEUE, REASON, Visitor, Visitors, decided, turn_path
from tests.shop.agents import call


def test_from_the_login_to_a_decision_in_four_clicks(desk: Desk, visit: Visitors) -> None:
    approval, visitor = desk.one(), visit("anonymous")
    person = user("superuser")
    person.set_password("tea and coffee")
    person.save()
    page = visitor.open(INDEX)
    assert visitor.path == LOGIN
    page.get_by_label("Username").fill("superuser")
    page.get_by_label("Password").fill("tea and coffee")
    visitor.click(visitor.button("Log in"))
    visitor.click(visitor.link("Approvals"))
    visitor.click(visitor.link(approval.title))
    visitor.click(visitor.button("Approve"))
    visitor.wait_for("Approved. A worker runs the call.")
    assert visitor.clicks <= 4
    assert decided(approval) == ("approved", "superuser")


ON_TOP = """button => {
    const box = button.getBoundingClientRect();
    return document.elementFromPoint(box.x + box.width / 2, box.y + 5) === button;
}"""


def test_the_buttons_stay_in_sight(desk: Desk, visitor: Visitor) -> None:
    for where in (desk.one(MAIL), turn_path(desk.ask(REFUND, MAIL, TICKET)[0].run)):
        page = visitor.open(where)
        visitor.unfold()
        page.locator("#content details[id]").evaluate_all("all => all.forEach(one => one.open = false)")
        for width, height in ((1440, 900), (390, 700)):
            visitor.resize({"width": width, "height": height})
            for place in (0, 0.5, 1):
                page.evaluate("place => window.scrollTo(0, document.body.scrollHeight * place)", place)
                box = page.locator(".ar-bar button").first.bounding_box()
                assert box is not None
                assert 0 <= box["y"] <= height - box["height"], (where, width, place)


def test_a_card_on_a_telephone_in_the_dark(desk: Desk, visit: Visitors) -> None:
    approval, mail = desk.one(REFUND), desk.one(MAIL)
    visitor = visit(scheme="dark", size={"width": 390, "height": 844})
    page = visitor.open(QUEUE)
    visitor.click(visitor.link(approval.title))
    visitor.wait_until_at(approval)
    visitor.unfold()
    texts = page.locator("#content :is(td, th, dd, dt)").filter(visible=True)
    widths = "all => all.filter(one => one.innerText.trim()).map(one => one.clientWidth)"
    assert min(texts.evaluate_all(widths)) > 100, "no table is squeezed"
    page.reload()
    bar, notes = page.locator(".ar-bar"), page.locator("#content [name=reason]").filter(visible=True)
    box = bar.bounding_box()
    assert box is not None
    assert box["height"] <= 60
    assert notes.count() == 1
    notes.fill("By telephone.")
    visitor.click(bar.get_by_role("link", name="Edit…"))
    assert not bar.is_visible(), "nothing approves what was not edited"
    assert notes.count() == 1
    assert notes.input_value() == "By telephone."
    page.get_by_label("cents").fill("100")
    button = visitor.button("Approve with these arguments")
    button.scroll_into_view_if_needed()
    assert button.evaluate(ON_TOP)
    visitor.click(button)
    visitor.wait_for("Approved.")
    assert (decided(approval)[0], approval.reason) == ("approved", "By telephone.")
    visitor.choose("Deny", **{REASON: "Call him."})
    visitor.wait_for("Denied.")
    assert decided(mail)[0] == "denied"


def test_who_edits_or_answers_finds_the_way_back(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(REFUND)
    for verb, refused in product(("edit", "answer"), (False, True)):
        page = visitor.open(approval)
        bar, fold = page.locator(".ar-bar"), page.locator(f"#{verb}")
        way = fold.locator("summary")
        visitor.click(way if way.is_visible() else bar.get_by_role("link", name="Edit…"))
        assert not bar.is_visible()
        if refused:
            fold.locator("[name=digest]").evaluate("field => { field.value = ''; }")
            fold.locator("[name=text], [name=argument-cents]").fill("1")
            with visitor.refused(400):
                visitor.click(fold.locator("button[type=submit]"))
            assert not page.locator(".ar-bar").is_visible()
        visitor.click(fold.get_by_role("link", name="Not now"))
        bar.wait_for(state="visible")
        assert visitor.button("Approve").is_visible()
        assert fold.get_attribute("open") is None
    assert decided(approval) == ("pending", "")


def test_a_double_click_is_one_decision(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    visitor.open(approval)
    visitor.button("Approve").dblclick()
    visitor.wait_for("Approved")
    assert decided(approval) == ("approved", "superuser")
    assert approval.run.messages.filter(kind="approval_decided").count() == 1


def refunds(desk: Desk, *cents: int) -> list[Approval]:
    return desk.ask(*(call("refund_order", order="1004", cents=one, reason="Broke.") for one in cents))


def said(visitor: Visitor) -> str:
    return visitor.page.get_by_role("status").inner_text()


def test_number_and_sum_follow_the_ticks(desk: Desk, visitor: Visitor, settings: Any) -> None:
    page = visitor.open(turn_path(refunds(desk, 123456, 5, 99900)[0].run))
    assert said(visitor) == "3 of 3 calls ticked, amount 2,233.61 EUR in total"
    boxes = page.locator(".ar-lines input[type=checkbox]")
    for number, words in (
        (2, "2 of 3 calls ticked, amount 1,234.61"),
        (0, "1 of 3 calls ticked, amount 0.05"),
    ):
        boxes.nth(number).uncheck()
        assert said(visitor) == f"{words} EUR in total"
    boxes.nth(1).uncheck()
    assert said(visitor) == "0 of 3 calls ticked, amount 0.00 EUR in total"
    boxes.nth(0).check()
    visitor.click(visitor.button("Approve all ticked"))
    visitor.wait_for("Approved.")
    visitor.wait_for("2 of 2 calls ticked, amount 999.05 EUR in total")
    visitor.open(turn_path(desk.ask(REFUND, TICKET)[0].run))
    assert said(visitor) == "2 of 2 calls ticked", "no sum of two tools"
    boxes.first.uncheck()
    assert said(visitor) == "1 of 2 calls ticked"
    settings.LANGUAGE_CODE = "de"
    visitor.open(turn_path(refunds(desk, 123450, 1)[0].run))
    assert said(visitor).endswith("amount 1.234,51 in total"), "as this page writes numbers"
