"""The front page and the lists follow what happens; a run is started and reviewed by hand."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from agentruns.models import Review, Run, Session
from tests.admin.people import user
from tests.admin.world import World
from tests.browser.desk import MAIL, REFUND, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import INDEX, QUEUE, RUNS, Visitor, Visitors
from tests.shop.agents import shop_agent

INTERVAL = 11_000  # milliseconds: more than any page waits between two looks


@pytest.mark.parametrize("where", [RUNS, QUEUE])
def test_an_open_list_says_what_is_new(desk: Desk, visit: Visitors, where: str) -> None:
    desk.one(REFUND, session="old")
    visitor = visit(clock=True)
    visitor.open(where)
    assert not visitor.page.locator(".ar-news a").is_visible()
    visitor.page.clock.fast_forward(INTERVAL)
    desk.one(MAIL, session="new")
    visitor.page.clock.fast_forward(INTERVAL)
    visitor.wait_for("1 new since you opened this")
    assert_sound(visitor.page)
    visitor.click(visitor.link("1 new since you opened this"))
    visitor.page.locator("#result_list tbody tr").nth(1).wait_for()
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
    visitor.page.clock.fast_forward(INTERVAL)
    visitor.click(visitor.page.locator(".ar-figure a", has_text="in doubt"))
    visitor.page.wait_for_url("**status=orphaned*")


@pytest.mark.parametrize("javascript", [True, False])
def test_runs_and_approvals_are_searched_from_the_first_screen(
    desk: Desk, visit: Visitors, javascript: bool
) -> None:
    approval = desk.one(REFUND, session="a-customer")
    for size in ({"width": 1280, "height": 720}, {"width": 390, "height": 844}):
        visitor = visit(javascript=javascript, size=size)
        page = visitor.open(INDEX)
        for place, button in ((RUNS, "Search runs"), (QUEUE, "Search approvals")):
            link = page.locator(f".ar-find a[href='{place}']")
            for element in (link, visitor.button(button)):
                box = element.bounding_box()
                assert box is not None
                assert box["y"] + box["height"] < size["height"]
    for button, found in (("Search runs", approval.run), ("Search approvals", approval)):
        visitor.open(INDEX).get_by_role("searchbox", name="Search").fill("a-customer")
        visitor.click(visitor.button(button))
        visitor.page.wait_for_url("**q=a-customer*")
        assert visitor.page.locator(f"#result_list a[href*='{found.pk}']").count() > 0


@pytest.mark.parametrize("javascript", [True, False])
def test_a_run_is_started_and_reviewed(desk: Desk, visit: Visitors, javascript: bool) -> None:
    shop_agent("helper", {"text": "done"}, starters="anyone")
    user("viewer")
    visitor = visit(javascript=javascript)
    visitor.open(INDEX)
    visitor.click(visitor.page.get_by_role("link", name="Start a run", exact=True))
    visitor.page.get_by_label("Agent:").select_option("helper")
    visitor.page.get_by_label("Task:").fill("Mend the lamp")
    visitor.click(visitor.button("Start"))
    visitor.wait_for("Started. A worker picks it up.")
    run = Run.objects.get()
    assert (run.input, run.agent) == ("Mend the lamp", "helper")
    visitor.click(visitor.page.locator("summary", has_text="Rate, note, assign"))
    visitor.page.get_by_label("good", exact=True).check()
    visitor.page.get_by_label("Assigned to").fill("viewer")
    visitor.page.get_by_label("Note, for colleagues").fill("Well done.")
    visitor.click(visitor.button("Save"))
    visitor.wait_for("The review is saved.")
    review = Review.objects.get()
    assert (review.rating, review.assignee_name, review.note) == (1, "viewer", "Well done.")
    assert visitor.button("Rate it good").get_attribute("aria-pressed") == "true"
    visitor.click(visitor.button("Rate it bad"))
    visitor.wait_for("Rated: bad")
    review.refresh_from_db()
    assert (review.rating, review.note) == (-1, "Well done."), "the rest of the review stays"
    if javascript:
        assert_sound(visitor.page)


def test_costs_lead_to_their_runs(visitor: Visitor) -> None:
    World().completed("ticket-6")
    visitor.open(INDEX)
    visitor.click(visitor.page.get_by_role("link", name="Costs and tokens"))
    visitor.page.get_by_label("by").select_option("day")
    visitor.click(visitor.button("Show"))
    visitor.page.wait_for_url("**by=day*")
    assert_sound(visitor.page)
    visitor.click(visitor.page.locator(".ar-costs tbody a").first)
    visitor.page.wait_for_url("**started_from=*")
    assert visitor.page.locator("#result_list tbody tr").count() == 1


def test_costs_are_drawn(visitor: Visitor) -> None:
    for number in range(3):
        run = World().completed(f"dear-{number}")
        Run.objects.filter(pk=run.pk).update(usage={"cost": f"{number}.50"}, cost=f"{number}.50", tokens=900)
    page = visitor.open(INDEX)
    visitor.click(page.locator("#content a[href*='/costs/']").first)
    page.wait_for_url("**/costs/**")
    assert page.locator(".ar-costs svg rect").count() > 0


@pytest.mark.usefixtures("_letters")
def test_no_cost_is_cut_on_a_phone(desk: Desk, visit: Visitors, settings: Any) -> None:
    settings.AGENTRUNS_CURRENCY = "EUR"
    desk.one(REFUND, session="dear")
    Run.objects.update(agent="support-desk-of-the-south", status="failed", cost=Decimal("102.5"))
    one = Run.objects.get()
    kept = [field.attname for field in Run._meta.concrete_fields if field.attname not in ("id", "session_id")]
    sessions = Session.objects.bulk_create(Session(key=f"{number}") for number in range(119))
    columns = {name: getattr(one, name) for name in kept}
    Run.objects.bulk_create(Run(session=session, **columns) for session in sessions)
    for width in (390, 320):
        page = visit(size={"width": width, "height": 844}).open(INDEX)
        assert "12300.00\xa0EUR" in page.locator(".ar-agents").inner_text()
        for scroll in page.locator(".ar-dashboard .ar-scroll").all():
            needed, room = scroll.evaluate("each => [each.scrollWidth, each.clientWidth]")
            assert needed <= room, (width, scroll.inner_text())
