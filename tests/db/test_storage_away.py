"""The storage of large contents, or who knows what of it is needed, cannot be asked."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.files.base import ContentFile
from django.core.files.storage import FileSystemStorage, Storage
from django.db import OperationalError, connection

from agentruns import resume_run, run_agent
from agentruns.exceptions import PayloadError
from agentruns.journal import payloads
from agentruns.journal.payloads import Stored
from agentruns.models import Run
from agentruns.services.data import retention
from agentruns.utils.ids import uuid7
from tests.db.helpers import the_run
from tests.effects import Effects
from tests.files import MEGABYTE, HangingStorage, alias, fetch, fetched, report_of, row_of, said, stored_in
from tests.shop.agents import call, shop_agent
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

OLD = 1_700_000_000  # a time in 2023


class StickyStorage(FileSystemStorage):
    """Lets nobody delete a file whose name begins with an s."""

    def delete(self, name: Any) -> None:
        if Path(str(name)).name.startswith("s"):
            raise PermissionError(13, "Permission denied")
        super().delete(name)


class TruncatingStorage(FileSystemStorage):
    """Keeps the first half of what it is given, and says nothing."""

    def _save(self, name: str, content: Any) -> str:
        return super()._save(name, ContentFile(content.read()[: content.size // 2]))


class DistantTruncatingStorage(Storage):
    """The same, in no file system."""

    def __init__(self, location: str) -> None:
        self.kept: dict[str, bytes] = {}

    def _save(self, name: str, content: Any) -> str:
        self.kept[name] = content.read()[: content.size // 2]
        return name

    def exists(self, name: str) -> bool:
        return name in self.kept

    def size(self, name: str) -> int:
        return len(self.kept[name])


class GarblingStorage(FileSystemStorage):
    """Keeps as many bytes as it is given, and others."""

    def _save(self, name: str, content: Any) -> str:
        return super()._save(name, ContentFile(content.read().upper()))


@contextmanager
def hanging(folder: Path, settings: Any) -> Iterator[None]:
    """Let the storage hang in a block."""
    settings.AGENTRUNS_PAYLOAD_TIMEOUT = 0.5
    settings.STORAGES = {**settings.STORAGES, **alias(folder, f"{__name__}.HangingStorage")}
    HangingStorage.hanging.reset()
    try:
        yield
    finally:
        HangingStorage.hanging.let_go()


@pytest.fixture
def hangs(folder: Path, settings: Any) -> Iterator[None]:
    """The storage hangs from now on, until the test is over."""
    with hanging(folder, settings):
        yield


def stored_of(run: Run) -> Stored:
    row = row_of(run)
    found = payloads.of(run.pk, row.seq, row.payload)
    assert found is not None
    return found


def leave(folder: Path, *names: str) -> list[str]:
    """Put old files there that no row names; return what the storage calls them."""
    session = str(uuid7())
    (folder / session).mkdir(parents=True)
    for name in names:
        path = folder / session / name
        path.write_text("left by a process that died")
        os.utime(path, (OLD, OLD))
    return [f"{session}/{name}" for name in names]


def test_a_content_is_out_of_reach_and_not_empty_or_not_what_its_row_remembers(
    folder: Path, settings: Any
) -> None:
    stored, kept = stored_of(fetched()), settings.STORAGES
    settings.STORAGES = {name: value for name, value in settings.STORAGES.items() if name != "agentruns"}
    with pytest.raises(PayloadError, match="is out of reach: STORAGES has no such alias"):
        payloads.check(stored)
    with pytest.raises(PayloadError, match="has no place: STORAGES has no such alias"):
        payloads.check_parts(stored, [b"x"])
    assert (retention.delete_files([stored.name]), retention.delete_old_files()) == (0, 0)
    settings.STORAGES = kept
    (path,) = stored_in(folder)
    path.unlink()
    with pytest.raises(PayloadError, match="was altered"):
        payloads.check_parts(stored, [b"something ", b"else"])
    assert stored_in(folder) == []


def test_nothing_is_deleted_while_nobody_can_say_who_needs_it(folder: Path, caplog: Any) -> None:
    names = leave(folder, "a", "b")

    def away(*_statement: Any) -> Any:
        raise OperationalError("the database is away")

    with connection.execute_wrapper(away):
        assert (retention.delete_files(names), retention.delete_old_files()) == (0, 0)
    assert caplog.text.count("Files are left for the next time") == 2
    assert retention.delete_old_files(should_stop=lambda: True) == 0
    assert len(stored_in(folder)) == 2
    assert retention.delete_old_files() == 2
    assert stored_in(folder) == []


def test_a_file_that_cannot_be_deleted_keeps_no_other(
    folder: Path, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.STORAGES = {**settings.STORAGES, **alias(folder, f"{__name__}.StickyStorage")}
    names = leave(folder, "a", "sticky", "z")
    with caplog.at_level(logging.ERROR, "agentruns"):
        assert retention.delete_files(names) == 2
    assert [path.name for path in stored_in(folder)] == ["sticky"]
    assert "was not deleted" in caplog.text


def test_a_storage_that_hangs_is_not_given_ever_more_threads(hangs: None, settings: Any) -> None:
    settings.AGENTRUNS_PAYLOAD_TIMEOUT = 0.05
    before = threading.active_count()
    assert [payloads.put("s/c", "x" * MEGABYTE) for _ in range(24)] == [{}] * 24
    assert threading.active_count() - before <= payloads.THREADS == 8
    HangingStorage.hanging.let_go()
    settings.AGENTRUNS_PAYLOAD_TIMEOUT = LIMIT
    assert payloads.put("s/c", "x" * MEGABYTE), "it is used again once it answers"


def test_a_file_that_cannot_be_read_in_time_pauses_the_run(
    folder: Path, effects: Effects, settings: Any
) -> None:
    away = [KeyError("the model is away")]

    def fail_once(request: Any) -> Any:
        if away:
            raise away.pop()
        return {"text": "read"}

    agent = shop_agent("reader", {"tools": [call("fetch", size=MEGABYTE)]}, fail_once, tools=[fetch])
    with pytest.raises(KeyError):
        run_agent(agent, "do it", "s1", idempotency_key="k")
    run = Run.objects.get()
    with hanging(folder, settings):
        assert resume_run(run.pk).status == "paused"
    assert not HangingStorage.hanging.was_waited_for
    settings.AGENTRUNS_PAYLOAD_TIMEOUT = LIMIT
    run.refresh_from_db()
    assert "cannot be read (TimeoutError: no answer within 0.5 s)" in run.blocked_reason
    assert resume_run(run.pk).status == "completed"
    assert effects.count() == 1


@pytest.mark.parametrize("kind", ["Hanging", "Truncating", "DistantTruncating", "Garbling"])
def test_what_a_storage_did_not_keep_as_it_was_stays_in_its_row(
    kind: str, hangs: None, folder: Path, effects: Effects, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.STORAGES = {**settings.STORAGES, **alias(folder, f"{__name__}.{kind}Storage")}
    settings.AGENTRUNS_PAYLOAD_TIMEOUT = 0.5 if kind == "Hanging" else LIMIT
    asked: list[str] = []
    run = fetched(MEGABYTE, lambda request: asked.append(said(request)) or {"text": "read"})
    assert not HangingStorage.hanging.was_waited_for
    assert (run.status, run.output, effects.count()) == ("completed", "read", 1)
    payload = row_of(run).payload
    assert (payload["content"], "stored" in payload) == (report_of(MEGABYTE), False)
    assert asked == [report_of(MEGABYTE)]
    says = "no answer within 0.5 s" if kind == "Hanging" else "is not what was stored"
    assert says in caplog.text
    HangingStorage.hanging.let_go()
    the_run(run_agent("fetcher-s1", "fetch the report", "s1", idempotency_key="s1"))
