"""The harness itself: what it must notice, it does. And the page of the API's docs under the policy."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import pytest
from django.test import Client

from tests.browser import policy
from tests.browser.sound import assert_sound
from tests.browser.visitor import INDEX, Visitor, Visitors


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


def test_what_a_browser_complains_about_is_noticed(visitors: Any) -> None:
    visitor = visitors()
    inline, dialog = "<p style='color: red'>inline</p>", "<script src='/said.js'></script>"
    serve(visitor, f"{inline}{dialog}<img alt='' src='/not/there.png'>")
    with visitor.page.expect_event("pageerror"):
        visitor.page.evaluate("setTimeout(() => { throw new Error('oh no') })")
    for complaint in ("error in the console", "dialog: boo", "answered 404", "oh no"):
        assert any(complaint in said for said in visitor.complaints), complaint


def test_what_people_cannot_use_is_noticed(visitors: Any) -> None:
    visitor = visitors()
    for body, noticed in (
        ("<input name=reason>", r'critical label.*<input name="reason">'),
        (f"<p>{'x' * 200}</p>", "375 pixels wide"),
    ):
        serve(visitor, body)
        with pytest.raises(pytest.fail.Exception, match=noticed):
            assert_sound(visitor.page)


def test_every_answer_carries_the_policy(db: None) -> None:
    for path in ("/admin/", "/admin/agentruns/approval/", "/nowhere/"):
        assert Client().get(path).headers["Content-Security-Policy"] == policy.POLICY


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
