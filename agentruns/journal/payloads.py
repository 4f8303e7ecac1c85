"""Large contents of journal rows: put away in a Django storage before their row, and verified when read.

A row that points at a file has a preview as its `content`, and `stored`: the file's name, SHA-256, size in
bytes, and whether its bytes are plain text or canonical JSON (docs/payloads.md).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from tempfile import TemporaryFile
from typing import Any, Literal, NamedTuple
from uuid import UUID

from django.core.files.base import ContentFile, File
from django.core.files.storage import Storage, storages

from agentruns.conf import settings
from agentruns.exceptions import PayloadError
from agentruns.utils import json as canonical
from agentruns.utils.redaction import get_logger, is_on, redact, redacted

logger = get_logger("agentruns.payloads")

PREVIEW = 500  # characters
CHUNK = 256 * 1024  # bytes that are in memory at once while a file is read
LONGEST_CHARACTER = 4  # bytes of UTF-8

# In a row, and beside a preview: what nobody may take for the content itself.
MARK = "\n[only the beginning of {size} bytes, which are stored as {name}]"


class Stored(NamedTuple):
    """What a row says of the file that holds its content."""

    run_id: UUID
    seq: int
    name: str
    sha256: str
    size: int
    form: str

    @property
    def is_text(self) -> bool:
        """Whether the bytes are the content's own text; else its canonical JSON."""
        return self.form == "text"

    def error(self, what: str) -> PayloadError:
        """Return the error that this file is missing, altered or out of reach."""
        return PayloadError(
            f"Run {self.run_id}, seq {self.seq}: file {self.name!r} of storage {settings.PAYLOAD_STORAGE!r} "
            f"{what}. Bring it back as it was, then resume the run if it waits for it."
        )


class Offload:
    """Puts the content of one row away, once, however often the row is built until it is stored."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instead: dict[str, Any] | None = None

    def __call__(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Return the payload as it is stored: the same one where its content stays inline."""
        if "content" not in payload:
            return payload
        if self.instead is None:
            self.instead = put(self.name, payload["content"])
        return {**payload, **self.instead}


def may_be_large(text: str) -> bool:
    """Whether a text may be over the limit: the quick look that every row is worth."""
    return len(text) * LONGEST_CHARACTER > settings.PAYLOAD_INLINE_MAX


def put(name: str, content: Any) -> dict[str, Any]:
    """Store a content over the limit under a new name that begins with `name`; return what its row holds.

    Returns nothing, so that the content stays in its row, where it is small, where the project has no such
    storage, and where the storage fails in any way: a known result is never lost.
    """
    form, data = _encoded(content)
    if len(data) <= settings.PAYLOAD_INLINE_MAX or not is_configured():
        return {}
    try:
        used = _write(storages[settings.PAYLOAD_STORAGE], f"{name}-{secrets.token_hex(8)}", ContentFile(data))
    except Exception:
        logger.exception("Storage %r failed; %s stays in the journal.", settings.PAYLOAD_STORAGE, name)
        return {}
    found = {"name": used, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "form": form}
    return {"content": _preview(content) + MARK.format(**found), "stored": found}


def is_configured() -> bool:
    """Whether the project has the storage alias that AGENTRUNS_PAYLOAD_STORAGE names."""
    return settings.PAYLOAD_STORAGE in storages.backends


def of(run_id: UUID, seq: int, payload: Any) -> Stored | None:
    """Return what a row's payload says of its file; None where it holds its content itself.

    Raises PayloadError where it cannot be understood.
    """
    found = payload.get("stored") if isinstance(payload, dict) else None
    if found is None:
        return None
    try:
        return Stored(run_id, seq, *(found[key] for key in ("name", "sha256", "size", "form")))
    except (KeyError, TypeError):
        raise PayloadError(f"Run {run_id}, seq {seq}: it does not say where its content is.") from None


def names_in(payload: Any) -> list[str]:
    """Return the names of the files that a row's payload points at, for who copies or prunes rows."""
    found = payload.get("stored") if isinstance(payload, dict) else None
    name = found.get("name") if isinstance(found, dict) else None
    return [name] if isinstance(name, str) else []


def content_of(stored: Stored) -> Any:
    """Return the very content that was put away; raises PayloadError."""
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
    """Store a file under the very name that a row has, unless it is there: for rows that come from elsewhere.

    Raises PayloadError where the parts are not what the row remembers, or no storage can take them.
    """
    if not is_configured():
        raise stored.error("has no place: STORAGES has no such alias")
    storage = storages[settings.PAYLOAD_STORAGE]
    if not storage.exists(stored.name):
        with TemporaryFile() as whole:
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
                whole.write(part)
            if digest.hexdigest() != stored.sha256:
                raise stored.error("was altered")
            _write(storage, stored.name, File(whole))
    check(stored)


def _read(stored: Stored) -> Iterator[bytes]:
    if not is_configured():
        raise stored.error("is out of reach: STORAGES has no such alias")
    try:
        with storages[settings.PAYLOAD_STORAGE].open(stored.name) as file:
            yield from file.chunks(CHUNK)
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
    # What is redacted is so before it is cut: a part of a secret would not be found any more.
    if isinstance(content, str):
        return redact(content)[:PREVIEW]
    return canonical.dumps(redacted(content) if is_on() else content)[:PREVIEW]


def _write(storage: Storage, name: str, content: File[Any]) -> str:
    used = storage.save(name, content)
    try:
        path = storage.path(used)
    except NotImplementedError:  # not in a file system: whoever runs it keeps what it acknowledged
        return used
    for place in (path, os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
        _sync(place)
    return used


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
