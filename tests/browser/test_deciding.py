"""Deciding as people do: by mouse, by keyboard, in two tabs, too late, twice."""

from __future__ import annotations

import pytest
from django.utils import timezone

from agentruns.services.sweep import sweep
from agentruns.testing import DatabaseClock
from tests.admin.people import user
from tests.browser.desk import CARD, CREDIT, MAIL, REFUND, TICKET, Desk
from tests.browser.visitor import INDEX, LOGIN, NARROW, QUEUE, REASON, Visitor, Visitors, decided, turn_path
from tests.effects import Effects

NOTHING_MORE = "Nothing else"


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


def test_on_a_telephone_in_the_dark(desk: Desk, visit: Visitors) -> None:
    refund, mail = desk.one(REFUND), desk.one(MAIL)
    visitor = visit(scheme="dark", size=NARROW)
    visitor.open(QUEUE)
    visitor.click(visitor.link(refund.title))
    visitor.wait_until_at(refund)
    visitor.choose("Edit and approve", cents="100")
    visitor.wait_for("Approved. A worker runs the call.")
    visitor.choose("Deny", **{REASON: "Call him."})
    visitor.wait_for("Denied.")
    assert [decided(one)[0] for one in (refund, mail)] == ["approved", "denied"]


ON_TOP = """button => {
    const box = button.getBoundingClientRect();
    return document.elementFromPoint(box.x + box.width / 2, box.y + 5) === button;
}"""
WORDS = """button => {
    const before = document.createRange();
    before.setStart(document.querySelector("#content"), 0);
    before.setEndBefore(button);
    return before.toString().split(/\\s+/).filter(word => /\\w/.test(word)).length;
}"""


def test_all_that_a_decision_takes_is_in_the_first_half_of_the_screen(desk: Desk, visit: Visitors) -> None:
    approval, visitor = desk.kettle(actor=user("operator")), visit(size={"width": 1440, "height": 900})
    page = visitor.open(approval)
    button = visitor.button("Approve")
    for shown in (
        "Refund 192.90 EUR",
        "3.90 EUR more than was paid",
        "Please refund the broken",
        "paid 189.00",
    ):
        box = page.get_by_text(shown).first.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 500, shown
    bar = button.bounding_box()
    assert bar is not None
    assert bar["y"] + bar["height"] < 500
    assert button.evaluate(WORDS) < 60
    assert "DE02" not in page.content()


@pytest.mark.parametrize("size", [{"width": 1440, "height": 900}, {"width": 390, "height": 700}])
def test_the_buttons_stay_in_sight(desk: Desk, visit: Visitors, size: dict[str, int]) -> None:
    visitor = visit(size=size)
    for where in (desk.one(MAIL), turn_path(desk.ask(REFUND, MAIL, TICKET)[0].run)):
        page = visitor.open(where)
        visitor.unfold()
        page.locator("#content details[id]").evaluate_all("all => all.forEach(one => one.open = false)")
        for place in (0, 0.5, 1):
            page.evaluate("place => window.scrollTo(0, document.body.scrollHeight * place)", place)
            box = page.locator(".ar-bar button").first.bounding_box()
            assert box is not None
            assert 0 <= box["y"] <= size["height"] - box["height"], (where, place)


def test_the_bar_hides_little_on_a_telephone_and_who_edits_has_one_note(desk: Desk, visit: Visitors) -> None:
    approval, visitor = desk.one(REFUND), visit(size={"width": 390, "height": 844})
    page = visitor.open(approval)
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


@pytest.mark.parametrize("verb", ["edit", "answer"])
def test_who_edits_or_answers_finds_the_way_back(desk: Desk, visitor: Visitor, verb: str) -> None:
    approval = desk.one(REFUND)
    page = visitor.open(approval)
    bar, fold = page.locator(".ar-bar"), page.locator(f"#{verb}")
    for refused in (False, True):
        if fold.get_attribute("open") is None:
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


def test_no_table_of_the_card_is_squeezed_on_a_telephone(desk: Desk, visit: Visitors) -> None:
    visitor = visit(size={"width": 390, "height": 844})
    page = visitor.open(desk.one(REFUND))
    visitor.unfold()
    widths = page.locator("#content :is(td, th, dd, dt)").filter(visible=True)
    narrow = "all => all.filter(one => one.innerText.trim()).map(one => one.clientWidth)"
    assert min(widths.evaluate_all(narrow)) > 100


def test_a_double_click_is_one_decision(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    visitor.open(approval)
    visitor.button("Approve").dblclick()
    visitor.wait_for("Approved")
    assert decided(approval) == ("approved", "superuser")
    assert approval.run.messages.filter(kind="approval_decided").count() == 1


def test_two_people_are_needed(desk: Desk, visit: Visitors, effects: Effects) -> None:
    approval, first, second = desk.one(CREDIT), visit("decider"), visit("superuser")
    for visitor in (first, second):
        visitor.open(approval)
    first.click(first.button("Approve"))
    first.wait_for("Your approval is recorded: 1 of 2.")
    assert decided(approval) == ("pending", "")
    first.open(approval)
    first.wait_for("You approved it already; it needs another person.")
    assert first.button("Approve").count() == 0
    second.click(second.button("Approve"))
    second.wait_for("Approved. A worker runs the call.")
    assert decided(approval) == ("approved", "superuser")
    assert (sweep().completed, effects.count()) == (1, 1)


@pytest.mark.parametrize(("verb", "fields"), [("Approve", {}), ("Deny", {REASON: "Too late."})])
def test_a_stale_tab_is_told_who_was_faster_and_when(
    desk: Desk, visit: Visitors, verb: str, fields: dict[str, str]
) -> None:
    approval, slow, fast = desk.one(), visit("superuser"), visit("decider")
    for visitor in (slow, fast):
        visitor.open(approval)
    fast.choose("Deny", **{REASON: "Repair it, please."})
    fast.wait_for("Denied.")
    with slow.refused():
        slow.choose(verb, **fields)
    assert decided(approval) == ("denied", "decider")
    when = timezone.localtime(approval.decided_at).strftime("%Y-%m-%d")
    slow.wait_for(f"Your decision was not recorded. Denied by decider on {when}")
    assert slow.page.get_by_role("alert").is_visible()
    assert approval.reason == "Repair it, please."


def test_two_tabs_of_one_person(desk: Desk, visitor: Visitor) -> None:
    approval, other = desk.one(), visitor.second_tab()
    visitor.open(approval)
    other.open(approval)
    visitor.click(visitor.button("Approve"))
    visitor.wait_for("Approved. A worker runs the call.")
    with other.refused():
        other.choose("Deny", **{REASON: "No, wait."})
    other.wait_for("Your decision was not recorded. Approved by superuser")
    assert decided(approval) == ("approved", "superuser")


def test_its_time_was_over_while_the_tab_was_open(
    desk: Desk, visitor: Visitor, database_clock: DatabaseClock, effects: Effects
) -> None:
    approval = desk.one(CARD)
    visitor.open(approval)
    visitor.wait_for("Expires")
    database_clock.forward(hours=5)
    with visitor.refused():
        visitor.click(visitor.button("Approve"))
    visitor.wait_for("Your decision was not recorded.")
    assert "expired" in visitor.text
    assert visitor.button("Approve").count() == 0
    sweep()
    visitor.open(approval)
    visitor.wait_for("Nobody answered in time")
    assert (decided(approval)[0], effects.count()) == ("expired", 0)


def test_the_next_card_of_the_queue_opens(desk: Desk, visitor: Visitor) -> None:
    mail, refund = desk.one(MAIL), desk.one(REFUND)
    visitor.open(QUEUE)
    visitor.click(visitor.link(refund.title))
    visitor.click(visitor.button("Approve"))
    visitor.wait_for("Approved. A worker runs the call.")
    assert str(mail.pk) in visitor.path
    visitor.click(visitor.button("Approve"))
    visitor.wait_for(NOTHING_MORE)
    assert {decided(mail)[0], decided(refund)[0]} == {"approved"}


def test_the_next_card_is_one_of_the_filtered_queue(desk: Desk, visitor: Visitor) -> None:
    first, other, second = desk.one(MAIL), desk.one(REFUND), desk.one(MAIL)
    visitor.open(f"{QUEUE}?tool=send_mail")
    visitor.click(visitor.link(first.title))
    visitor.click(visitor.button("Approve"))
    visitor.wait_for("Approved. A worker runs the call.")
    assert str(second.pk) in visitor.path
    visitor.click(visitor.button("Approve"))
    visitor.wait_for(NOTHING_MORE)
    assert decided(other)[0] == "pending"
