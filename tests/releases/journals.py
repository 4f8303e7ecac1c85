"""Recorded journals, put back into the tables: as an older release left them, or as a newer one might."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.read import Parts
from agentruns.models import Approval, Definition, Message, Run, Session
from agentruns.utils import json as canonical
from tests.releases.record import RECORDED
from tests.rows import sealed, stored

RELEASES = sorted(path.name for path in RECORDED.iterdir())  # each named by the commit that wrote it
HOSTILE = "<script>alert(1)</script>"

Line = dict[str, Any]


def lines_of(name: str) -> list[Line]:
    """Return the export of a recorded run, such as "<commit>/orphaned"."""
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def restored(name: str, *, newer: bool = False) -> Run:
    """Store a recorded run as a database has it that was migrated since; `newer` adds what `_newer` says."""
    release, _, shape = name.partition("/")
    tables = [json.loads(line) for line in (RECORDED / release / "tables.jsonl").read_text().splitlines()]
    (tables_of,) = [table for table in tables if table["name"] == shape]
    first, *lines = lines_of(name)
    for line in lines:
        if "definition" in line:
            Definition.objects.create(hash=line["definition"], body=canonical.loads(line["body"]))
    session = Session(**tables_of["session"])
    rows = [_row(line) for line in lines if "seq" in line]
    if newer:
        rows = list(_chained(session.pk, _newer([row for row, _parts in rows])))
        session.next_seq, session.head = rows[-1][0].seq + 1, rows[-1][0].hash
    session.save(force_insert=True)
    Run.objects.bulk_create([Run(**columns) for columns in tables_of["runs"]])
    Message.objects.bulk_create([stored(session.pk, *pair) for pair in rows])
    Approval.objects.bulk_create([Approval(**columns) for columns in tables_of["approvals"]])
    return Run.objects.get(pk=first["run"])


def _row(line: Line) -> tuple[Row, Parts]:
    values = {name: line.get(name) for name in Row._fields} | {"run_id": UUID(line["run"])}
    values["created_at"] = datetime.fromisoformat(line["created_at"])
    values["consumes"] = UUID(line["consumes"]) if line["consumes"] else None
    parts = Parts(line["facts"], line.get("content"))
    return Row(**{**values, "payload": parts.payload(line["kind"])}), parts


def _newer(rows: list[Row]) -> Iterator[Row]:
    """Add what this release does not know: kinds, fields, an outcome, a verb and a verdict."""
    for row in rows:
        yield row._replace(payload={**row.payload, **_changed(row), "v": 2, "newer": {"deep": [HOSTILE]}})
        said = row._replace(payload={"v": 9, "said": [HOSTILE, None]}, consumes=None)
        yield said._replace(kind="weather_seen")
        if row.kind == events.APPROVAL_REQUESTED:
            payload = {"v": 2, "verb": "abstain", "digest": row.payload["digest"], "actor": None}
            yield said._replace(kind=events.APPROVAL_DECIDED, epoch=0, payload=payload)
        elif row.kind == events.ORPHAN_FOUND:
            payload = {"v": 2, "verdict": "probably", "evidence": HOSTILE, "actor": None}
            yield said._replace(kind=events.ORPHAN_RESOLVED, epoch=0, payload=payload)


def _changed(row: Row) -> Line:
    return {"outcome": "declined"} if row.payload.get("outcome") == "denied" else {}


def _chained(session_id: UUID, rows: Iterator[Row]) -> Iterator[tuple[Row, Parts]]:
    """Number the rows anew, and what a reply says of the rows it had read with them."""
    head, moved = canonical.GENESIS, {0: 0}
    for seq, row in enumerate(rows, start=1):
        moved.setdefault(row.seq, seq)
        read = {"read": moved[row.payload["read"]]} if "read" in row.payload else {}
        payload = {**row.payload, **read}
        chained, parts = sealed(session_id, row._replace(seq=seq, prev_hash=head, payload=payload))
        head = chained.hash
        yield chained, parts
