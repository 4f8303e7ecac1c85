"""Staff of two tenants at two browsers: each follows and decides their own only.

Without a browser, `tests/tenants` and `tests/doors` ask what lists, counts, searches, pages and exports show.
"""

from __future__ import annotations

import pytest

from agentruns.admin import RunAdmin
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.browser.visitor import INDEX, QUEUE, Visitors, decided
from tests.tenants.project import TENANTS, cents, user


def test_two_tenants_at_two_browsers(
    two: dict[str, Run], visit: Visitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunAdmin, "live_interval", 100)
    cards = {tenant: Approval.objects.get(run=run) for tenant, run in two.items()}
    north, south = (visit(user(tenant, "staff").get_username()) for tenant in TENANTS)
    for closed in (two["south"], cards["south"]):
        with north.refused(404):
            north.open(closed)
    south.open(two["south"])
    north.open(QUEUE)
    north.click(north.page.locator("#result_list tbody th a"))
    north.choose("Approve")
    north.wait_for("Approved. A worker runs the call.")
    assert decided(cards["north"]) == ("approved", "staff@north")
    north.open(two["north"])
    sweep()
    north.page.locator("#ar-now", has_text="Completed. It waits for nobody.").wait_for()
    html = north.page.content()  # also what nobody sees
    assert ("north" in html, "south" in html, str(cents("south")) in north.text) == (True, False, False)
    assert "It waits for a person to decide:" in south.page.locator("#ar-now").inner_text()
    south.open(INDEX)
    assert "1 waiting for you" in " ".join(south.text.split())
    assert decided(cards["south"]) == ("pending", "")
