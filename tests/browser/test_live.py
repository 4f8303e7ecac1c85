"""A page of a run that is open follows the run, and leaves alone what somebody is using."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentruns import approve
from agentruns.admin import RunAdmin
from agentruns.models import Approval
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.admin.world import World
from tests.browser.desk import Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitor, Visitors, path_of

QUIET = 600_000  # milliseconds: longer than a page ever waits between two looks


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunAdmin, "live_interval", 100)


@pytest.fixture
def visitor(visit: Visitors) -> Visitor:
    """Somebody who may do everything, at a page whose clock can be moved."""
    return visit(clock=True)


def decide(approval: Approval) -> None:
    """Somebody else approves, and a worker drives the run to its end."""
    approve(approval.pk, user("superuser"), digest=approval.digest)
    sweep()


def asked(visitor: Visitor) -> Callable[[], int]:
    """Build the function that lets time pass and counts how often the page has asked by then."""
    found: list[str] = []
    visitor.page.on("request", lambda request: found.append(request.url) if "/live/" in request.url else None)

    def count() -> int:
        visitor.page.clock.fast_forward(QUIET)
        visitor.ask_for_nothing()
        return len(found)

    return count


def hide(visitor: Visitor, is_hidden: bool) -> None:
    """Bring another tab to the front, or this one again."""
    visitor.page.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


def test_the_page_follows_the_run_to_its_end(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    page, count = visitor.open(f"{path_of(approval.run)}?rows=full"), asked(visitor)
    payload = page.locator(".ar-card details").first
    payload.locator("summary").click()
    page.locator("h1").click()  # somewhere else
    did = page.locator("[data-part=effects]")
    assert did.inner_text() == ""
    page.evaluate("window.stays = true")
    decide(approval)
    page.locator("#ar-now", has_text="Completed. It waits for nobody.").wait_for()
    did.locator("li", has_text="Refund 349.00 EUR for order 1004").wait_for()
    assert page.locator("[data-notice=held]").is_hidden()
    assert page.locator("[data-said]").inner_text() == "completed Completed. It waits for nobody."
    assert "Refund" in page.locator(".ar-journal").inner_text()
    ids = page.locator(".ar-journal > li").evaluate_all("all => all.map(element => element.id)")
    rows = [int(name.removeprefix("row-")) for name in ids]
    assert rows == list(range(1, approval.run.messages.latest("seq").seq + 1))
    assert payload.get_attribute("open") is not None
    assert page.locator(".ar-say--agent").last.inner_text().endswith("David has his answer.")
    assert page.locator(".ar-took").count() == 3  # the requests and the tool, whose rows came later
    assert page.evaluate("window.stays")
    before = count()
    assert count() == before
    assert_sound(page)


def test_what_somebody_types_is_left_alone_until_they_are_done(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one()
    page = visitor.open(approval.run)
    form = visitor.form("Cancel the run")
    page.locator("summary", has_text="Cancel the run").click()
    form.locator("[name=reason]").fill("She called it o")
    decide(approval)
    page.locator(".ar-say", has_text="David has his answer.").wait_for()  # the rest of the page went on
    page.locator("[data-notice=held]", has_text="completed Completed. It waits for nobody.").wait_for()
    assert form.locator("[name=reason]").input_value() == "She called it o"
    assert "It waits for a person to decide:" in page.locator("#ar-now").inner_text()
    assert_sound(page)
    form.locator("[name=reason]").fill("")
    page.locator("summary", has_text="Cancel the run").click()
    page.locator("h1").click()
    page.locator("#ar-now", has_text="Completed. It waits for nobody.").wait_for()
    assert page.locator("[data-notice=held]").is_hidden()


def test_a_page_that_nobody_sees_asks_nothing(desk: Desk, visitor: Visitor) -> None:
    run = World().queued()
    page, count = visitor.open(run), asked(visitor)
    with page.expect_request("**/live/**"):
        pass
    hide(visitor, True)
    count()  # what was under way comes in
    before = count()
    sweep()
    assert count() == before
    assert "queued" in page.locator("#ar-now").inner_text()
    hide(visitor, False)
    page.locator("#ar-now", has_text="Completed. It waits for nobody.").wait_for()


def test_a_page_that_gets_no_answer_says_so(desk: Desk, visitor: Visitor) -> None:
    page, count = visitor.open(World().queued()), asked(visitor)
    visitor.expected.add(503)
    page.route("**/live/**", lambda route: route.fulfill(status=503))
    visitor.wait_for("the server does not answer")
    page.unroute("**/live/**")
    page.locator("[data-notice=lost]").wait_for(state="hidden")
    visitor.expected.add(403)  # of what is under way
    visitor.context.clear_cookies()
    visitor.wait_for("you are logged out")
    before = count()
    assert count() == before
