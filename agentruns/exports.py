"""What leaves the journal: a run for an auditor, and the content of a row that is stored in a file.

An export is a session's whole chain as JSON Lines; docs/verify_export.py verifies it with nothing but Python.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, StreamingHttpResponse
from django.utils.translation import gettext as _

from agentruns import canonical, payloads, people, transitions
from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError, PayloadError, PermissionDeniedError
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.read import stored_rows
from agentruns.masking import Sensitive, definitions_of, masked, sensitive_in, sensitive_of_all
from agentruns.models import Definition, Message, Run, Session
from agentruns.payloads import Stored
from agentruns.redaction import get_logger, is_on, redacted

FORMAT, VERSION = "agentruns-export", 1
PART = 720 * 1024  # bytes of a file in one line: less than 1 MB as base64
REVEAL = "agentruns.reveal_arguments"

logger = get_logger("agentruns.exports")


@dataclass(frozen=True, slots=True)
class Content:
    """A row's content that is stored in a file; `guarded` is what only those may have who may reveal."""

    stored: Stored
    guarded: bool

    @property
    def filename(self) -> str:
        """What the file is called where it is saved."""
        return f"{self.stored.run_id}-{self.stored.seq}.{'txt' if self.stored.is_text else 'json'}"

    @property
    def headers(self) -> dict[str, str]:
        """What to say of it over HTTP, so that no browser opens what a model or a tool wrote."""
        kind = "text/plain" if self.stored.is_text else "application/json"
        return {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(self.stored.size),
            "Content-Disposition": f'attachment; filename="{self.filename}"',
            "Content-Security-Policy": "default-src 'none'; sandbox",
            "X-Content-Type-Options": "nosniff",
        }


def find_content(run: Run, seq: int) -> Content:
    """Return what is known of the stored content of a run's row, without reading it.

    Raises DurableRunNotFoundError where the run has no such row or the row holds its content itself, and
    PayloadError where the row does not say where it is.
    """
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, seq=seq)
    for tool, payload in rows.values_list("tool_name", "payload"):
        stored = payloads.of(run.pk, seq, payload)
        if stored is not None:
            return Content(stored, _is_guarded(tool, sensitive_in(run)))
    raise DurableRunNotFoundError(
        _("Run %(run)s has no row %(seq)s whose content is stored in a file.") % {"run": run.pk, "seq": seq}
    )


def read_content(content: Content, actor: Any) -> Iterator[bytes]:
    """Return the bytes of a stored content, after they were all read once and found to be what was stored.

    Raises PermissionDeniedError, and PayloadError where the file is missing or was altered.
    """
    run_id, seq = content.stored.run_id, content.stored.seq
    if content.guarded and not people.may(actor, REVEAL):
        raise PermissionDeniedError(
            _(
                "The content of row %(seq)s of run %(run)s may hold what is not to be shown: "
                "permission %(permission)s is missing."
            )
            % {"seq": seq, "run": run_id, "permission": REVEAL}
        )
    payloads.check(content.stored)
    if content.guarded:
        logger.info("Content of run=%s seq=%s revealed to user=%s", run_id, seq, getattr(actor, "pk", actor))
    return payloads.chunks(content.stored)


def download(request: HttpRequest, content: Content, chunks: Iterator[bytes]) -> StreamingHttpResponse:
    """Return the answer that streams a content, under WSGI and ASGI, as an attachment."""
    return _streamed(request, chunks, content.headers)


def download_export(request: HttpRequest, run: Run) -> StreamingHttpResponse:
    """Return the answer that streams a run's export, redacted, as an attachment."""
    headers = {
        "Content-Type": "application/jsonl",
        "Content-Disposition": f'attachment; filename="run-{run.pk}.jsonl"',
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "X-Content-Type-Options": "nosniff",
    }
    lines = (f"{json.dumps(line)}\n".encode() for line in export_run(run.pk))
    return _streamed(request, lines, headers)


def _streamed(
    request: HttpRequest, chunks: Iterator[bytes], headers: dict[str, str]
) -> StreamingHttpResponse:
    # Under ASGI Django would read all of a plain iterator into memory first.
    body = _asynchronous(chunks) if isinstance(request, ASGIRequest) else chunks
    return StreamingHttpResponse(body, headers=headers)


async def _asynchronous(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    following = sync_to_async(lambda: next(chunks, b""))
    while chunk := await following():
        yield chunk


def _is_guarded(tool: str, sensitive: Sensitive) -> bool:
    """Whether a content may hold what REDACT takes out, or what a tool declares sensitive."""
    return is_on() or bool(sensitive.get(tool))


def export_run(run_id: UUID | str, *, true_values: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of an export: the run, the definitions of its session's runs, each row of its journal.

    The chain begins with the session, so every row of it is there, each with its run. What is sensitive or
    redacted is left out of a row, whose hash can then not be recomputed, and so are files that may hold it;
    `true_values` exports the rows as they are stored. A file follows its row in parts. Raises
    DurableRunNotFoundError.
    """
    alias, run = settings.DATABASE, transitions.find_run(run_id)
    session = Session.objects.using(alias).get(pk=run.session_id)
    definitions = Definition.objects.using(alias).in_bulk(definitions_of(alias, session.pk))
    sensitive = sensitive_of_all(definition.body for definition in definitions.values())
    yield {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": events.timestamp(datetime.now(UTC)),
        "run": str(run.pk),
        "session": {"id": str(session.pk), "key": _shown(session.key, true_values)},
        "head": {"seq": session.next_seq - 1, "hash": session.head},
    }
    for key, definition in definitions.items():
        body = definition.body if true_values else redacted(definition.body)
        whole = canonical.dumps(body) == canonical.dumps(definition.body)
        yield {"definition": key, "body" if whole else "redacted": canonical.dumps(body)}
    rows = Message.objects.using(alias).filter(session_id=session.pk, seq__lt=session.next_seq)
    for row in stored_rows(rows):
        yield _line(row, sensitive, true_values)
        yield from _file(row, sensitive, true_values)


def _line(row: Row, sensitive: Sensitive, true_values: bool) -> dict[str, Any]:
    text = str(row.payload)
    line: dict[str, Any] = {
        "seq": row.seq,
        "run": str(row.run_id),
        "kind": row.kind,
        "call_id": row.call_id,
        "tool_name": row.tool_name,
        "attempt": row.attempt,
        "epoch": row.epoch,
        "created_at": events.timestamp(row.created_at),
        "consumes": str(row.consumes) if row.consumes else None,
        "prev_hash": row.prev_hash,
        "hash": row.hash,
    }
    shown = text if true_values else _readable(row, text, sensitive)
    return {**line, "payload": text} if shown == text else {**line, "redacted": shown}


def _file(row: Row, sensitive: Sensitive, true_values: bool) -> Iterator[dict[str, Any]]:
    """Yield the parts of the file that a row points at, `of` its seq; or why it is not in the export."""
    text = str(row.payload)
    stored = payloads.of(row.run_id, row.seq, canonical.loads(text)) if '"stored"' in text else None
    if stored is None:
        return
    about: dict[str, Any] = {"file": stored.name, "of": row.seq}
    if not true_values and _is_guarded(row.tool_name, sensitive):
        yield {**about, "left_out": "may hold what is not to be shown"}
        return
    try:
        for number, part in enumerate(_parts(payloads.chunks(stored)), start=1):
            yield {**about, "part": number, "data": base64.b64encode(part).decode()}
    except PayloadError as error:
        yield {**about, "left_out": str(redacted(str(error))), "wrong": True}


def _parts(chunks: Iterator[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for chunk in chunks:
        held += chunk
        while len(held) >= PART:
            yield bytes(held[:PART])
            del held[:PART]
    if held:
        yield bytes(held)


def _readable(row: Row, text: str, sensitive: Sensitive) -> str:
    """Return a payload's text as it may be read by anybody; the very same text where nothing is hidden."""
    if not sensitive and not is_on():
        return text
    read = row._replace(payload=canonical.loads(text))
    return canonical.dumps(redacted(masked(read, sensitive).payload))


def _shown(text: str, true_values: bool) -> str:
    return text if true_values else str(redacted(text))
