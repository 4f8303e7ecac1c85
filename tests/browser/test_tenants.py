"""Staff of two tenants at two browsers: each sees, counts, follows, exports and decides their own only."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest

from agentruns.admin import RunAdmin
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.browser.visitor import INDEX, QUEUE, RUNS, Visitor, Visitors, decided
from tests.tenants.project import KEY, TENANTS, cents, user


def test_two_tenants_at_two_browsers(
    two: dict[str, Run], visit: Visitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunAdmin, "live_interval", 100)
    cards = {tenant: Approval.objects.get(run=run) for tenant, run in two.items()}
    people = {tenant: visit(user(tenant, "staff").get_username()) for tenant in TENANTS}
    for tenant, other in (TENANTS, reversed(TENANTS)):
        looks_around(people[tenant], tenant, other, two)
        for closed in (two[other], cards[other]):
            with people[tenant].refused(404):
                people[tenant].open(closed)
    south = people["south"]
    south.open(two["south"])
    people["north"].open(QUEUE)
    people["north"].click(people["north"].page.locator("#result_list tbody th a"))
    people["north"].choose("Approve")
    people["north"].wait_for("Approved. A worker runs the call.")
    assert decided(cards["north"]) == ("approved", "staff@north")
    people["north"].open(two["north"])
    sweep()
    people["north"].page.locator("#ar-now", has_text="Completed. It waits for nobody.").wait_for()
    assert_only(people["north"], "north", "south")
    assert "It waits for a person to decide:" in south.page.locator("#ar-now").inner_text()
    south.open(INDEX)
    assert "1 waiting for you" in " ".join(south.text.split())
    assert decided(cards["south"]) == ("pending", "")


def looks_around(visitor: Visitor, tenant: str, other: str, runs: dict[str, Run]) -> None:
    """Look at every figure, list, facet, search, page and export."""
    page = visitor.open(INDEX)
    figures = " ".join(visitor.text.split())
    assert "1 waiting for you" in figures
    assert_only(visitor, tenant, other)
    for where in (QUEUE, RUNS):
        for query, count in (
            (f"q={quote(f'plain@{other}')}", 0),
            (f"agent=shop-{other}", 0),
            (f"q={KEY}", 1),
        ):
            page = visitor.open(f"{where}?{query}")
            assert page.locator("#result_list tbody tr").count() == count, (where, query)
            if other not in query:
                assert_only(visitor, tenant, other)
        assert f"shop-{tenant}" in page.locator("#changelist-filter").inner_text()
        assert "1 " in page.locator(".paginator").inner_text()
        visitor.click(page.locator("#result_list tbody th a"))
        visitor.page.wait_for_url("**/change/**")
        assert str(cents(tenant)) in page.content()
        assert_only(visitor, tenant, other)
    visitor.click(page.locator("summary", has_text="More…"))
    with page.expect_download() as exported:
        visitor.click(visitor.button("Export for an auditor"))
    text = Path(exported.value.path()).read_text()
    assert other not in text
    assert str(runs[tenant].pk) in text


def assert_only(visitor: Visitor, tenant: str, other: str) -> None:
    """Raise if the page tells of the other tenant, be it where nobody sees it."""
    html = visitor.page.content()
    assert tenant in html
    assert other not in html, visitor.page.url
    assert str(cents(other)) not in visitor.text, visitor.page.url
