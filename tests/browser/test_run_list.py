"""The list of runs at night: see on the index that something is wrong, find it, and stop several at once."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.test import override_settings

from agentruns import approve, deny
from agentruns.engine.leases import claim
from agentruns.models import Control, Run
from tests.admin.people import user
from tests.admin.world import World
from tests.browser.desk import CARD, CREDIT, MAIL, REFUND, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import INDEX, LINES, QUEUE, RUNS, Visitor, Visitors
from tests.db.helpers import kill


def night(desk: Desk) -> list[Run]:
    """Runs in every state; the two that are to be stopped."""
    world, boss = World(), user("superuser")
    for what in (REFUND, MAIL):
        desk.one(what, session=f"ticket-{what['name']}", actor=user("decider"))
    for number, what in enumerate((CARD, MAIL, REFUND)):
        approval = desk.one(what, session=f"earlier-{number}")
        deny(approval.pk, boss, "No.") if number else approve(approval.pk, boss)
    desk.one(CREDIT, session="ticket-6")
    desk.in_doubt(session="ticket-9")
    world.paused("ticket-12")
    runs = [world.queued("ticket-10"), world.queued("ticket-11")]
    for run in runs:
        assert claim("default", run.pk)
    kill(runs[0])
    # The other one is at work, however long the test takes.
    Run.objects.filter(pk=runs[1].pk).update(lease_expires_at=Now() + timedelta(days=1))
    ended = world.completed("ticket-3")
    usage = {"input_tokens": 118_400, "output_tokens": 5_210, "cost": "0.433350"}
    Run.objects.filter(pk=ended.pk).update(usage=usage, step=12)
    failed = world.completed("ticket-2")
    Run.objects.filter(pk=failed.pk).update(status="failed", error="model: 400")
    return runs


def test_from_the_index_to_the_list_to_several_at_once(desk: Desk, visitor: Visitor) -> None:
    runs = night(desk)
    visitor.open(INDEX)
    visitor.wait_for("No worker was ever seen.")
    visitor.click(visitor.page.locator(".ar-figure a", has_text="stalled"))
    visitor.page.wait_for_url("**status=stalled*")
    assert visitor.page.locator("#result_list tbody tr").count() == 1
    visitor.click(visitor.page.get_by_role("link", name="running", exact=True))
    visitor.page.wait_for_url("**status=running*")
    assert visitor.page.locator("#result_list tbody tr").count() == 2
    visitor.page.locator("input[name=started_from]").fill("2020-01-01")
    visitor.click(visitor.page.get_by_role("button", name="Show"))
    visitor.page.wait_for_url("**started_from=2020-01-01*")
    assert "status=running" in visitor.page.url
    assert visitor.page.locator("#result_list tbody tr").count() == 2
    visitor.select_all()
    visitor.act("Cancel selected")
    visitor.wait_for("Cancel these 2 runs")
    assert_sound(visitor.page)
    visitor.page.get_by_label("Reason, kept in the journal").fill("It mails everybody.")
    visitor.click(visitor.button("Cancel these 2 runs"))
    visitor.wait_for("2 were done.")
    assert_sound(visitor.page)
    assert Run.objects.get(pk=runs[0].pk).status == "cancelled"
    assert runs[1].messages.filter(kind="run_cancel_requested").exists()
    visitor.click(visitor.page.get_by_role("link", name="Back to the list"))
    visitor.page.wait_for_url("**started_from=2020-01-01*")
    visitor.open("/admin/agentruns/run/")
    assert_sound(visitor.page)
    visitor.select_all()
    visitor.act("Resume selected")
    visitor.wait_for("Resume these")
    Control.objects.create(name="resume_runs", seen_at="2026-01-01T00:00Z")
    visitor.open("/admin/agentruns/")
    assert_sound(visitor.page)


@pytest.mark.usefixtures("_letters")
def test_no_column_is_cut_and_no_key_wraps(desk: Desk, visit: Visitors) -> None:
    run = World().completed("0198f3a2-7c11-7d6e-9a53-6f1f7e2b4c90")
    usage = {"input_tokens": 118_400, "output_tokens": 5_210, "cost": "12345.67"}
    Run.objects.filter(pk=run.pk).update(usage=usage, cost="12345.67", tokens=123_610, step=120)
    with override_settings(AGENTRUNS_CURRENCY="EUR"):
        for width in (1280, 1440, 1920):
            page = visit(size={"width": width, "height": 900}).open("/admin/agentruns/run/")
            box = page.locator("#changelist .results")
            assert box.evaluate("box => box.scrollWidth <= box.clientWidth"), width
            cells = page.locator("#result_list tbody tr td")
            cut = "all => all.filter(each => each.scrollWidth > each.clientWidth).map(each => each.className)"
            assert cells.evaluate_all(cut) == [], width
            assert page.locator(".field-used_cost").inner_text() == "12345.67\xa0EUR"
            assert page.locator(".field-who .ar-second").evaluate(LINES) == 1


def test_no_list_scrolls_sideways_beside_open_navigation(desk: Desk, visit: Visitors) -> None:
    night(desk)
    for width in (768, 800, 1000, 1024, 1100):
        visitor = visit(size={"width": width, "height": 900})
        for path, rows in ((RUNS, 12), (QUEUE, 3)):
            page = visitor.open(path)
            assert page.locator("#nav-sidebar").is_visible(), "open, as it is until somebody shuts it"
            assert page.locator("#result_list tbody tr").count() == rows
            box = page.locator("#changelist .results")
            assert box.evaluate("box => box.scrollWidth <= box.clientWidth"), (path, width)
