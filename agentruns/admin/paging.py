"""The journal of a run, a page at a time by seq: no page is ever counted by offset."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django.db.models import QuerySet

from agentruns.journal.events import Row
from agentruns.journal.read import run_rows
from agentruns.models import Message

PAGE = 100
LARGEST = 2**63  # every seq is less: databases store no larger one


@dataclass(frozen=True, slots=True)
class Page:
    """Rows in order; `earlier` and `later` are the `after` of the pages beside this one, None if none."""

    rows: list[Row]
    earlier: int | None
    later: int | None
    latest: int | None


def page(alias: str, run_id: UUID, after: int | None, size: int = PAGE) -> Page:
    """Return the rows after a seq; without one, the latest page."""
    seqs = Message.objects.using(alias).filter(run_id=run_id)
    latest = _start(seqs, size)
    if after is None:
        after = latest
    rows = run_rows(alias, run_id, after, size + 1)
    more, rows = len(rows) > size, rows[:size]
    first = rows[0].seq if rows else after + 1
    has_earlier = after > 0 and seqs.filter(seq__lt=first).exists()
    return Page(
        rows,
        earlier=_start(seqs.filter(seq__lt=first), size) if has_earlier else None,
        later=rows[-1].seq if more else None,
        latest=latest if more else None,
    )


def last_seq(alias: str, run_id: UUID) -> int:
    """Return the seq of a run's last row, 0 if it has none."""
    rows = Message.objects.using(alias).filter(run_id=run_id)
    return rows.order_by("-seq").values_list("seq", flat=True).first() or 0


def seq_of(text: str) -> int | None:
    """Return the seq that a URL asks for; None where it asks for none, or for what is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _start(rows: QuerySet[Message], size: int) -> int:
    """Return the `after` of the last page of `rows`."""
    seqs = list(rows.order_by("-seq").values_list("seq", flat=True)[:size])
    return seqs[-1] - 1 if len(seqs) == size else 0
