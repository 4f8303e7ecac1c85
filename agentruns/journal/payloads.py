"""Large contents of journal rows, stored in a Django storage before their row and verified when read.

Such a row has a preview as `content` and a StoredFile as `stored` (docs/payloads.md). In a row of blocks,
`stored` is a list of StoredFiles, which the blocks name by SHA-256. The StoredFile of a small file has the
file's data in base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from tempfile import TemporaryFile
from typing import Any, Literal, NamedTuple
from uuid import UUID

from django.core.files.base import ContentFile, File
from django.core.files.storage import Storage, storages

from agentruns import content as blocks
from agentruns.conf import settings
from agentruns.exceptions import PayloadError
from agentruns.journal import events
from agentruns.journal.fold import RunState
from agentruns.utils import json as canonical
from agentruns.utils.lanes import Lane
from agentruns.utils.redaction import get_logger, is_on, redact, redacted

logger = get_logger("agentruns.payloads")

OF_BLOCKS = tuple(kind for kind in events.KINDS.values() if kind.has_blocks)
PREVIEW = 500  # characters
LEAST = 4_096  # bytes; shorter texts among blocks stay in their row
CHUNK = 256 * 1024  # bytes that are in memory at once while a file is read
LONGEST_CHARACTER = 4  # bytes of UTF-8
THREADS = 8  # of a process that use a storage at a time, or are stuck in one that hangs

_lane = Lane("agentruns-payload", THREADS)

FOLDER = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # a session's id
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")

# Follows a preview, so that nobody takes the preview for the whole content.
MARK = "\n[only the beginning of {size} bytes, which are stored as {name}]"


class Stored(NamedTuple):
    """A file with the content of a row, or with a part of the content, as the row describes the file."""

    run_id: UUID
    seq: int
    name: str
    sha256: str
    size: int
    form: str
    data: str | None = None  # in base64, of a small file that is in its row

    @property
    def is_text(self) -> bool:
        """Check whether the file holds the content as plain text rather than as canonical JSON."""
        return self.form != "json"  # "bytes" if a document beside a text has the same content

    def error(self, what: str) -> PayloadError:
        """Build a PayloadError for this file; `what` says that it is missing, altered or out of reach."""
        file = f"file {self.name!r} of storage {settings.PAYLOAD_STORAGE!r}" if self.name else "a file in it"
        return PayloadError(
            f"Run {self.run_id}, seq {self.seq}: {file} {what}. Bring it back as it was, then resume the run "
            "if it waits for it."
        )


class Offload:
    """A function that stores a row's content in a file once, however often the row is built again."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instead: dict[str, Any] | None = None

    def __call__(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Store the content if it is large, and return the payload with its preview and file instead."""
        if "content" not in payload:
            return payload
        if self.instead is None:
            is_blocks = has_blocks(payload)
            self.instead = put_blocks(self.name, payload) if is_blocks else put(self.name, payload["content"])
        return {**payload, **self.instead}


def may_be_large(text: str) -> bool:
    """Check cheaply, without encoding, whether a text may exceed AGENTRUNS_PAYLOAD_INLINE_MAX bytes."""
    return len(text) * LONGEST_CHARACTER > settings.PAYLOAD_INLINE_MAX


def put(name: str, content: Any) -> dict[str, Any]:
    """Store a large content in a new file whose name begins with `name`; return its preview and the file.

    The preview is the member `content`, the file is `stored`. Returns an empty dict if the content stays in
    its row: it is not over AGENTRUNS_PAYLOAD_INLINE_MAX, no storage for payloads is configured, or the
    storage fails, does not answer in time or stored something else. A failing storage therefore never loses a
    known result.
    """
    form, data = _encoded(content)
    file = _put(name, form, data) if len(data) > settings.PAYLOAD_INLINE_MAX else None
    return {} if file is None else {"content": _preview(content) + MARK.format(**file), "stored": file}


def put_blocks(name: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Store the large files and texts of a payload's blocks in files; return its new `content` and `stored`.

    A file or text stays in the payload if it is small, or if it cannot be stored (see `put`). The small ones
    of a row share AGENTRUNS_PAYLOAD_INLINE_MAX bytes.
    """
    content, stored, room = [], [], settings.PAYLOAD_INLINE_MAX  # for small ones, which stay in the row
    for file in payload["stored"]:
        found = None
        if "data" in file and file["size"] > room:
            found = _put(name, file["form"], base64.b64decode(file["data"]))
        elif "data" in file:
            room -= file["size"]
        stored.append(found or file)
    for block in payload["content"]:
        form, data = _encoded(block.get("text", ""))
        is_large = form == "text" and len(data) > max(room, LEAST)
        found = _put(name, form, data) if is_large else None
        if found is None:
            room -= len(data)
            content.append(block)
            continue
        stored.append(found)
        about = {"size": found["size"], "sha256": found["sha256"]}
        content.append({**block, "text": _preview(block["text"]) + MARK.format(**found), **about})
    return {"content": content, "stored": stored}


def _put(name: str, form: str, data: bytes) -> dict[str, Any] | None:
    if not is_configured():
        return None
    file: dict[str, Any] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "form": form}
    new = f"{name}-{secrets.token_hex(8)}"
    try:
        work = partial(_write, new, ContentFile(data), len(data), str(file["sha256"]))
        file["name"] = _lane(work, settings.PAYLOAD_TIMEOUT)
    except Exception:
        logger.exception("Storage %r failed; %s stays in the journal.", settings.PAYLOAD_STORAGE, name)
        return None
    return file


def is_configured() -> bool:
    """Check whether STORAGES has the alias that AGENTRUNS_PAYLOAD_STORAGE names."""
    return settings.PAYLOAD_STORAGE in storages.backends


def of(run_id: UUID, seq: int, payload: Any) -> Stored | None:
    """Describe the file of a row's content; None without a file, or for blocks. Raises PayloadError."""
    return None if has_blocks(payload) else next(iter(files(run_id, seq, payload)), None)


def has_blocks(payload: Any) -> bool:
    """Check whether a row's content is a list of blocks with files."""
    return isinstance(payload, dict) and isinstance(payload.get("stored"), list)


def files(run_id: UUID, seq: int, payload: Any) -> list[Stored]:
    """List the files of a row. Raises PayloadError if `stored` is malformed."""
    try:
        return [
            Stored(
                run_id, seq, "" if "data" in each else each["name"],
                each["sha256"], each["size"], each["form"], each.get("data"),
            )
            for each in _about(payload)
        ]  # fmt: skip
    except (AttributeError, KeyError, TypeError):
        raise PayloadError(f"Run {run_id}, seq {seq}: it does not say where its content is.") from None


def file_of(run_id: UUID, seq: int, payload: Any, sha256: str) -> Stored:
    """Find the file of a row that has this SHA-256; raises PayloadError if the row has no such file."""
    for stored in files(run_id, seq, payload):
        if stored.sha256 == sha256:
            return stored
    raise PayloadError(f"Run {run_id}, seq {seq}: a block names a file that the row does not have.")


def names_in(payload: Any) -> list[str]:
    """List the names of the stored files in a row's payload."""
    names = (each.get("name") for each in _about(payload) if isinstance(each, dict))
    return [name for name in names if isinstance(name, str)]


def _about(payload: Any) -> list[Any]:
    stored = payload.get("stored") if isinstance(payload, dict) else None
    return stored if isinstance(stored, list) else [] if stored is None else [stored]


def content_of(stored: Stored) -> Any:
    """Read the text or the JSON value in a file; raises PayloadError as `chunks` does."""
    text = b"".join(chunks(stored)).decode()
    return text if stored.is_text else canonical.loads(text)


def said_in(run_id: UUID, seq: int, payload: Any) -> str:
    """Read the full text of a `user` row, with a description of each attached file; raises PayloadError."""
    content = whole(run_id, seq, payload)
    return blocks.described(content) if isinstance(content, list) else str(content)


def whole(run_id: UUID, seq: int, payload: Any) -> Any:
    """Read the content of a row with its texts from their files; raises PayloadError."""
    if (stored := of(run_id, seq, payload)) is not None:
        return content_of(stored)
    if not has_blocks(payload):
        return payload["content"]
    return [
        {**block, "text": content_of(file_of(run_id, seq, payload, block["sha256"]))}
        if block.get("type") == "text" and "sha256" in block
        else block
        for block in payload["content"]
    ]


def instructions_of(run: RunState) -> str:
    """Read the instructions made for a run; raises PayloadError if there are none or their file is bad."""
    if run.instructions is None:
        raise PayloadError(f"Run {run.run_id} has no instructions of its own; its agent's are a function.")
    if run.stored is None:
        return run.instructions
    seq, about = run.stored
    return str(whole(run.run_id, seq, {"content": run.instructions, "stored": about}))


def chunks(stored: Stored) -> Iterator[bytes]:
    """Yield a file's bytes; raise PayloadError if it is missing, or before the last chunk if it differs."""
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
    """Read a whole file to check its size and hash; raises PayloadError as `chunks` does."""
    for _ in chunks(stored):
        pass


def check_name(stored: Stored, session_id: UUID | None) -> None:
    """Raise PayloadError if an imported row's file is not in the session's folder or is badly described.

    Without `session_id`, the folder of any session will do. If the row itself holds the data, there is no
    file; then this checks the data.
    """
    if stored.data is not None:
        check(stored)
        return
    name, _, plain = stored.name.partition("/") if isinstance(stored.name, str) else ("", "", "")
    right = FOLDER.fullmatch(name) if session_id is None else name == str(session_id)
    if not right or not _PLAIN.fullmatch(plain):
        raise stored.error("is not named as the files of its session are")
    whole = type(stored.size) is int and isinstance(stored.sha256, str)
    if not whole or stored.form not in ("text", "json", "bytes"):
        raise stored.error("is not described as such a file is")


def check_parts(stored: Stored, parts: Iterable[bytes]) -> None:
    """Verify the content of a file that is to be restored; raises PayloadError.

    Checks the file in the storage if it exists there, else the hash of `parts`. Skips a `stored` that has its
    data with it.
    """
    if stored.data is not None:
        return
    if not is_configured():
        raise stored.error("has no place: STORAGES has no such alias")
    digest = hashlib.sha256()
    for part in chunks(stored) if _exists(stored) else parts:
        digest.update(part)
    if digest.hexdigest() != stored.sha256:
        raise stored.error("was altered")


def restore(stored: Stored, parts: Iterable[bytes]) -> None:
    """Store an imported row's file from its parts unless it exists, and check it; raises PayloadError."""
    if stored.data is None and not _exists(stored):
        with TemporaryFile() as whole:
            for part in parts:
                whole.write(part)
            try:
                _write(stored.name, File(whole), stored.size, stored.sha256)
            except Exception as error:  # each storage has its own
                raise stored.error(f"cannot be stored ({type(error).__name__}: {error})") from error
    check(stored)


def _exists(stored: Stored) -> bool:
    try:
        return storages[settings.PAYLOAD_STORAGE].exists(stored.name)
    except Exception as error:  # each storage has its own
        raise stored.error(f"cannot be looked for ({type(error).__name__}: {error})") from error


def _read(stored: Stored) -> Iterator[bytes]:
    if stored.data is not None:
        try:
            yield base64.b64decode(stored.data, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise stored.error("was altered") from None
        return
    if not is_configured():
        raise stored.error("is out of reach: STORAGES has no such alias")

    def whole() -> Iterator[bytes]:
        with storages[settings.PAYLOAD_STORAGE].open(stored.name) as file:
            yield from file.chunks(CHUNK)

    parts = whole()
    try:
        while chunk := _lane(lambda: next(parts, b""), settings.PAYLOAD_TIMEOUT):
            yield chunk
    except FileNotFoundError:
        raise stored.error("is missing") from None
    except Exception as error:  # each storage has its own
        raise stored.error(f"cannot be read ({type(error).__name__}: {error})") from error


def _encoded(content: Any) -> tuple[Literal["text", "json"], bytes]:
    if isinstance(content, str):
        with suppress(UnicodeEncodeError):  # a lone surrogate: no file can hold it as it is
            return "text", content.encode()
    return "json", canonical.dumps(content).encode()


def _preview(content: Any) -> str:
    # Redacted before it is cut: the cut could leave part of a secret that no pattern finds.
    if isinstance(content, str):
        return redact(content)[:PREVIEW]
    return canonical.dumps(redacted(content) if is_on() else content)[:PREVIEW]


def _write(name: str, content: File[Any], size: int, sha256: str) -> str:
    """Save a file and return its name in the storage; raises OSError if the storage altered it."""
    storage: Storage = storages[settings.PAYLOAD_STORAGE]
    used = storage.save(name, content)
    try:
        path = storage.path(used)
    except NotImplementedError:  # not in a file system: its server keeps what it acknowledged
        kept = storage.size(used) == size
    else:
        for place in (path, os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
            handle = os.open(place, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        with open(path, "rb") as file:
            kept = hashlib.file_digest(file, "sha256").hexdigest() == sha256
    if not kept:
        raise OSError(f"{used} is not what was stored")
    return used
