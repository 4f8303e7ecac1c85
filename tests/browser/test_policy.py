"""The harness itself: what it must notice, it does. And the page of the API's docs under the policy."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser import policy
from tests.browser.sound import assert_sound
from tests.browser.visitor import INDEX, Visitor, Visitors

BROKEN = {
    "error in the console": "<p style='color: red'>inline</p>",
    "dialog: boo": "<script src='/said.js'></script>",
}


@pytest.fixture
def visitors(visit: Visitors) -> Any:
    """Visitors whose complaints this test reads itself."""
    yield visit
    for visitor in visit.inside:
        visitor.complaints.clear()


def serve(visitor: Any, body: str) -> None:
    """Answer the index with `body`, under the policy."""
    headers = {"Content-Security-Policy": policy.POLICY, "Content-Type": "text/html"}
    page = f"<!doctype html><html lang=en><title>x</title><main><h1>x</h1>{body}</main>"
    visitor.page.route("**/said.js", lambda route: route.fulfill(body="alert('boo')"))
    visitor.page.route("**/admin/", lambda route: route.fulfill(body=page, headers=headers))
    visitor.open(INDEX)


@pytest.mark.parametrize("complaint", BROKEN)
def test_what_a_browser_complains_about_is_noticed(visitors: Any, complaint: str) -> None:
    visitor = visitors()
    serve(visitor, BROKEN[complaint])
    assert [said for said in visitor.complaints if complaint in said]


def test_an_error_of_a_script_and_a_missing_file_are_noticed(visitors: Any) -> None:
    visitor = visitors()
    serve(visitor, "<img alt='' src='/not/there.png'>")
    with visitor.page.expect_event("pageerror"):
        visitor.page.evaluate("setTimeout(() => { throw new Error('oh no') })")
    assert any("answered 404" in said for said in visitor.complaints)
    assert any("oh no" in said for said in visitor.complaints)


def test_what_people_cannot_use_is_noticed(visitors: Any) -> None:
    visitor = visitors()
    serve(visitor, "<input name=reason>")
    with pytest.raises(pytest.fail.Exception, match=r'critical label.*<input name="reason">'):
        assert_sound(visitor.page)


def test_a_page_wider_than_a_telephone_is_noticed(visitors: Any) -> None:
    visitor = visitors()
    serve(visitor, f"<p>{'x' * 200}</p>")
    with pytest.raises(pytest.fail.Exception, match="375 pixels wide"):
        assert_sound(visitor.page)


def test_every_answer_carries_the_policy(visitors: Any) -> None:
    visitor = visitors()
    visitor.page.route("**/nowhere/", lambda route: route.continue_())
    for path in ("/admin/", "/admin/agentruns/approval/", "/nowhere/"):
        visitor.expected.add(404)
        answer = visitor.page.goto(visitor.base + path)
        assert answer.headers["content-security-policy"] == policy.POLICY


def test_the_docs_page_works_under_the_policy(visitor: Visitor, settings: Any) -> None:
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "ninja"]
    asked: set[str] = set()
    visitor.page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
    visitor.open("/api/docs")
    visitor.click(visitor.page.locator("#operations-agent_runs-list_runs .opblock-summary-control"))
    visitor.click(visitor.page.get_by_role("button", name="Try it out"))
    visitor.click(visitor.page.get_by_role("button", name="Execute"))
    visitor.page.locator(".live-responses-table .response-col_status", has_text="200").first.wait_for()
    assert asked <= {urlsplit(visitor.base).netloc, ""}
