"""A run of another database, read back from its export: the same rows, the same hashes."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from datetime import datetime
from tempfile import TemporaryFile
from typing import IO, Any
from uuid import UUID

from agentruns import canonical, payloads
from agentruns.conf import settings
from agentruns.control import hold_run
from agentruns.exceptions import RunStateError
from agentruns.exports import FORMAT, VERSION
from agentruns.journal import events
from agentruns.journal.calls import Call, Card
from agentruns.journal.copies import task_of
from agentruns.journal.events import Row
from agentruns.journal.fold import RunState
from agentruns.journal.verify import History, check
from agentruns.models import Approval, Definition, Message, Run, Session, Tombstone
from agentruns.payloads import Stored
from agentruns.retries import in_transaction
from agentruns.starting import refuse_pruned

CHUNK = 500
ACTOR = "import_run"
HELD = "imported: it may be at work in the database it came from"


def import_run(lines: Iterable[dict[str, Any]]) -> Run:
    """Store a session and its runs from the lines of an export with true values; return the exported run.

    Nothing is stored unless the whole chain is intact. Runs belong to nobody here, and one that has not
    ended is paused: it may go on where it came from. Raises RunStateError and PayloadError, which say what is
    wrong and where.
    """
    with TemporaryFile() as files:
        found = _Export(lines, files)
        for stored, parts in found.files():
            payloads.restore(stored, parts)
    runs, tried = list(_runs(found)), list[datetime]()
    return in_transaction(settings.DATABASE, lambda: _store(settings.DATABASE, found, runs, tried))


class _Export:
    """An export as read: checked row by row, folded run by run."""

    def __init__(self, lines: Iterable[dict[str, Any]], files: IO[bytes]) -> None:
        self.rows: list[Row] = []
        self._files = files  # one for all: a process may not have many open
        self._parts: dict[int, list[tuple[int, int]]] = {}  # by row: where they begin, how long they are
        self.definitions: dict[str, Any] = {}
        try:
            self._read(iter(lines))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            where = f"after row {len(self.rows)}"
            raise RunStateError(f"This is no export of a run: {error!r} {where}.") from error

    def _read(self, lines: Iterator[dict[str, Any]]) -> None:
        first = next(lines, {})
        if (first.get("format"), first.get("version")) != (FORMAT, VERSION):
            raise RunStateError(f"This is no export of version {VERSION}: make one with export_run.")
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
        missing = {state.definition for state in self.history.states.values()} - {*self.definitions}
        if missing:
            raise RunStateError(f"The export lacks the definitions {', '.join(sorted(missing))}.")

    def _define(self, line: dict[str, Any]) -> None:
        body = canonical.loads(line["body"])
        if canonical.digest(body) != line["definition"]:
            raise RunStateError(f"Definition {line['definition']} was altered.")
        self.definitions[line["definition"]] = body

    def _keep(self, line: dict[str, Any]) -> None:
        if "data" not in line:
            raise RunStateError(f"The file of row {line['of']} is left out: {line['left_out']}")
        place = self._files.tell()
        length = self._files.write(base64.b64decode(line["data"], validate=True))
        self._parts.setdefault(line["of"], []).append((place, length))

    def files(self) -> Iterator[tuple[Stored, Iterator[bytes]]]:
        """Yield each file that a row points at, with its parts as far as they are there."""
        for row in self.rows:
            stored = payloads.of(row.run_id, row.seq, row.payload)
            if stored is not None:
                yield stored, self._read_back(self._parts.get(row.seq, []))

    def _read_back(self, parts: list[tuple[int, int]]) -> Iterator[bytes]:
        for place, length in parts:
            self._files.seek(place)
            yield self._files.read(length)

    def _add(self, line: dict[str, Any]) -> None:
        consumes = line["consumes"]
        row = Row(
            seq=line["seq"],
            run_id=UUID(line["run"]),
            kind=line["kind"],
            call_id=line["call_id"],
            tool_name=line["tool_name"],
            attempt=line["attempt"],
            epoch=line["epoch"],
            payload={},
            created_at=datetime.fromisoformat(line["created_at"]),
            prev_hash=line["prev_hash"],
            hash=line["hash"],
            consumes=UUID(consumes) if consumes else None,
        )
        wrong = self.history.add(row, line["payload"])
        if wrong is not None:
            raise RunStateError(str(wrong))
        self.rows.append(row._replace(payload=canonical.loads(line["payload"])))


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
    # After the INSERT, which sets them to now.
    for run_id, (first, last) in _times(found).items():
        Run.objects.using(alias).filter(pk=run_id).update(created_at=first, updated_at=last)
    Message.objects.using(alias).bulk_create(
        (Message(session_id=session.pk, **row._asdict()) for row in found.rows), batch_size=CHUNK
    )
    Approval.objects.using(alias).bulk_create(_approvals(found), batch_size=CHUNK)
    for wrong in check(session.pk, alias, files=False):
        raise RunStateError(f"{wrong} Nothing was imported.")
    for run in Run.objects.using(alias).unfinished().filter(session_id=session.pk):
        if not found.history.states[run.pk].paused:
            hold_run(run.pk, ACTOR, reason=HELD)
    return Run.objects.using(alias).get(pk=found.run_id)


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
        origin = started.payload.get("origin") or {}
        if owner is None:  # a session belongs to who began it, whoever runs its tasks again
            owner = (started.payload.get("actor") or {}).get("name", "")
        # A task is asked for right after its run's first row, or was before a fork's.
        asked = (row for row in found.rows if row.seq <= started.seq + 1)
        yield Run(
            id=run_id,
            session_id=found.session.pk,
            owner_name=owner,
            agent=state.agent,
            idempotency_key=started.payload["idempotency_key"],
            input=task_of(asked),
            origin_id=UUID(origin["run"]) if origin else None,
            origin_seq=origin.get("seq"),
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
    requested = {
        (row.run_id, row.call_id): row
        for row in found.rows
        if row.kind == events.APPROVAL_REQUESTED and events.COPIED not in row.payload
    }
    for (run_id, call_id), row in requested.items():
        call = found.history.calls[run_id][call_id]
        if call.card is not None:
            yield _approval(run_id, call, call.card, row)


def _approval(run_id: UUID, call: Call, card: Card, row: Row) -> Approval:
    decided = card.status != "pending"
    actor = card.actor or {}
    return Approval(
        id=card.id,
        run_id=run_id,
        call_id=call.id,
        tool_name=call.tool,
        arguments=call.arguments,
        digest=card.digest,
        title=card.title,
        why=row.payload["why"],
        risk=card.risk,
        status=card.status,
        approvers=card.approvers,
        required=card.required,
        approved_count=len(card.given),
        requested_at=row.created_at,
        expires_at=card.expires_at,
        decided_at=card.decided_at if decided else None,
        decided_by_name=actor.get("name", "") if decided else "",
        reason=card.reason if decided else "",
    )
