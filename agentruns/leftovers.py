"""Files of the payload storage that no row of any journal names any more."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from uuid import UUID

from django.core.files.storage import Storage, storages
from django.db import DatabaseError, InterfaceError, connections
from django.db.models import F, QuerySet, TextField
from django.db.models.functions import Cast
from django.utils import timezone

from agentruns import payloads
from agentruns.conf import settings
from agentruns.models import Message, Run
from agentruns.redaction import get_logger

logger = get_logger("agentruns.retention")

PAGE = 200  # folders
LEAST_AGE = timedelta(days=1)  # a file is written before the row that names it
POINTS = '"stored":'  # in the text of a row that names a file

_FOLDER = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # a session's id


def delete(names: Collection[str]) -> int:
    """Delete those of the files that no journal of this project names; return how many were there.

    What cannot be deleted now, or asked about, is left to `delete_old`.
    """
    if not names or not payloads.is_configured():
        return 0
    try:
        unnamed = _unnamed(names)
    except (DatabaseError, InterfaceError):
        logger.exception("Files are left for the next time: a database cannot be asked who needs them.")
        return 0
    storage = storages[settings.PAYLOAD_STORAGE]
    deleted = sum(_remove(storage, name) for name in sorted(unnamed))
    for folder in {_folder(name) for name in unnamed}:
        with suppress(NotImplementedError, OSError):  # no folder there, or not empty
            os.rmdir(storage.path(folder))
    return deleted


def delete_old(should_stop: Callable[[], bool] = lambda: False) -> int:
    """Delete the files older than a day that no journal of this project names; return how many.

    Such are those of a process that died between a file and its row. What is of a session whose run has not
    ended is left: its worker may yet store the row.
    """
    if not payloads.is_configured():
        return 0
    storage, deleted = storages[settings.PAYLOAD_STORAGE], 0
    folders = [name for name in _listed(storage, "", 0) if _FOLDER.fullmatch(name)]
    for start in range(0, len(folders), PAGE):
        if should_stop():
            break
        page = folders[start : start + PAGE]
        names = {f"{folder}/{name}" for folder in page for name in _listed(storage, folder, 1)}
        try:
            names = _unnamed(names) - _of_unfinished(names)
        except (DatabaseError, InterfaceError):
            logger.exception("Files are left for the next time: a database cannot be asked who needs them.")
            break
        deleted += delete([name for name in names if _is_old(storage, name)])
    return deleted


def of_sessions(session_ids: Collection[UUID]) -> set[str]:
    """Return the files in the folders of these sessions."""
    if not payloads.is_configured():
        return set()
    storage = storages[settings.PAYLOAD_STORAGE]
    return {f"{folder}/{name}" for folder in map(str, session_ids) for name in _listed(storage, folder, 1)}


def _listed(storage: Storage, folder: str, what: int) -> list[str]:
    """Return the folders (0) or files (1) in a folder."""
    try:
        return list(storage.listdir(folder)[what])
    except FileNotFoundError:
        return []


def _folder(name: str) -> str:
    return name.partition("/")[0]


def _unnamed(names: Collection[str]) -> set[str]:
    """Return those of the names that no row names, of whatever database: an imported run shares its files."""
    left = {name for name in names if _FOLDER.fullmatch(_folder(name))}
    for alias in _journals():
        rows = Message.objects.using(alias)
        own = rows.filter(session_id__in={_folder(name) for name in left})
        # One question: a fork of a fork is there, or else that which it was made from, if not both.
        copied = rows.filter(run__origin_seq__isnull=False, seq__lte=F("run__origin_seq"))
        for some in (own, copied):
            if left:
                left.difference_update(_named_in(some))
    return left


def _named_in(rows: QuerySet[Message]) -> Iterator[str]:
    pointing = rows.annotate(text=Cast("payload", TextField())).filter(text__contains=POINTS)
    for payload in pointing.values_list("payload", flat=True).iterator(chunk_size=500):
        yield from payloads.names_in(payload)


def _of_unfinished(names: Collection[str]) -> set[str]:
    busy: set[str] = set()
    for alias in _journals():
        runs = Run.objects.using(alias).unfinished().filter(session_id__in={_folder(name) for name in names})
        busy.update(map(str, runs.values_list("session_id", flat=True)))
    return {name for name in names if _folder(name) in busy}


def _journals() -> Iterator[str]:
    """Yield the databases that hold a journal of their own: a replica says late what its primary says."""
    for alias in connections:
        connection = connections[alias]
        if Message._meta.db_table not in connection.introspection.table_names():
            continue
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_is_in_recovery()")
                if cursor.fetchone()[0]:
                    continue
        yield alias


def _is_old(storage: Storage, name: str) -> bool:
    try:
        return storage.get_modified_time(name) < timezone.now() - LEAST_AGE
    except FileNotFoundError:
        return False


def _remove(storage: Storage, name: str) -> bool:
    try:
        there = storage.exists(name)
        storage.delete(name)
    except Exception:  # each storage has its own
        logger.exception("File %r of storage %r was not deleted.", name, settings.PAYLOAD_STORAGE)
        return False
    return there
