"""Large contents of journal rows, stored in a Django storage before their row and verified when read.

Such a row has a preview as its `content`, and a StoredFile as `stored` (docs/payloads.md).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from tempfile import TemporaryFile
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import UUID

from django.core.files.base import ContentFile, File
from django.core.files.storage import Storage, storages
from django.db import connections

from agentruns.conf import settings
from agentruns.exceptions import PayloadError
from agentruns.utils import json as canonical
from agentruns.utils.redaction import get_logger, is_on, redact, redacted

logger = get_logger("agentruns.payloads")

PREVIEW = 500  # characters
CHUNK = 256 * 1024  # bytes that are in memory at once while a file is read
LONGEST_CHARACTER = 4  # bytes of UTF-8
THREADS = 8  # at most so many of a process are at a storage, or stuck in one that hangs

T = TypeVar("T")

_free = threading.BoundedSemaphore(THREADS)

# Follows a preview, so that nobody takes it for the whole content.
MARK = "\n[only the beginning of {size} bytes, which are stored as {name}]"


class Stored(NamedTuple):
    """The file of a row's content, as the row describes it."""

    run_id: UUID
    seq: int
    name: str
    sha256: str
    size: int
    form: str

    @property
    def is_text(self) -> bool:
        """Return whether the file holds the content's text, not its canonical JSON."""
        return self.form == "text"

    def error(self, what: str) -> PayloadError:
        """Return the error for a file that is missing, altered or out of reach."""
        return PayloadError(
            f"Run {self.run_id}, seq {self.seq}: file {self.name!r} of storage {settings.PAYLOAD_STORAGE!r} "
            f"{what}. Bring it back as it was, then resume the run if it waits for it."
        )


class Offload:
    """Stores the content of one row in a file, once, however often the row is built until it is stored."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instead: dict[str, Any] | None = None

    def __call__(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return the payload to append: the same one if its content stays inline."""
        if "content" not in payload:
            return payload
        if self.instead is None:
            self.instead = put(self.name, payload["content"])
        return {**payload, **self.instead}


def may_be_large(text: str) -> bool:
    """Return whether a text may be over the limit, by a check cheap enough for every row."""
    return len(text) * LONGEST_CHARACTER > settings.PAYLOAD_INLINE_MAX


def put(name: str, content: Any) -> dict[str, Any]:
    """Store a content over the limit under a new name that begins with `name`; return its row's members.

    Returns an empty dict, so that the content stays in its row, if it is small, if the project has no such
    storage, or if the storage fails in any way, does not answer in time, or did not keep what it was given:
    a known result is never lost.
    """
    form, data = _encoded(content)
    if len(data) <= settings.PAYLOAD_INLINE_MAX or not is_configured():
        return {}
    found = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "form": form}
    new = f"{name}-{secrets.token_hex(8)}"
    try:
        found["name"] = _in_time(lambda: _write(new, ContentFile(data), len(data), str(found["sha256"])))
    except Exception:
        logger.exception("Storage %r failed; %s stays in the journal.", settings.PAYLOAD_STORAGE, name)
        return {}
    return {"content": _preview(content) + MARK.format(**found), "stored": found}


def is_configured() -> bool:
    """Return whether the project has the storage alias that AGENTRUNS_PAYLOAD_STORAGE names."""
    return settings.PAYLOAD_STORAGE in storages.backends


def of(run_id: UUID, seq: int, payload: Any) -> Stored | None:
    """Return the file of a row's content, or None if the row holds the content itself.

    Raises PayloadError if its description cannot be understood.
    """
    found = payload.get("stored") if isinstance(payload, dict) else None
    if found is None:
        return None
    try:
        return Stored(run_id, seq, *(found[key] for key in ("name", "sha256", "size", "form")))
    except (KeyError, TypeError):
        raise PayloadError(f"Run {run_id}, seq {seq}: it does not say where its content is.") from None


def names_in(payload: Any) -> list[str]:
    """Return the names of the files that a row's payload points at."""
    found = payload.get("stored") if isinstance(payload, dict) else None
    name = found.get("name") if isinstance(found, dict) else None
    return [name] if isinstance(name, str) else []


def content_of(stored: Stored) -> Any:
    """Return the content of a file; raises PayloadError."""
    text = b"".join(chunks(stored)).decode()
    return text if stored.is_text else canonical.loads(text)


def chunks(stored: Stored) -> Iterator[bytes]:
    """Yield the bytes of a file, the last of them only if all of them are what was put away.

    Raises PayloadError where the file is missing, altered or out of reach.
    """
    digest, size, held = hashlib.sha256(), 0, b""
    for chunk in _read(stored):
        digest.update(chunk)
        size += len(chunk)
        if size > stored.size:
            break
        if held:
            yield held
        held = chunk
    if (size, digest.hexdigest()) != (stored.size, stored.sha256):
        raise stored.error("was altered")
    yield held


def check(stored: Stored) -> None:
    """Read a file to its end; raises PayloadError as `chunks`."""
    for _ in chunks(stored):
        pass


def restore(stored: Stored, parts: Iterable[bytes]) -> None:
    """Store the file of an imported row under the name that the row has, unless it exists.

    Raises PayloadError if the parts are not what the row describes, or no storage can take them.
    """
    if not is_configured():
        raise stored.error("has no place: STORAGES has no such alias")
    if not storages[settings.PAYLOAD_STORAGE].exists(stored.name):
        with TemporaryFile() as whole:
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
                whole.write(part)
            if digest.hexdigest() != stored.sha256:
                raise stored.error("was altered")
            _write(stored.name, File(whole), stored.size, stored.sha256)
    check(stored)


def _read(stored: Stored) -> Iterator[bytes]:
    if not is_configured():
        raise stored.error("is out of reach: STORAGES has no such alias")
    parts = _parts(stored.name)
    try:
        while chunk := _in_time(lambda: next(parts, b"")):
            yield chunk
    except FileNotFoundError:
        raise stored.error("is missing") from None
    except Exception as error:  # each storage has its own
        raise stored.error(f"cannot be read ({type(error).__name__}: {error})") from error


def _encoded(content: Any) -> tuple[Literal["text", "json"], bytes]:
    if isinstance(content, str):
        try:
            return "text", content.encode()
        except UnicodeEncodeError:  # a lone surrogate: no file can hold it as it is
            pass
    return "json", canonical.dumps(content).encode()


def _preview(content: Any) -> str:
    # Redacted before it is cut: the cut could leave part of a secret that no pattern finds.
    if isinstance(content, str):
        return redact(content)[:PREVIEW]
    return canonical.dumps(redacted(content) if is_on() else content)[:PREVIEW]


def _parts(name: str) -> Iterator[bytes]:
    with storages[settings.PAYLOAD_STORAGE].open(name) as file:
        yield from file.chunks(CHUNK)


def _in_time(work: Callable[[], T]) -> T:
    """Do `work` in a thread of its own, which is left behind if it takes longer than the time limit.

    Raises TimeoutError then, and what `work` raises.
    """
    late = TimeoutError(f"no answer within {settings.PAYLOAD_TIMEOUT} s")
    if not _free.acquire(timeout=settings.PAYLOAD_TIMEOUT):
        raise late
    done: Future[T] = Future()

    def target() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        finally:
            connections.close_all()
            _free.release()

    threading.Thread(target=target, name="agentruns-payload", daemon=True).start()
    try:
        return done.result(settings.PAYLOAD_TIMEOUT)
    except TimeoutError:
        if done.done():  # what `work` itself raised, or it was done in this instant
            return done.result()
        raise late from None


def _write(name: str, content: File[Any], size: int, sha256: str) -> str:
    """Store a file and return the name it got; raises OSError if the storage did not keep it as it was."""
    storage: Storage = storages[settings.PAYLOAD_STORAGE]
    used = storage.save(name, content)
    try:
        path = storage.path(used)
    except NotImplementedError:  # not in a file system: its server keeps what it acknowledged
        kept = storage.size(used) == size
    else:
        for place in (path, os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
            _sync(place)
        with open(path, "rb") as file:
            kept = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    if not kept:
        raise OSError(f"{used} is not what was stored")
    return used


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
