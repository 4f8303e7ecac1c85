"""Pagination by cursor, newest first. A row that changes moves to the front, so no later page repeats it."""

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
    """Read a page after `cursor`, newest first by field `moment`; return it and the next cursor or None."""
    # Compare the stored text on SQLite, which compares times as texts: '12:00:00.5' is not '12:00:00.500000'.
    as_text = connections[rows.db].vendor == "sqlite"
    if cursor is not None:
        try:
            at, pk = signing.loads(cursor, salt=SALT)
        except (signing.BadSignature, ValueError):
            detail = "Pass `next` of the page before, unchanged, as `cursor`."
            raise Problem.named("bad-cursor", detail) from None
        bound: Any = Value(at, output_field=CharField()) if as_text else datetime.fromisoformat(at)
        before = Q(**{f"{moment}__lt": bound}) | Q(pk__lt=UUID(pk))
        rows = rows.filter(before, **{f"{moment}__lte": bound})  # only the __lte can use an index
    rows = rows.order_by(f"-{moment}", "-pk")
    placed: Any = rows.annotate(position=Cast(moment, CharField())) if as_text else rows
    page_rows = list(placed[: PAGE + 1])
    if len(page_rows) <= PAGE:
        return page_rows, None
    last = page_rows[PAGE - 1]
    at = last.position if as_text else getattr(last, moment).isoformat()
    return page_rows[:PAGE], signing.dumps([at, str(last.pk)], salt=SALT)
