"""The page of the API's documentation, in Chromium: everything on it comes from this server."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from tests.browser.visitor import Visitor


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
