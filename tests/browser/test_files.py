"""The content of a row that is in a file: found on its card, downloaded, and asked for where guarded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentruns import Document, Image, Text, run_agent
from agentruns.models import Run
from tests.browser.desk import Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitors, path_of
from tests.files import MEGABYTE, fetched, report_of, stored_in
from tests.pictures import HOSTILE, PDF, photograph
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parents[2]


def test_a_file_is_downloaded_from_its_card(visit: Visitors, desk: Desk, folder: Path, settings: Any) -> None:
    run, visitor = fetched(), visit()
    page = visitor.open(run)
    visitor.unfold()
    with page.expect_download() as free:
        visitor.click(visitor.link("Download all of it"))
    assert Path(free.value.path()).read_text() == report_of(MEGABYTE)
    assert free.value.suggested_filename.endswith(".txt")
    settings.AGENTRUNS_REDACT = "tests.files.without_cards"
    visitor.click(visitor.link("Download all of it"))
    visitor.wait_for("This is logged.")
    assert_sound(page)
    with page.expect_download() as guarded:
        visitor.click(visitor.button("Download the true content"))
    assert Path(guarded.value.path()).read_text() == report_of(MEGABYTE)
    stored_in(folder)[0].unlink()
    with visitor.refused(409):
        visitor.click(visitor.button("Download the true content"))
    visitor.wait_for("is missing")
    assert_sound(page)
    visitor.click(page.locator(".ar-state a"))
    visitor.wait_until_at(path_of(run))


def test_pictures_are_seen_on_the_page_of_the_run(visit: Visitors, desk: Desk, folder: Path) -> None:
    agent = shop_agent("looks", {"tools": [call("photograph", big=True)]}, tools=[photograph])
    photo = (ROOT / "fixtures/photos/ticket-2.png").read_bytes()
    blocks = [Text("It came broken."), Image(data=photo, name=HOSTILE), Document(data=PDF, name="bill.pdf")]
    run, visitor = Run.objects.get(pk=run_agent(agent, blocks, "s1").run_id), visit()
    page = visitor.open(run)
    visitor.unfold()
    shown = page.locator(".ar-files img")
    assert shown.count() == 2
    for number in range(2):
        shown.nth(number).scroll_into_view_if_needed()
        page.wait_for_function("image => image.naturalWidth > 0", arg=shown.nth(number).element_handle())
    assert_sound(page)
    with page.expect_download() as paper:
        visitor.click(page.get_by_role("link", name="bill.pdf"))
    assert Path(paper.value.path()).read_bytes() == PDF
