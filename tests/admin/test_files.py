"""Files in the console: shown beside their row, sent as what they are, to who may see them.

The content of a row that is in a file has its beginning on the card, and all of it to download.
"""

from __future__ import annotations

import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from agentruns import Document, Image, Text, resolve_orphan, run_agent
from agentruns.content import packed
from agentruns.journal import events
from agentruns.journal.payloads import put_blocks
from agentruns.journal.store import Batch, DatabaseStore
from agentruns.models import Run
from tests.admin.pages import Page, look, read, unchanged, url
from tests.admin.people import browser
from tests.admin.world import World
from tests.db.helpers import the_run
from tests.files import MEGABYTE, fetch_secretly, fetched, report_of, row_of, sha256, stored_in
from tests.pictures import BIG, HOSTILE, NOTE, PDF, PNG, files_of, photograph, scan_passport
from tests.settings import MIDDLEWARE
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _own_middleware(settings: Any) -> None:
    """Do without that of the browser's tests, whose policy hides ours."""
    settings.MIDDLEWARE = MIDDLEWARE


def content(run: Run) -> str:
    """Build the address of the content of the run's result."""
    return url(run, "content", row_of(run).seq)


def address(run: Run, data: bytes) -> str:
    """Build the address of a picture or a document."""
    return url(run, "file", hashlib.sha256(data).hexdigest())


def sent(response: Any) -> bytes:
    """Return what was sent, and require that no browser opens it as a page."""
    assert (response.status_code, response.streaming) == (200, True)
    assert response["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in response["Content-Security-Policy"]
    return b"".join(response.streaming_content)


def downloaded(response: Any) -> str:
    """Return the text of a row that was sent as a file."""
    text = sent(response)
    assert response["Content-Disposition"].startswith('attachment; filename="')
    assert response["Content-Security-Policy"] == "default-src 'none'; sandbox"
    assert response["Content-Length"] == str(len(text))
    return text.decode()


def test_forty_megabytes_are_streamed_to_who_may_see_them(folder: Path) -> None:
    run, client = fetched(40 * MEGABYTE), browser("viewer")
    page = look(run, role="viewer")
    assert content(run) in page.links
    assert f"{report_of(500)}\n[only the beginning of 41943040 bytes" in page.text
    assert "40.0\xa0MB in a file, SHA-256" in page.text
    assert len(page.html) < 100_000
    tracemalloc.start()
    response = client.get(content(run))
    size = sum(map(len, response.streaming_content))
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (size, response["Content-Length"]) == (40 * MEGABYTE, str(40 * MEGABYTE))
    assert peak < 5 * MEGABYTE
    with unchanged():
        assert downloaded(client.get(content(run))) == report_of(40 * MEGABYTE)
        for seq in (1, 10**19):
            assert client.get(url(run, "content", seq)).status_code == 404
        for role, status in {"anonymous": 302, "staff": 403}.items():
            assert browser(role).get(content(run)).status_code == status
    assert LogEntry.objects.count() == 0


def test_a_file_that_is_not_what_it_was(folder: Path) -> None:
    run = fetched()
    (path,) = stored_in(folder)
    for fault in ("was altered", "is missing"):
        path.write_bytes(b"X" + path.read_bytes()[1:]) if fault == "was altered" else path.unlink()
        response = browser("viewer").get(content(run))
        page = read(response)
        assert (response.status_code, response.streaming) == (409, False)
        for said in (f"seq {row_of(run).seq}: file", fault, path.name, sha256(report_of(MEGABYTE))):
            assert said in page.text
        assert url(run) in page.links
        assert content(run) in look(run, role="viewer").links, "the page of the run reads no file"


@pytest.mark.parametrize("why", ["sensitive", "AGENTRUNS_REDACT"])
def test_what_is_guarded_is_asked_for_and_logged(
    why: str, folder: Path, settings: Any, requests_commit: str
) -> None:
    run = fetched(tools=[fetch_secretly]) if why == "sensitive" else fetched()
    if why == "AGENTRUNS_REDACT":
        settings.AGENTRUNS_REDACT = "tests.files.without_cards"

    def shown(role: str) -> Page:
        response = browser(role).get(content(run))
        assert (response.status_code, response.streaming) == (200, False)
        page = read(response)
        assert report_of(100) not in page.text
        return page

    page = shown("superuser")
    assert "This is logged." in page.text
    assert content(run) in page.forms
    page = shown("viewer")
    assert (content(run) in page.forms, "agentruns.reveal_arguments" in page.text) == (False, True)
    assert browser("viewer").post(content(run)).status_code == 403
    assert LogEntry.objects.count() == 0
    client = browser("superuser")
    assert downloaded(client.post(content(run))) == report_of(MEGABYTE)
    (entry,) = LogEntry.objects.all()
    assert (entry.user.username, entry.object_id) == ("superuser", str(run.pk))
    assert f"row {row_of(run).seq}" in entry.change_message
    stored_in(folder)[0].unlink()
    assert "is missing" in read(client.post(content(run))).text
    assert LogEntry.objects.count() == 1


def broken_mug() -> Run:
    agent = shop_agent("looks", {"tools": [call("photograph", big=True)]}, tools=[photograph])
    blocks = [
        *(Text("It came broken."), Image(data=PNG, name=HOSTILE)),
        *(Document(data=PDF, name="bill.pdf"), Document(data=NOTE)),
    ]
    return the_run(run_agent(agent, blocks, "s1"))


def test_pictures_and_documents_are_shown_and_served_as_what_they_are(folder: Path) -> None:
    run, client = broken_mug(), browser("viewer")
    page = look(run, role="viewer")
    for data in (PNG, BIG):
        assert f'<a href="{address(run, data)}"><img src="{address(run, data)}" alt="' in page.html
    assert 'alt="taken.png"' in page.html
    assert f'<a href="{address(run, PDF)}"><bdi>bill.pdf</bdi></a>' in page.html
    assert "<img src=x" not in page.html, "a name is a text"
    assert "application/pdf" in page.text
    assert "It came broken." in page.text
    assert "iVBOR" not in page.html, "no page carries the bytes"
    for data, kind, shown in (
        (PNG, "image/png", "inline"), (BIG, "image/png", "inline"), (PDF, "application/pdf", "attachment"),
        (NOTE, "text/plain; charset=utf-8", "attachment"),
    ):  # fmt: skip
        answer = client.get(address(run, data))
        assert (sent(answer), answer["Content-Type"]) == (data, kind)
        assert answer["Content-Disposition"].startswith(shown)
    assert not LogEntry.objects.exists()
    assert client.get(address(run, b"other")).status_code == 404
    other = the_run(run_agent(shop_agent("other"), "hi", "s2"))
    assert client.get(address(other, PNG)).status_code == 404
    assert [browser(role).get(address(run, PNG)).status_code for role in ("anonymous", "staff")] == [302, 403]
    (path,) = stored_in(folder)
    path.unlink()
    answer = client.get(address(run, BIG))
    assert (answer.status_code, "is missing" in read(answer).text) == (409, True)
    look(run, role="viewer")  # reads no file


def test_a_sensitive_picture_is_asked_for_and_logged(folder: Path) -> None:
    agent = shop_agent("scans", {"tools": [call("scan_passport")]}, tools=[scan_passport])
    run = the_run(run_agent(agent, [Image(data=PNG)], "s1"))
    (about, _note) = files_of(row_of(run))
    where = url(run, "file", about["sha256"])
    for role in ("viewer", "superuser"):
        page = look(run, role=role).html
        assert where not in page
        assert "passport.png" not in page
        assert address(run, PNG) in page, "the task's own is nobody's secret"
        assert not browser(role).get(where).streaming
    assert browser("viewer").post(where).status_code == 403
    assert hashlib.sha256(sent(browser("superuser").post(where))).hexdigest() == about["sha256"]
    assert LogEntry.objects.count() == 1


def test_a_late_picture_becomes_the_result(world: World, folder: Path) -> None:
    run, store = world.orphaned(), DatabaseStore()
    (call_id,) = run.pending_calls
    made = put_blocks(f"{run.session_id}/late", packed([Text("here"), Image(data=BIG)]))
    batch = Batch(store.load(run.session_id, run.pk))
    late = {**made, "is_error": False, "worker_epoch": 1}
    batch.add(events.LATE_RESULT, late, call_id=call_id, tool_name="dies", attempt=1)
    batch.closed = True
    store.append(batch)
    resolve_orphan(run.pk, call_id, "occurred", None, result=made["content"])
    assert run.messages.get(kind="tool_result").payload["stored"] == made["stored"]
    assert address(run, BIG) in look(run, role="viewer").html
