"""The content of a row that is in a file: found on its card, downloaded, and asked for where guarded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentruns import Document, Image, Text, run_agent
from agentruns.models import Run
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitors
from tests.files import MEGABYTE, fetched, report_of
from tests.pictures import HOSTILE, PDF, photograph
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).parents[2]


def test_pictures_are_seen_and_files_are_downloaded(visit: Visitors, folder: Path, settings: Any) -> None:
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
    settings.AGENTRUNS_REDACT = "tests.files.without_cards"
    visitor.open(fetched(session="s2"))
    visitor.unfold()
    visitor.click(visitor.link("Download all of it"))
    visitor.wait_for("This is logged.")
    assert_sound(page)
    with page.expect_download() as guarded:
        visitor.click(visitor.button("Download the true content"))
    assert Path(guarded.value.path()).read_text() == report_of(MEGABYTE)
    assert guarded.value.suggested_filename.endswith(".txt")
