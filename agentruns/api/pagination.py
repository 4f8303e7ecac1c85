"""Cursor pagination, newest first: a row that changes meanwhile moves to the front, and is not seen twice."""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import UUID

from django.db import connections
from django.db.models import CharField, Model, Q, QuerySet, Value
from django.db.models.functions import Cast

from agentruns.api.errors import Problem

PAGE = 50

M = TypeVar("M", bound=Model)

_TIME = re.compile(r"[0-9T:. +-]{10,32}")


def page(rows: QuerySet[M], moment: str, cursor: str | None) -> tuple[list[M], str | None]:
    """Return the rows after `cursor`, newest `moment` first, and the cursor of the next page or None."""
    # SQLite compares times as text, and '12:00:00.5' is not '12:00:00.500000': use the stored text.
    as_text = connections[rows.db].vendor == "sqlite"
    if cursor is not None:
        rows = rows.filter(_after(moment, *_decode(cursor), as_text=as_text))
    rows = rows.order_by(f"-{moment}", "-pk")
    placed: Any = rows.annotate(position=Cast(moment, CharField())) if as_text else rows
    found = list(placed[: PAGE + 1])
    if len(found) <= PAGE:
        return found, None
    last = found[PAGE - 1]
    at = last.position if as_text else getattr(last, moment).isoformat()
    return found[:PAGE], _encode(at, last.pk)


def _after(moment: str, at: str, pk: UUID, *, as_text: bool) -> Q:
    bound: Any = Value(at, output_field=CharField()) if as_text else _aware(at)
    # Only the first condition can use an index.
    return Q(**{f"{moment}__lte": bound}) & (Q(**{f"{moment}__lt": bound}) | Q(pk__lt=pk))


def _aware(at: str) -> datetime:
    moment = datetime.fromisoformat(at)
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def _encode(at: str, pk: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps([at, str(pk)]).encode()).decode().rstrip("=")


def _decode(cursor: str) -> tuple[str, UUID]:
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        at, pk = json.loads(text)
        if not _TIME.fullmatch(at):
            raise ValueError(at)
        _aware(at)
        return at, UUID(pk)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        detail = "Pass `next` of the page before, unchanged, as `cursor`."
        raise Problem.named("bad-cursor", detail) from None
