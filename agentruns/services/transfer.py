"""Exports of a run as JSON Lines for an auditor, their import into another database, and stored contents."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.exceptions import ValidationError
from django.core.handlers.asgi import ASGIRequest
from django.db import DatabaseError, DataError, IntegrityError, InterfaceError, OperationalError
from django.db.models import Q, TextField, Value
from django.db.models.functions import Cast, Concat, Left, Now, Trim
from django.http import HttpRequest, StreamingHttpResponse
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.content import IMAGES, PDF, download_name
from agentruns.engine import in_doubt
from agentruns.exceptions import DurableRunNotFoundError, PayloadError, RunStateError
from agentruns.journal import events, payloads
from agentruns.journal.batch import Batch
from agentruns.journal.copies import task_of, title_of
from agentruns.journal.events import Row
from agentruns.journal.masking import mask_of
from agentruns.journal.payloads import Stored
from agentruns.journal.read import NAMING, Parts, definitions_in, definitions_of, stored_rows
from agentruns.journal.store import new_approval
from agentruns.journal.verify import MARK, History, check
from agentruns.models import Approval, ContextValue, Definition, Message, Run, Session, Tombstone
from agentruns.models.fields import check_columns
from agentruns.models.kinds import form_of, split
from agentruns.models.parts import commitment
from agentruns.models.tombstone import names_of
from agentruns.services import permissions
from agentruns.services.data.retention import delete_files
from agentruns.services.runs.submit import pruned_keys, refuse_pruned
from agentruns.services.runs.write import find_run, write
from agentruns.utils import clock, json as canonical
from agentruns.utils.bounds import NAME_LENGTH, check_name
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import is_on, redacted

FORMAT, VERSION = "agentruns-export", 3
PART = 720 * 1024  # bytes of a file in one line: less than 1 MB as base64
CHUNK = 500  # rows in one INSERT
# Facts of rows
_TIMES = ("not_before", "expires_at", "from", "started_at", "remind_at", "escalate_at", "due")
# The columns that a line has in the row's own form.
PLAIN = ("seq", "kind", "call_id", "tool_name", "attempt", "epoch", "content_hash", "prev_hash", "hash")
ACTOR = events.Program("import_run")
_THERE = "There is a session %s or %r already; nothing was imported."
SERVED = {**{kind: kind for kind in (*IMAGES, PDF)}, "text/plain": "text/plain; charset=utf-8"}
# No browser may open what a model or a tool wrote.
INERT = {"Content-Security-Policy": "default-src 'none'; sandbox", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True, slots=True)
class Content:
    """A row's content that is stored in a file; a `guarded` content needs the permission to reveal."""

    stored: Stored
    guarded: bool
    run: Run
    block: dict[str, Any] | None = None  # the block that names the file, in a row of blocks

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the content's download, with the name under which a browser saves it."""
        form, kind = ("txt", "text/plain") if self.stored.is_text else ("json", "application/json")
        name, kind = f"{self.stored.run_id}-{self.stored.seq}", f"{kind}; charset=utf-8"
        if self.block is None or self.block["type"] == "text":
            name = f"{name}.{form}"
        else:
            # A stranger chose the name; what opens the file on somebody's machine is its extension.
            name = download_name(self.block.get("name") or name, self.block["media_type"])
            kind = SERVED.get(self.block["media_type"], "application/octet-stream")
        return {
            "Content-Type": kind,
            "Content-Length": str(self.stored.size),
            "Content-Disposition": content_disposition_header(kind not in IMAGES, name) or "attachment",
            **INERT,
        }


def find_content(run: Run, seq: int) -> Content:
    """Find the stored content of a run's row, without reading its file.

    Raises DurableRunNotFoundError for a row without a file, PayloadError if the row's `stored` is malformed.
    """
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, seq=seq)
    for tool, content in rows.values_list("tool_name", "content"):
        if (stored := payloads.of(run.pk, seq, content or {})) is not None:
            return Content(stored, mask_of(run).guards_file(tool), run)
    text = _("Run %(run)s has no row %(seq)s whose content is stored in a file.")
    raise DurableRunNotFoundError(text % {"run": run.pk, "seq": seq})


def find_file(run: Run, sha256: str) -> Content:
    """Find the file with this SHA-256 that a block in the run's rows names, without reading the file.

    If several blocks name the file, prefers one that is not guarded. Raises DurableRunNotFoundError if no
    block names the file, PayloadError if a row's `stored` is malformed or lacks the file.
    """
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, kind__in=payloads.OF_BLOCKS)
    rows = rows.annotate(text=Cast("content", TextField())).filter(text__contains=sha256).order_by("seq")
    mask, contents = mask_of(run), list[Content]()
    for seq, tool, content in rows.values_list("seq", "tool_name", "content"):
        for block in content["content"] if content and payloads.has_blocks(content) else []:
            if block.get("sha256") == sha256:
                stored = payloads.file_of(run.pk, seq, content, sha256)
                contents.append(Content(stored, mask.guards_block(tool, block), run, block))
    if not contents:
        raise DurableRunNotFoundError(_("Run %(run)s has no such file.") % {"run": run.pk})
    return min(contents, key=lambda content: content.guarded)


def read_content(content: Content, actor: Any, door: str = "service") -> Iterator[bytes]:
    """Verify a stored content and return its bytes in chunks. Raises PermissionDeniedError, PayloadError."""
    if content.guarded:
        permissions.reveal(actor, content.run, door=door, what=f"row={content.stored.seq}")
    payloads.check(content.stored)
    return payloads.chunks(content.stored)


def download_export(request: HttpRequest, run: Run) -> StreamingHttpResponse:
    """Build a response that downloads a run's redacted export. Raises PermissionDeniedError."""
    permissions.require(request.user, "export", run)
    permissions.require_whole(request.user, run)
    name = f'attachment; filename="run-{run.pk}.jsonl"'
    headers = {"Content-Type": "application/jsonl", "Content-Disposition": name, **INERT}
    return download(request, (f"{json.dumps(line)}\n".encode() for line in export_run(run.pk)), headers)


def download(request: HttpRequest, chunks: Iterator[bytes], headers: dict[str, str]) -> StreamingHttpResponse:
    """Build a response with these headers that streams the chunks, under WSGI and ASGI."""

    async def asynchronous() -> AsyncIterator[bytes]:
        following = sync_to_async(lambda: next(chunks, b""))
        while chunk := await following():
            yield chunk

    # Under ASGI Django would read all of a plain iterator into memory first.
    body = asynchronous() if isinstance(request, ASGIRequest) else chunks
    return StreamingHttpResponse(body, headers=headers)


def export_run(run_id: UUID | str, *, true_values: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of an export: the run, the definitions of its session's runs, each row of its journal.

    The chain begins with the session, so the export has all rows of the session, each with its run. A file
    follows its row in parts. The last line has the hash of all other lines.

    Sensitive and redacted values are left out, with the salt of the part of the row that has such a value. A
    file that may have such a value is left out, and so is a file that cannot be read. The chain can still be
    verified, because it is made of the parts' hashes. `true_values` exports everything as stored, with the
    key of the session's digests. Raises DurableRunNotFoundError.
    """
    whole = hashlib.sha256()
    for line in _lines(run_id, true_values):
        whole.update(_written(line))
        yield line
    yield {"end": whole.hexdigest()}


def _written(line: dict[str, Any]) -> bytes:
    """Encode a line for the hash of the whole export."""
    return json.dumps(line, sort_keys=True).encode() + b"\n"


def _lines(run_id: UUID | str, true_values: bool) -> Iterator[dict[str, Any]]:
    alias, run = settings.DATABASE, find_run(run_id)
    session = run.session
    definitions = Definition.objects.using(alias).in_bulk(definitions_of(alias, session.pk))
    mask, names = mask_of(run), {"scope": session.scope, "key": session.key}
    yield {
        "format": FORMAT,
        "version": VERSION,
        "exported_at": events.timestamp(clock.now(alias)),
        "run": str(run.pk),
        "session": {
            "id": str(session.pk),
            **({**names, "secret": session.secret} if true_values else redacted(names)),
        },
        "head": {"seq": session.next_seq - 1, "hash": session.head},
    }
    for key, definition in definitions.items():
        body = definition.body if true_values else redacted(definition.body)
        whole = canonical.dumps(body) == canonical.dumps(definition.body)
        yield {"definition": key, "body" if whole else "redacted": canonical.dumps(body)}
    rows = Message.objects.using(alias).filter(session_id=session.pk, seq__lt=session.next_seq)
    for row, parts in stored_rows(rows):
        line: dict[str, Any] = {
            **{name: getattr(row, name) for name in PLAIN},
            "run": str(row.run_id),
            "created_at": events.timestamp(row.created_at),
            "consumes": str(row.consumes) if row.consumes else None,
            "facts_hash": commitment(row.facts_salt, parts.facts),
        }
        shown = parts
        hides = mask or is_on() or (parts.content is None and '"key_hash":' in parts.facts)
        if not true_values and hides:  # where nothing is hidden, the very same text is kept
            hidden = redacted(mask.row(row._replace(payload=parts.payload(row.kind))).payload)
            facts, content = split(row.kind, hidden)
            shown = Parts(canonical.dumps(facts), None if parts.content is None else canonical.dumps(content))
        salts = (row.facts_salt, row.content_salt)
        for name, text, seen, salt in zip(Parts._fields, parts, shown, salts, strict=True):
            if text is not None:
                line |= {name: text, f"{name}_salt": salt} if seen == text else {f"{name}_redacted": seen}
        yield line
        # Then the parts of each file that the row names, or one line that says why the file is left out
        for stored in payloads.files(row.run_id, row.seq, parts.payload(row.kind)):
            about: dict[str, Any] = {"file": stored.name, "of": row.seq}
            if stored.data is not None:
                continue
            if not true_values and mask.guards_file(row.tool_name):
                yield {**about, "left_out": "may hold what is not to be shown"}
                continue
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


def import_run(lines: Iterable[dict[str, Any]], *, scope: str | None = None) -> Run:
    """Store a session and its runs from the lines of an export with true values; return the exported run.

    The session gets `scope`, or the export's scope if `scope` is None. Nothing is stored unless the whole
    chain is intact. The session is a record: nothing is ever added to it, and no imported decision allows a
    call. The runs get no owner. An unfinished run is cancelled here, because it may continue in the database
    it came from. Raises RunStateError and PayloadError, which name the error and its place; TypeError or
    ValueError for a bad scope.
    """
    check_name("scope", scope or "")
    alias, tried = settings.DATABASE, list[datetime]()
    with TemporaryFile() as files, _refusing("This export cannot be stored"):
        export = _Export(lines, files, scope)
        _refuse_known(alias, export)
        for stored, parts in export.files():  # before the first is stored
            payloads.check_parts(stored, parts)
        try:
            for stored, parts in export.files():
                payloads.restore(stored, parts)
            runs = list(_runs(export))  # a long task is read from its file
            for run in runs:
                check_columns(run)
            return in_transaction(alias, lambda: _store(alias, export, runs, tried))
        except (OperationalError, InterfaceError):  # nobody knows what was stored
            raise
        except Exception:
            delete_files({stored.name for stored, _parts in export.files() if stored.data is None})
            raise


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """Turn an error that a malformed export causes, here or in the database, into a RunStateError."""
    try:
        yield
    except (
        ArithmeticError, AttributeError, DatabaseError, LookupError, RuntimeError, TypeError, ValidationError,
        ValueError,
    ) as error:  # fmt: skip
        # Other errors of the database are not caused by the export.
        if isinstance(error, DatabaseError) and not isinstance(error, DataError | IntegrityError):
            raise
        raise RunStateError(f"{text}: {error!r}. Nothing was imported.") from error


def _check_time(what: str, text: Any) -> None:
    """Raise RunStateError unless a text is a time with its offset that every time zone can show, or None."""
    with suppress(ArithmeticError, TypeError, ValueError):
        if text is None:
            return
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None and 1 < at.astimezone(UTC).year < 9999:
            return
    raise RunStateError(f"{what} is {text!r}, no time with its offset from UTC, or one out of range.")


class _Export:
    """The lines of an export, checked row by row and folded run by run."""

    def __init__(self, lines: Iterable[dict[str, Any]], files: IO[bytes], scope: str | None) -> None:
        self.scope = scope
        self.rows: list[Row] = []
        self.parts: list[Parts] = []
        self._files = files  # one for all parts, because a process may not have many files open
        # row and file -> place and length of each part
        self._parts: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self.definitions: dict[str, Any] = {}
        self._number = 1
        try:
            with _refusing("This is no export of a run"):
                self._read(iter(lines))
        except (RunStateError, PayloadError) as error:
            raise type(error)(f"Line {self._number}: {error}") from error

    def _read(self, lines: Iterator[dict[str, Any]]) -> None:
        first = next(lines, {})
        if (first.get("format"), first.get("version")) != (FORMAT, VERSION):
            raise RunStateError(f"This is no export of version {VERSION}: make one with export_run.")
        whole, end = hashlib.sha256(_written(first)), None
        self.run_id = UUID(first["run"])
        head = first["head"]
        self.session = Session(
            id=UUID(first["session"]["id"]),
            scope=first["session"].get("scope", "") if self.scope is None else self.scope,
            key=first["session"]["key"],
            secret=first["session"].get("secret", ""),
            next_seq=head["seq"] + 1,
            head=head["hash"],
        )
        check_columns(self.session)
        self.history = History(self.session)
        for self._number, line in enumerate(lines, start=2):
            if end is not None:
                raise RunStateError("The export goes on after its last line.")
            if "end" in line:
                end = line
                continue
            whole.update(_written(line))
            if any("redacted" in name for name in line):
                raise RunStateError("The export is redacted; make one with export_run --true-values.")
            if "definition" in line:
                if line["definition"] in self.definitions:
                    raise RunStateError(f"Definition {line['definition']} is there twice.")
                body = canonical.loads(line["body"])
                if canonical.digest(body) != line["definition"]:
                    raise RunStateError(f"Definition {line['definition']} was altered.")
                self.definitions[line["definition"]] = body
            elif "file" in line:
                if "data" not in line:
                    raise RunStateError(f"The file of row {line['of']} is left out: {line['left_out']}")
                place = self._files.tell()
                length = self._files.write(base64.b64decode(line["data"], validate=True))
                self._parts.setdefault((line["of"], line["file"]), []).append((place, length))
            else:
                self._add(line)
        if (wrong := self.history.cut()) is not None:
            raise RunStateError(str(wrong))
        if self.run_id not in self.history.states:
            raise RunStateError(f"The export has no row of run {self.run_id}.")
        named = set().union(*(definitions_in(row.payload) for row in self.rows if row.kind in NAMING))
        if missing := named - {*self.definitions}:
            raise RunStateError(f"The export lacks the definitions {', '.join(sorted(missing))}.")
        if unknown := {*self.definitions} - named:
            raise RunStateError(f"No row names the definitions {', '.join(sorted(unknown))}.")
        if end != {"end": whole.hexdigest()}:
            raise RunStateError("The export's last line, with the hash of all others, is missing or differs.")

    def _add(self, line: dict[str, Any]) -> None:
        parts = Parts(line["facts"], line.get("content"))
        for text in parts:
            if text is not None and canonical.dumps(canonical.loads(text)) != text:
                raise RunStateError("Its text is not canonical, so nothing could be stored with its hash.")
        payload, kind = parts.payload(line["kind"]), line["kind"]
        times = {name: payload.get(name) for name in _TIMES if name in form_of(kind).facts}
        times |= {"copied.at": (payload.get(events.COPIED) or {}).get("at")}
        for name, text in {**times, "created_at": line["created_at"]}.items():
            _check_time(f"Row {line['seq']} ({kind}): {name}", text)
        row = Row(
            **{name: line[name] for name in PLAIN},
            facts_salt=line["facts_salt"],
            content_salt=line.get("content_salt"),
            run_id=UUID(line["run"]),
            payload={},
            created_at=datetime.fromisoformat(line["created_at"]),
            consumes=UUID(line["consumes"]) if line["consumes"] else None,
        )
        if (wrong := self.history.add(row, parts)) is not None:
            raise RunStateError(str(wrong))
        row = row._replace(payload=payload)
        check_columns(_message(self.session.pk, row, parts))
        for stored in payloads.files(row.run_id, row.seq, row.payload):
            # A copied row points at the file of its origin's session.
            payloads.check_name(stored, None if events.COPIED in row.payload else self.session.pk)
        self.rows.append(row)
        self.parts.append(parts)

    def files(self) -> Iterator[tuple[Stored, Iterator[bytes]]]:
        """Yield each file that a row names, with the parts of it that the export has."""

        def read_back(part: tuple[int, int]) -> bytes:
            self._files.seek(part[0])
            return self._files.read(part[1])

        for row in self.rows:
            for stored in payloads.files(row.run_id, row.seq, row.payload):
                yield stored, map(read_back, self._parts.get((row.seq, stored.name), []))


def _store(alias: str, export: _Export, runs: list[Run], tried: list[datetime]) -> Run:
    session = export.session
    if Session.objects.using(alias).filter(pk=session.pk, created_at__in=tried).exists():
        return Run.objects.using(alias).get(pk=export.run_id)  # only the commit's acknowledgement was lost
    _refuse_known(alias, export)
    session.owner_name, session.title = runs[0].owner_name, runs[0].title
    Session.objects.using(alias).bulk_create([session], ignore_conflicts=True)
    tried.append(session.created_at)
    if not Session.objects.using(alias).filter(pk=session.pk, created_at=session.created_at).exists():
        raise RunStateError(_THERE % (session.pk, session.key))
    definitions = [Definition(hash=key, body=body) for key, body in export.definitions.items()]
    Definition.objects.using(alias).bulk_create(definitions, ignore_conflicts=True)
    Run.objects.using(alias).bulk_create(runs)
    values = (value for run in runs for value in ContextValue.of(run, export.definitions[run.definition_id]))
    ContextValue.objects.using(alias).bulk_create(values)
    rows = (_message(session.pk, *pair) for pair in zip(export.rows, export.parts, strict=True))
    Message.objects.using(alias).bulk_create(rows, batch_size=CHUNK)
    calls = [(run_id, call) for run_id, its in export.history.calls.items() for call in its.values()]
    cards = [new_approval(call, call.approval, run_id) for run_id, call in calls if call.approval is not None]
    Approval.objects.using(alias).bulk_create(cards, batch_size=CHUNK)
    for wrong in check(session.pk, alias, files=False):
        is_wait = wrong.kind == events.EVENT_AWAITED and wrong.seq is None  # nothing waits in a record
        # Scope and owner may differ from the journal's.
        if not (is_wait or wrong.column in ("scope", "owner_id")):
            raise RunStateError(f"{wrong} Nothing was imported.")
    for run in Run.objects.using(alias).unfinished().filter(session_id=session.pk):
        write(run.pk, _close, takes_lease=True)
    # This database has other users. Done after the closing, which writes decisions of its own.
    name = Trim(Concat(Left("decided_by_name", NAME_LENGTH - len(MARK)), Value(MARK)))
    decided = Approval.objects.using(alias).filter(run__session_id=session.pk, decided_at__isnull=False)
    decided.update(decided_by=None, decided_by_name=name)
    Session.objects.using(alias).filter(pk=session.pk).update(imported_at=Now())
    return Run.objects.using(alias).get(pk=export.run_id)


def _message(session_id: UUID, row: Row, parts: Parts) -> Message:
    columns = {name: value for name, value in row._asdict().items() if name != "payload"}
    facts, content = (text and canonical.loads(text) for text in parts)
    return Message(session_id=session_id, facts=facts, content=content, **columns)


def _close(run: Run, batch: Batch) -> None:
    """Cancel an imported, unfinished run; its open calls become unknown, as the origin may continue them."""
    batch.quiet = True
    for call in batch.state.run.open_calls():
        in_doubt.unknown(batch, call, ACTOR)
    reason = f"imported, {run.get_status_display()} then: it may go on in the database it came from"
    batch.add(events.RUN_CANCELLED, events.RunCancelled(actor=events.actor_ref(ACTOR), reason=reason))


def _refuse_known(alias: str, export: _Export) -> None:
    """Raise RunStateError if this database has the session, a run, an approval or an idempotency key.

    Also raises it for a session or a key that was pruned here. Keys are compared with runs without an owner.
    """
    session = export.session
    if Tombstone.objects.using(alias).filter(pk=session.pk).exists():
        raise RunStateError(f"Session {session.pk} was pruned here; nothing was imported.")
    same = Q(pk=session.pk) | Q(scope=session.scope, key=session.key)
    if Session.objects.using(alias).filter(same).exists():
        raise RunStateError(_THERE % (session.pk, session.key))
    started = [row.payload for row in export.rows if row.kind == events.RUN_STARTED]
    kept = [payload for payload in started if events.COPIED not in payload]
    keys = {payload.get("idempotency_key", payload.get("key_hash", "")) for payload in kept} - {""}
    for key in keys:
        refuse_pruned(key, pruned_keys(alias, key, None, session.scope))
    runs = Run.objects.using(alias).filter(owner=None, scope=session.scope)
    taken = runs.filter(idempotency_key__in={*chain.from_iterable(map(names_of, keys))}).first()
    if taken is not None:
        raise RunStateError(
            f"Idempotency key {taken.idempotency_key!r} stands for run {taken.pk} here; nothing was imported."
        )
    for model, ids in ((Run, {*export.history.states}), (Approval, export.history.approvals)):
        if (known := model.objects.using(alias).filter(pk__in=ids).first()) is not None:
            raise RunStateError(f"{model.__name__} {known.pk} is here already; nothing was imported.")


def _runs(export: _Export) -> Iterator[Run]:
    states, session = export.history.states, export.session
    whose = None
    for run_id, state in states.items():
        mine = [row for row in export.rows if row.run_id == run_id]
        if state.started_at is None:
            raise ValueError(f"run {run_id} has no first row")
        whose = state.given()["owner_name"] if whose is None else whose  # of the session's first run
        task = task_of([export.history.tasks[run_id]])
        columns = {**state.columns(), **state.given(session.scope), "owner_name": whose}
        if columns["status"] not in Run.Status.values:  # it is active
            columns["status"] = Run.Status.QUEUED
        times = {"created_at": mine[0].created_at, "updated_at": mine[-1].created_at}
        yield Run(id=run_id, session_id=session.pk, input=task, title=title_of(task), **times, **columns)
