"""Cursor pagination, newest first: a row that changes meanwhile moves to the front, and is not seen twice."""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from django.core import signing
from django.db import connections
from django.db.models import CharField, Model, Q, QuerySet, Value
from django.db.models.functions import Cast

from agentruns.api.errors import Problem

PAGE, SALT = 50, "agentruns.cursor"

M = TypeVar("M", bound=Model)


def page(rows: QuerySet[M], moment: str, cursor: str | None) -> tuple[list[M], str | None]:
    """Return the rows after `cursor`, newest `moment` first, and the cursor of the next page or None."""
    # SQLite compares times as text, and '12:00:00.5' is not '12:00:00.500000': use the stored text.
    as_text = connections[rows.db].vendor == "sqlite"
    if cursor is not None:
        try:
            at, pk = signing.loads(cursor, salt=SALT)
        except (signing.BadSignature, ValueError):
            detail = "Pass `next` of the page before, unchanged, as `cursor`."
            raise Problem.named("bad-cursor", detail) from None
        bound: Any = Value(at, output_field=CharField()) if as_text else datetime.fromisoformat(at)
        before = Q(**{f"{moment}__lt": bound}) | Q(pk__lt=UUID(pk))
        rows = rows.filter(before, **{f"{moment}__lte": bound})  # only the latter can use an index
    rows = rows.order_by(f"-{moment}", "-pk")
    placed: Any = rows.annotate(position=Cast(moment, CharField())) if as_text else rows
    found = list(placed[: PAGE + 1])
    if len(found) <= PAGE:
        return found, None
    last = found[PAGE - 1]
    at = last.position if as_text else getattr(last, moment).isoformat()
    return found[:PAGE], signing.dumps([at, str(last.pk)], salt=SALT)
