"""The lists, with runs in every state: nothing on them is cut, wraps or scrolls sideways."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from agentruns import approve, deny
from agentruns.engine.leases import claim
from agentruns.models import Run
from tests.admin.people import user
from tests.admin.world import World
from tests.browser.desk import CARD, CREDIT, MAIL, REFUND, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import LINES, QUEUE, RUNS, Visitor, Visitors
from tests.db.helpers import kill

FITS = "box => box.scrollWidth <= box.clientWidth"


def night(desk: Desk) -> None:
    """Let runs come into every state."""
    world, boss = World(), user("superuser")
    for what in (REFUND, MAIL):
        desk.one(what, session=f"ticket-{what['name']}", actor=user("decider"))
    for number, what in enumerate((CARD, MAIL, REFUND)):
        approval = desk.one(what, session=f"earlier-{number}")
        deny(approval.pk, boss, "No.") if number else approve(approval.pk, boss)
    desk.one(CREDIT, session="ticket-6")
    desk.in_doubt(session="ticket-9")
    world.paused("ticket-12")
    silent, live = world.queued("ticket-10"), world.queued("ticket-11")
    for run in (silent, live):
        assert claim("default", run.pk)
    kill(silent)
    # The other one is at work, however long the test takes.
    Run.objects.filter(pk=live.pk).update(lease_expires_at=Now() + timedelta(days=1))
    ended = world.completed("ticket-3")
    usage = {"input_tokens": 118_400, "output_tokens": 5_210, "cost": "0.433350"}
    Run.objects.filter(pk=ended.pk).update(usage=usage, step=12)
    failed = world.completed("ticket-2")
    Run.objects.filter(pk=failed.pk).update(status="failed", error="model: 400")


@pytest.mark.usefixtures("_letters")
def test_no_column_is_cut_and_no_key_wraps(visit: Visitors, settings: Any) -> None:
    settings.AGENTRUNS_CURRENCY = "EUR"
    run = World().completed("0198f3a2-7c11-7d6e-9a53-6f1f7e2b4c90")
    usage = {"input_tokens": 118_400, "output_tokens": 5_210, "cost": "12345.67"}
    Run.objects.filter(pk=run.pk).update(usage=usage, cost="12345.67", tokens=123_610, step=120)
    visitor = visit()
    page = visitor.open(RUNS)
    assert page.locator(".field-used_cost").inner_text() == "12345.67\xa0EUR"
    for width in (1280, 1440, 1920):
        visitor.resize({"width": width, "height": 900})
        assert page.locator("#changelist .results").evaluate(FITS), width
        cut = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.className)"
        assert page.locator("#result_list tbody tr td").evaluate_all(cut) == [], width
        assert page.locator(".field-who .ar-second").evaluate(LINES) == 1


def test_no_list_scrolls_sideways_beside_open_navigation(desk: Desk, visitor: Visitor) -> None:
    night(desk)
    visitor.open(RUNS)
    assert_sound(visitor.page)
    for path, rows in ((RUNS, 12), (QUEUE, 3)):
        page = visitor.open(path)
        assert page.locator("#result_list tbody tr").count() == rows
        for width in (768, 800, 1000, 1024, 1100):
            visitor.resize({"width": width, "height": 900})
            assert page.locator("#nav-sidebar").is_visible(), "open, as it is until somebody shuts it"
            assert page.locator("#changelist .results").evaluate(FITS), (path, width)
