"""Pictures and documents in the console: shown beside their row, served as what they are, to who may see."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from agentruns import Document, Image, Text, resolve_orphan, run_agent
from agentruns.journal import events
from agentruns.models import Message, Run
from tests.admin.pages import read, url
from tests.admin.people import browser
from tests.admin.world import dying
from tests.db.helpers import the_run
from tests.files import row_of, stored_in
from tests.pictures import BIG, HOSTILE, NOTE, PDF, PNG, files_of, photograph, scan_passport
from tests.settings import MIDDLEWARE
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _own_middleware(settings: Any) -> None:
    """Without that of the browser's tests, whose policy hides ours."""
    settings.MIDDLEWARE = MIDDLEWARE


def address(run: Run, data: bytes) -> str:
    return reverse("admin:agentruns_run_file", args=[run.pk, hashlib.sha256(data).hexdigest()])


def broken_mug(*more: Any) -> Run:
    agent = shop_agent("looks", {"tools": [call("photograph", big=True)]}, tools=[photograph])
    blocks = [
        Text("It came broken."),
        Image(data=PNG, name=HOSTILE),
        Document(data=PDF, name="bill.pdf"),
        *more,
    ]
    return the_run(run_agent(agent, blocks, "s1"))


def test_the_page_shows_them(folder: Path) -> None:
    run, client = broken_mug(), browser("viewer")
    text = client.get(url(run)).content.decode()
    for data in (PNG, BIG):
        assert f'<a href="{address(run, data)}"><img src="{address(run, data)}" alt="' in text
    assert 'alt="taken.png"' in text
    assert f'<a href="{address(run, PDF)}"><bdi>bill.pdf</bdi></a>' in text
    assert "<img src=x" not in text, "a name is a text"
    assert "\u202e" not in text
    assert "application/pdf" in read(client.get(url(run))).text
    assert "It came broken." in text
    assert "iVBOR" not in text, "no page carries the bytes"


def test_they_are_served_as_what_they_are(folder: Path) -> None:
    run, client = broken_mug(Document(data=NOTE)), browser("viewer")
    for data, kind, shown in (
        (PNG, "image/png", "inline"), (BIG, "image/png", "inline"), (PDF, "application/pdf", "attachment"),
        (NOTE, "text/plain; charset=utf-8", "attachment"),
    ):  # fmt: skip
        answer = client.get(address(run, data))
        assert (answer.status_code, b"".join(answer.streaming_content)) == (200, data)
        assert (answer["Content-Type"], answer["X-Content-Type-Options"]) == (kind, "nosniff")
        assert answer["Content-Disposition"].startswith(shown)
        assert "sandbox" in answer["Content-Security-Policy"]
    assert not LogEntry.objects.exists()
    assert client.get(address(run, b"other")).status_code == 404
    other = the_run(run_agent(shop_agent("other"), "hi", "s2"))
    assert client.get(address(other, PNG)).status_code == 404
    assert [browser(role).get(address(run, PNG)).status_code for role in ("anonymous", "staff")] == [302, 403]


def test_a_file_that_is_not_what_it_was(folder: Path) -> None:
    run, client = broken_mug(), browser("viewer")
    (path,) = stored_in(folder)
    path.unlink()
    answer = client.get(address(run, BIG))
    assert answer.status_code == 409
    assert "is missing" in read(answer).text
    assert client.get(url(run)).status_code == 200, "the page of the run reads no file"


def test_what_is_sensitive_is_asked_for_and_logged(folder: Path) -> None:
    agent = shop_agent("scans", {"tools": [call("scan_passport")]}, tools=[scan_passport])
    run = the_run(run_agent(agent, [Image(data=PNG)], "s1"))
    (about, _note) = files_of(row_of(run))
    where = reverse("admin:agentruns_run_file", args=[run.pk, about["sha256"]])
    viewer, revealer = browser("viewer"), browser("superuser")
    for client in (viewer, revealer):
        page = client.get(url(run)).content.decode()
        assert where not in page
        assert "passport.png" not in page
        assert address(run, PNG) in page, "the task's own is nobody's secret"
        assert not client.get(where).streaming
    assert viewer.post(where).status_code == 403
    answer = revealer.post(where)
    assert hashlib.sha256(b"".join(answer.streaming_content)).hexdigest() == about["sha256"]
    assert LogEntry.objects.count() == 1


def test_a_late_picture_becomes_the_result(folder: Path) -> None:
    agent = shop_agent("dies", {"tools": [call("dies")]}, tools=[dying()])
    result = run_agent(agent, "do it", "s1")
    run = Run.objects.get(pk=result.run_id)
    from agentruns.agents.content import packed
    from agentruns.journal.payloads import put_blocks
    from agentruns.journal.store import Batch, DatabaseStore

    store = DatabaseStore()
    state = store.load(run.session_id, run.pk)
    made = put_blocks(f"{run.session_id}/late", packed([Text("here"), Image(data=BIG)]))
    batch = Batch(state)
    late = {**made, "is_error": False, "worker_epoch": 1}
    batch.add(events.LATE_RESULT, late, call_id=result.orphans[0], tool_name="dies", attempt=1)
    batch.closed = True
    store.append(batch)
    resolve_orphan(run.pk, result.orphans[0], "occurred", None, result=made["content"])
    settled = Message.objects.get(run=run, kind="tool_result")
    assert settled.payload["stored"] == made["stored"]
    assert address(run, BIG) in browser("viewer").get(url(run)).content.decode()
