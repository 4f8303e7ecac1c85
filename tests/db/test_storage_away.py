"""The storage of large contents, or who knows what of it is needed, cannot be asked."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from django.core.files.storage import FileSystemStorage
from django.db import OperationalError

from agentruns.exceptions import PayloadError
from agentruns.journal import payloads
from agentruns.journal.payloads import Stored
from agentruns.models import Run
from agentruns.services import retention
from agentruns.utils.ids import uuid7
from tests.files import alias, fetched, folder, row_of, stored_in

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

__all__ = ["folder"]  # a fixture

OLD = 1_700_000_000  # a time in 2023


class StickyStorage(FileSystemStorage):
    """Lets nobody delete a file whose name begins with an s."""

    def delete(self, name: Any) -> None:
        if Path(str(name)).name.startswith("s"):
            raise PermissionError(13, "Permission denied")
        super().delete(name)


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


def test_a_content_is_out_of_reach_and_not_empty(folder: Path, settings: Any) -> None:
    stored = stored_of(fetched())
    settings.STORAGES = {name: value for name, value in settings.STORAGES.items() if name != "agentruns"}
    with pytest.raises(PayloadError, match="is out of reach: STORAGES has no such alias"):
        payloads.check(stored)
    with pytest.raises(PayloadError, match="has no place: STORAGES has no such alias"):
        payloads.restore(stored, [b"x"])
    assert (retention.delete_files([stored.name]), retention.delete_old_files()) == (0, 0)
    assert len(stored_in(folder)) == 1


def test_a_content_that_is_not_what_its_row_remembers_is_not_put_back(folder: Path) -> None:
    stored = stored_of(fetched())
    (path,) = stored_in(folder)
    path.unlink()
    with pytest.raises(PayloadError, match="was altered"):
        payloads.restore(stored, [b"something ", b"else"])
    assert stored_in(folder) == []


def test_nothing_is_deleted_while_nobody_can_say_who_needs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = leave(folder, "a", "b")

    def away() -> Any:
        raise OperationalError("the database is away")

    with monkeypatch.context() as patch:
        patch.setattr(retention, "_journals", away)
        assert (retention.delete_files(names), retention.delete_old_files()) == (0, 0)
    assert caplog.text.count("Files are left for the next time") == 2
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


def test_deleting_stops_when_it_is_asked_to(folder: Path) -> None:
    leave(folder, "a")
    assert retention.delete_old_files(should_stop=lambda: True) == 0
    assert len(stored_in(folder)) == 1
