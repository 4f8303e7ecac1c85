"""The front page and the lists follow what happens; a run is started and reviewed by hand."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from agentruns.models import Review, Run
from tests.admin.people import user
from tests.admin.world import many
from tests.browser.desk import MAIL, REFUND, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import INDEX, QUEUE, RUNS, Visitors
from tests.shop.agents import shop_agent

INTERVAL = 11_000  # milliseconds: more than any page waits between two looks


def test_an_open_list_says_what_is_new(desk: Desk, visit: Visitors) -> None:
    desk.one(REFUND)
    visitor = visit(clock=True)
    for number, where in enumerate((RUNS, QUEUE), start=1):
        visitor.open(where)
        assert not visitor.page.locator(".ar-news a").is_visible()
        visitor.page.clock.fast_forward(INTERVAL)
        desk.one(MAIL)
        visitor.page.clock.fast_forward(INTERVAL)
        visitor.wait_for("1 new since you opened this")
        assert_sound(visitor.page)
        visitor.click(visitor.link("1 new since you opened this"))
        visitor.page.locator("#result_list tbody tr").nth(number).wait_for()
    zones = [each["value"] for each in visitor.context.cookies() if each["name"] == "agentruns_zone"]
    assert zones == [visitor.page.evaluate("Intl.DateTimeFormat().resolvedOptions().timeZone")]


def test_the_front_page_follows_and_leaves_alone_what_somebody_uses(desk: Desk, visit: Visitors) -> None:
    visitor = visit(clock=True)
    page = visitor.open(INDEX)
    search = page.get_by_role("searchbox", name="Search")
    figure = page.locator(".ar-figure", has_text="in doubt")
    assert figure.inner_text().split()[0] == "0"
    desk.in_doubt()

    def look_twice() -> None:
        for _time in range(2):  # when it asks again it has taken in the first answer
            with page.expect_request("**/figures/"):
                page.clock.fast_forward(INTERVAL)

    search.fill("a-cust")
    page.evaluate("document.activeElement.blur()")
    look_twice()
    assert (search.input_value(), figure.inner_text().split()[0]) == ("a-cust", "0")
    search.fill("")
    page.locator(".ar-figure a").first.focus()
    look_twice()
    assert figure.inner_text().split()[0] == "0"
    page.evaluate("document.activeElement.blur()")
    page.clock.fast_forward(INTERVAL)
    page.locator(".ar-figure--bad", has_text="in doubt").wait_for()
    page.clock.fast_forward(INTERVAL)
    visitor.click(page.locator(".ar-figure a", has_text="in doubt"))
    page.wait_for_url("**status=orphaned*")


@pytest.mark.parametrize(
    ("javascript", "size"), [(True, {"width": 1280, "height": 720}), (False, {"width": 390, "height": 844})]
)
def test_runs_and_approvals_are_searched_from_the_first_screen(
    desk: Desk, visit: Visitors, javascript: bool, size: dict[str, int]
) -> None:
    approval, visitor = desk.one(REFUND, session="a-customer"), visit(javascript=javascript, size=size)
    for place, name, found in (
        (RUNS, "Search runs", approval.run),
        (QUEUE, "Search approvals", approval),
    ):
        page, button = visitor.open(INDEX), visitor.button(name)
        for element in (page.locator(f".ar-find a[href='{place}']"), button):
            box = element.bounding_box()
            assert box is not None
            assert box["y"] + box["height"] < size["height"]
        page.get_by_role("searchbox", name="Search").fill("a-customer")
        visitor.click(button)
        page.wait_for_url("**q=a-customer*")
        assert page.locator(f"#result_list a[href*='{found.pk}']").count() > 0


def test_a_run_is_started_and_reviewed_without_scripts(desk: Desk, visit: Visitors) -> None:
    shop_agent("helper", {"text": "done"}, starters="anyone")
    user("viewer")
    visitor = visit(javascript=False)
    page = visitor.open(INDEX)
    visitor.click(page.get_by_role("link", name="Start a run", exact=True))
    page.get_by_label("Agent:").select_option("helper")
    page.get_by_label("Task:").fill("Mend the lamp")
    visitor.click(visitor.button("Start"))
    visitor.wait_for("Started. A worker picks it up.")
    run = Run.objects.get()
    assert (run.input, run.agent) == ("Mend the lamp", "helper")
    visitor.click(page.locator("summary", has_text="Rate, note, assign"))
    page.get_by_label("good", exact=True).check()
    page.get_by_label("Assigned to").fill("viewer")
    page.get_by_label("Note, for colleagues").fill("Well done.")
    visitor.click(visitor.button("Save"))
    visitor.wait_for("The review is saved.")
    review = Review.objects.get()
    assert (review.rating, review.assignee_name, review.note) == (1, "viewer", "Well done.")
    assert visitor.button("Rate it good").get_attribute("aria-pressed") == "true"
    visitor.click(visitor.button("Rate it bad"))
    visitor.wait_for("Rated: bad")
    review.refresh_from_db()
    assert (review.rating, review.note) == (-1, "Well done."), "the rest of the review stays"


@pytest.mark.usefixtures("_letters")
def test_no_cost_is_cut_on_a_phone(desk: Desk, visit: Visitors, settings: Any) -> None:
    settings.AGENTRUNS_CURRENCY = "EUR"
    desk.one(REFUND, session="dear")
    Run.objects.update(agent="support-desk-of-the-south", status="failed", cost=Decimal("102.5"))
    many(Run.objects.get(), 119)
    visitor = visit()
    page = visitor.open(INDEX)
    assert "12300.00\xa0EUR" in page.locator(".ar-agents").inner_text()
    for width in (390, 320):
        visitor.resize({"width": width, "height": 844})
        for scroll in page.locator(".ar-dashboard .ar-scroll").all():
            needed, room = scroll.evaluate("each => [each.scrollWidth, each.clientWidth]")
            assert needed <= room, (width, scroll.inner_text())
