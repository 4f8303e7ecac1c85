"""The content of a row that is in a file: on the card its beginning, and all of it to download."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from agentruns.models import Run
from tests.admin.pages import Page, read, snapshot, url
from tests.admin.people import browser
from tests.files import MEGABYTE, fetch_secretly, fetched, report_of, row_of, sha256, stored_in
from tests.settings import MIDDLEWARE

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _own_middleware(settings: Any) -> None:
    """Without that of the browser's tests, whose policy hides ours."""
    settings.MIDDLEWARE = MIDDLEWARE


def address(run: Run) -> str:
    """Return where the content of the run's result is."""
    return url(run, "content", row_of(run).seq)


def streamed(response: Any) -> bytes:
    """Return what was sent, of an answer that no browser may open."""
    assert (response.status_code, response.streaming) == (200, True)
    assert response["Content-Disposition"].startswith('attachment; filename="')
    assert response["X-Content-Type-Options"] == "nosniff"
    assert response["Content-Security-Policy"] == "default-src 'none'; sandbox"
    sent = b"".join(response.streaming_content)
    assert response["Content-Length"] == str(len(sent))
    return sent


def test_forty_megabytes_are_streamed(folder: Path) -> None:
    run, client = fetched(40 * MEGABYTE), browser("viewer")
    page = read(client.get(url(run)))
    assert address(run) in page.links
    assert f"{report_of(500)}\n[only the beginning of 41943040 bytes" in page.text
    assert "40.0\xa0MB in a file, SHA-256" in page.text
    assert len(client.get(url(run)).content) < 100_000
    tracemalloc.start()
    response = client.get(address(run))
    size = sum(map(len, response.streaming_content))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (size, response["Content-Length"]) == (40 * MEGABYTE, str(40 * MEGABYTE))
    assert peak < 5 * MEGABYTE


def test_what_is_downloaded_is_what_was_returned(folder: Path) -> None:
    run = fetched()
    before = snapshot()
    assert streamed(browser("viewer").get(address(run))).decode() == report_of(MEGABYTE)
    assert browser("viewer").get(url(run, "content", 1)).status_code == 404
    assert browser("viewer").get(url(run, "content", 10**19)).status_code == 404
    assert [browser(role).get(address(run)).status_code for role in ("anonymous", "staff")] == [302, 403]
    assert (snapshot(), LogEntry.objects.count()) == (before, 0)


@pytest.mark.parametrize("fault", ["missing", "altered"])
def test_a_file_that_is_not_what_it_was(fault: str, folder: Path) -> None:
    run = fetched()
    (path,) = stored_in(folder)
    path.unlink() if fault == "missing" else path.write_bytes(b"X" + path.read_bytes()[1:])
    client = browser("viewer")
    response = client.get(address(run))
    page = read(response)
    assert (response.status_code, response.streaming) == (409, False)
    assert f"seq {row_of(run).seq}: file" in page.text
    assert ("is missing" if fault == "missing" else "was altered") in page.text
    assert path.name in page.text
    assert sha256(report_of(MEGABYTE)) in page.text, "what it should be"
    assert url(run) in page.links
    assert address(run) in read(client.get(url(run))).links, "the page of the run reads no file"


@pytest.mark.parametrize("why", ["sensitive", "AGENTRUNS_REDACT"])
def test_what_is_guarded_is_asked_for_and_logged(
    why: str, folder: Path, settings: Any, requests_commit: str
) -> None:
    run = fetched(tools=[fetch_secretly]) if why == "sensitive" else fetched()
    if why == "AGENTRUNS_REDACT":
        settings.AGENTRUNS_REDACT = "tests.files.without_cards"
    page = shown(run, "superuser")
    assert "This is logged." in page.text
    assert address(run) in page.forms
    refused = shown(run, "viewer")
    assert (address(run) in refused.forms, "agentruns.reveal_arguments" in refused.text) == (False, True)
    assert browser("viewer").post(address(run)).status_code == 403
    assert LogEntry.objects.count() == 0
    assert streamed(browser("superuser").post(address(run))).decode() == report_of(MEGABYTE)
    (entry,) = LogEntry.objects.all()
    assert (entry.user.username, entry.object_id) == ("superuser", str(run.pk))
    assert f"row {row_of(run).seq}" in entry.change_message
    stored_in(folder)[0].unlink()
    assert "is missing" in read(browser("superuser").post(address(run))).text
    assert LogEntry.objects.count() == 1


def shown(run: Run, role: str) -> Page:
    response = browser(role).get(address(run))
    assert (response.status_code, response.streaming) == (200, False)
    page = read(response)
    assert report_of(100) not in page.text
    return page
