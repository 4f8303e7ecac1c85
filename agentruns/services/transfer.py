"""Exports of a run as JSON Lines for an auditor, their import into another database, and stored contents."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIRequest
from django.db.models import Value
from django.db.models.functions import Concat, Left, Now, Trim
from django.http import HttpRequest, StreamingHttpResponse
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.engine import in_doubt
from agentruns.exceptions import DurableRunNotFoundError, PayloadError, PermissionDeniedError, RunStateError
from agentruns.journal import events, payloads
from agentruns.journal.copies import task_of
from agentruns.journal.events import Row
from agentruns.journal.fold import RunState
from agentruns.journal.masking import Sensitive, masked, sensitive_in, sensitive_of_all
from agentruns.journal.payloads import Stored
from agentruns.journal.read import NAMING, definitions_in, definitions_of, stored_rows
from agentruns.journal.store import Batch, new_approval
from agentruns.journal.verify import History, check
from agentruns.models import Approval, Definition, Message, Run, Session, Tombstone
from agentruns.services import permissions
from agentruns.services.runs import refuse_pruned
from agentruns.services.write import find_run, write
from agentruns.utils import clock
from agentruns.utils import json as canonical
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import get_logger, is_on, redacted

FORMAT, VERSION = "agentruns-export", 2
READABLE = (1, 2)  # version 1 has no last line
PART = 720 * 1024  # bytes of a file in one line: less than 1 MB as base64
CHUNK = 500  # rows in one INSERT
REVEAL = "agentruns.reveal_arguments"
ACTOR = "import_run"
MARK = " (imported)"  # after the name of who decided elsewhere
# No browser may open what a model or a tool wrote.
INERT = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}

logger = get_logger("agentruns.exports")


@dataclass(frozen=True, slots=True)
class Content:
    """A row's content that is stored in a file; a `guarded` one needs the permission to reveal."""

    stored: Stored
    guarded: bool

    @property
    def filename(self) -> str:
        """Name under which a browser saves it."""
        return f"{self.stored.run_id}-{self.stored.seq}.{'txt' if self.stored.is_text else 'json'}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of its download."""
        kind = "text/plain" if self.stored.is_text else "application/json"
        return {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(self.stored.size),
            "Content-Disposition": f'attachment; filename="{self.filename}"',
            **INERT,
        }


def find_content(run: Run, seq: int) -> Content:
    """Return the stored content of a run's row, without reading it.

    Raises DurableRunNotFoundError if the run has no such row or the row holds its content itself, and
    PayloadError if the row does not name the file properly.
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
    """Return the bytes of a stored content, after the whole file was read and verified.

    Raises PermissionDeniedError, and PayloadError if the file is missing or was altered.
    """
    run_id, seq = content.stored.run_id, content.stored.seq
    if content.guarded and not permissions.may(actor, REVEAL):
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
    """Return the response that streams a content as an attachment, under WSGI and ASGI."""
    return _streamed(request, chunks, content.headers)


def download_export(request: HttpRequest, run: Run) -> StreamingHttpResponse:
    """Return the response that streams a run's redacted export as an attachment."""
    headers = {
        "Content-Type": "application/jsonl",
        "Content-Disposition": f'attachment; filename="run-{run.pk}.jsonl"',
        **INERT,
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
    """Return whether a content may hold what AGENTRUNS_REDACT removes, or what a tool declares sensitive."""
    return is_on() or bool(sensitive.get(tool))


def export_run(run_id: UUID | str, *, true_values: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of an export: the run, the definitions of its session's runs, each row of its journal.

    The chain begins with the session, so all rows of the session are there, each with its run. Sensitive and
    redacted values are left out, so that the hash of such a row cannot be recomputed, and files that may
    hold any are left out; `true_values` exports everything as stored. A file follows its row in parts, and
    the last line has the hash of all others. Raises DurableRunNotFoundError.
    """
    whole = hashlib.sha256()
    for line in _lines(run_id, true_values):
        whole.update(_written(line))
        yield line
    yield {"end": whole.hexdigest()}


def _written(line: dict[str, Any]) -> bytes:
    """Return a line as the hash of the whole export counts it."""
    return json.dumps(line, sort_keys=True).encode() + b"\n"


def _lines(run_id: UUID | str, true_values: bool) -> Iterator[dict[str, Any]]:
    alias, run = settings.DATABASE, find_run(run_id)
    session = Session.objects.using(alias).get(pk=run.session_id)
    definitions = Definition.objects.using(alias).in_bulk(definitions_of(alias, session.pk))
    sensitive = sensitive_of_all(definition.body for definition in definitions.values())
    yield {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": events.timestamp(clock.now(alias)),
        "run": str(run.pk),
        "session": {"id": str(session.pk), "key": session.key if true_values else str(redacted(session.key))},
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
    """Yield the parts of the file that a row points at, or one line that says why it is left out."""
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
    """Return a payload's text for anybody to read; the very same text if nothing is hidden."""
    if not sensitive and not is_on():
        return text
    read = row._replace(payload=canonical.loads(text))
    return canonical.dumps(redacted(masked(read, sensitive).payload))


def import_run(lines: Iterable[dict[str, Any]]) -> Run:
    """Store a session and its runs from the lines of an export with true values; return the exported run.

    Nothing is stored unless the whole chain is intact. It is a record: nothing is ever added to it, and no
    copied decision allows anything. The runs get no owner, and one that has not ended is closed here: it may
    go on where it came from. Raises RunStateError and PayloadError, which say what is wrong and where.
    """
    with TemporaryFile() as files:
        found = _Export(lines, files)
        for stored, parts in found.files():
            payloads.restore(stored, parts)
    runs, tried = list(_runs(found)), list[datetime]()
    return in_transaction(settings.DATABASE, lambda: _store(settings.DATABASE, found, runs, tried))


class _Export:
    """The lines of an export, checked row by row and folded run by run."""

    def __init__(self, lines: Iterable[dict[str, Any]], files: IO[bytes]) -> None:
        self.rows: list[Row] = []
        self._files = files  # one for all: a process may not have many open
        self._parts: dict[int, list[tuple[int, int]]] = {}  # row -> place and length of each part
        self.definitions: dict[str, Any] = {}
        try:
            self._read(iter(lines))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            where = f"after row {len(self.rows)}"
            raise RunStateError(f"This is no export of a run: {error!r} {where}.") from error

    def _read(self, lines: Iterator[dict[str, Any]]) -> None:
        first = next(lines, {})
        version = first.get("version")
        if first.get("format") != FORMAT or version not in READABLE:
            raise RunStateError(f"This is no export of version {VERSION}: make one with export_run.")
        whole, end = hashlib.sha256(_written(first)), None
        self.run_id = UUID(first["run"])
        head = first["head"]
        self.session = Session(
            id=UUID(first["session"]["id"]),
            key=first["session"]["key"],
            next_seq=head["seq"] + 1,
            head=head["hash"],
        )
        self.history = History(self.session)
        for line in lines:
            if end is not None:
                raise RunStateError("The export goes on after its last line.")
            if "end" in line:
                end = line
                continue
            whole.update(_written(line))
            if "redacted" in line:
                raise RunStateError("The export is redacted; make one with export_run --true-values.")
            if "definition" in line:
                self._define(line)
            elif "file" in line:
                self._keep(line)
            else:
                self._add(line)
        wrong = self.history.cut()
        if wrong is not None:
            raise RunStateError(str(wrong))
        if self.run_id not in self.history.states:
            raise RunStateError(f"The export has no row of run {self.run_id}.")
        named = set().union(*(definitions_in(row.payload) for row in self.rows if row.kind in NAMING))
        if missing := named - {*self.definitions}:
            raise RunStateError(f"The export lacks the definitions {', '.join(sorted(missing))}.")
        if unknown := {*self.definitions} - named:
            raise RunStateError(f"No row names the definitions {', '.join(sorted(unknown))}.")
        if (end is None) != (version == 1) or (end and end != {"end": whole.hexdigest()}):
            raise RunStateError("The export's last line, with the hash of all others, is missing or differs.")

    def _define(self, line: dict[str, Any]) -> None:
        if line["definition"] in self.definitions:
            raise RunStateError(f"Definition {line['definition']} is there twice.")
        body = canonical.loads(line["body"])
        if canonical.digest(body) != line["definition"]:
            raise RunStateError(f"Definition {line['definition']} was altered.")
        self.definitions[line["definition"]] = body

    def _add(self, line: dict[str, Any]) -> None:
        plain = ("seq", "kind", "call_id", "tool_name", "attempt", "epoch", "prev_hash", "hash")
        row = Row(
            **{name: line[name] for name in plain},
            run_id=UUID(line["run"]),
            payload={},
            created_at=datetime.fromisoformat(line["created_at"]),
            consumes=UUID(line["consumes"]) if line["consumes"] else None,
        )
        wrong = self.history.add(row, line["payload"])
        if wrong is not None:
            raise RunStateError(str(wrong))
        self.rows.append(row._replace(payload=canonical.loads(line["payload"])))

    def _keep(self, line: dict[str, Any]) -> None:
        if "data" not in line:
            raise RunStateError(f"The file of row {line['of']} is left out: {line['left_out']}")
        place = self._files.tell()
        length = self._files.write(base64.b64decode(line["data"], validate=True))
        self._parts.setdefault(line["of"], []).append((place, length))

    def files(self) -> Iterator[tuple[Stored, Iterator[bytes]]]:
        """Yield each file that a row points at, with those of its parts that are there."""
        for row in self.rows:
            stored = payloads.of(row.run_id, row.seq, row.payload)
            if stored is not None:
                yield stored, self._read_back(self._parts.get(row.seq, []))

    def _read_back(self, parts: list[tuple[int, int]]) -> Iterator[bytes]:
        for place, length in parts:
            self._files.seek(place)
            yield self._files.read(length)


def _store(alias: str, found: _Export, runs: list[Run], tried: list[datetime]) -> Run:
    session = found.session
    if Session.objects.using(alias).filter(pk=session.pk, created_at__in=tried).exists():
        return Run.objects.using(alias).get(pk=found.run_id)  # only the commit's acknowledgement was lost
    if Tombstone.objects.using(alias).filter(pk=session.pk).exists():
        raise RunStateError(f"Session {session.pk} was pruned here; nothing was imported.")
    session.owner_name = runs[0].owner_name
    Session.objects.using(alias).bulk_create([session], ignore_conflicts=True)
    tried.append(session.created_at)
    stored = Session.objects.using(alias).filter(pk=session.pk, created_at=session.created_at)
    if not stored.exists():
        raise RunStateError(
            f"There is a session {session.pk} or {session.key!r} already; nothing was imported."
        )
    Definition.objects.using(alias).bulk_create(
        [Definition(hash=key, body=body) for key, body in found.definitions.items()], ignore_conflicts=True
    )
    _refuse_known_keys(alias, runs)
    Run.objects.using(alias).bulk_create(runs)
    # They were made with the present time.
    for run_id, (first, last) in _times(found).items():
        Run.objects.using(alias).filter(pk=run_id).update(created_at=first, updated_at=last)
    Message.objects.using(alias).bulk_create(
        (Message(session_id=session.pk, **row._asdict()) for row in found.rows), batch_size=CHUNK
    )
    Approval.objects.using(alias).bulk_create(_approvals(found), batch_size=CHUNK)
    for wrong in check(session.pk, alias, files=False):
        raise RunStateError(f"{wrong} Nothing was imported.")
    for run in Run.objects.using(alias).unfinished().filter(session_id=session.pk):
        write(run.pk, _close, takes_lease=True)
    # Users of this database are others. After the closing, which writes the decisions of what it cancels.
    Approval.objects.using(alias).filter(run__session_id=session.pk, decided_at__isnull=False).update(
        decided_by=None,
        decided_by_name=Trim(Concat(Left("decided_by_name", NAME_LENGTH - len(MARK)), Value(MARK))),
    )
    Session.objects.using(alias).filter(pk=session.pk).update(imported_at=Now())
    return Run.objects.using(alias).get(pk=found.run_id)


def _close(run: Run, batch: Batch) -> None:
    """End an unfinished run here. What becomes of its open calls is known elsewhere, if anywhere."""
    batch.quiet = True
    for call in batch.state.run.open_calls():
        in_doubt.unknown(batch, call, ACTOR)
    reason = f"imported, {run.get_status_display()} then: it may go on in the database it came from"
    batch.add(events.RUN_CANCELLED, {"actor": events.actor_ref(ACTOR), "reason": reason})


def _refuse_known_keys(alias: str, runs: list[Run]) -> None:
    keys = {run.idempotency_key for run in runs} - {""}
    for key in keys:
        refuse_pruned(alias, key, None)
    taken = Run.objects.using(alias).filter(owner=None, idempotency_key__in=keys).first()
    if taken is not None:
        raise RunStateError(
            f"Idempotency key {taken.idempotency_key!r} stands for run {taken.pk} here; nothing was imported."
        )


def _runs(found: _Export) -> Iterator[Run]:
    owner = None
    for run_id, state in found.history.states.items():
        mine = [row for row in found.rows if row.run_id == run_id and events.COPIED not in row.payload]
        started = next(row for row in mine if row.kind == events.RUN_STARTED)
        payload: events.RunStarted = started.payload
        origin, actor = payload.get("origin"), payload.get("actor")
        if owner is None:  # a session belongs to the person who began it
            owner = actor["name"] if actor else ""
        # The task is in the row after a run's first, or before a fork's.
        asked = (row for row in found.rows if row.seq <= started.seq + 1)
        yield Run(
            id=run_id,
            session_id=found.session.pk,
            owner_name=owner,
            agent=state.agent,
            idempotency_key=payload["idempotency_key"],
            input=task_of(asked),
            origin_id=UUID(origin["run"]) if origin else None,
            origin_seq=origin.get("seq") if origin else None,
            **_columns(state),
        )


def _columns(state: RunState) -> dict[str, Any]:
    columns = state.columns()
    active = columns["status"] not in Run.Status.values
    return {**columns, "status": Run.Status.QUEUED if active else columns["status"]}


def _times(found: _Export) -> dict[UUID, tuple[datetime, datetime]]:
    times: dict[UUID, tuple[datetime, datetime]] = {}
    for row in found.rows:
        first, _ = times.get(row.run_id, (row.created_at, row.created_at))
        times[row.run_id] = first, row.created_at
    return times


def _approvals(found: _Export) -> Iterator[Approval]:
    for row in found.rows:
        if row.kind == events.APPROVAL_REQUESTED and events.COPIED not in row.payload:
            call = found.history.calls[row.run_id][row.call_id]
            if call.approval is not None:
                yield new_approval(call, call.approval, row)
