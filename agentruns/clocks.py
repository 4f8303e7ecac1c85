"""What time it is: by the database, on which processes agree; by this machine, for how long it took."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import DateTimeField, ExpressionWrapper, Value
from django.db.models.functions import Now
from django.db.models.sql import Query


def uptime() -> float:
    """Return seconds on a clock that counts suspend, so that a laptop's sleep ages a lease."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def later(seconds: float) -> ExpressionWrapper[Any]:
    """Return the database's clock plus `seconds`."""
    return ExpressionWrapper(Now() + Value(timedelta(seconds=seconds)), output_field=DateTimeField())


def database_now(alias: str) -> datetime:
    """Return what time it is by the database's clock."""
    query = Query(None)  # a question to no table
    query.add_annotation(Now(), "now")
    row = next(iter(query.get_compiler(using=alias).results_iter()))
    now: datetime = row[0]
    return now


def readable(moment: datetime) -> str:
    """Return a time as a text has it: in UTC, to the second."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
