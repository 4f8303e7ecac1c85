"""Deploys: a time stamp by the database clock. What was started before it claims nothing any more.

A process started after it ignores it, so that nothing has to be undone when the new code is up.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from uuid import UUID

from django.db import DatabaseError, InterfaceError
from django.db.models import Exists
from django.db.models.functions import Now

from agentruns.clocks import database_now, uptime
from agentruns.models import Control, Run
from agentruns.retries import in_transaction

LOADED = uptime()  # when this process, or the one it was forked from, loaded its code
EVERY = 5.0  # seconds between two looks while a run is driven

_started: dict[str, datetime] = {}


def started_at(alias: str) -> datetime:
    """Return when this process loaded its code, by the clock of a database."""
    if alias not in _started:
        _started[alias] = database_now(alias) - timedelta(seconds=uptime() - LOADED)
    return _started[alias]


def drain(alias: str) -> None:
    """Let every process that is running now claim nothing any more, and stop at its next boundary."""
    in_transaction(alias, lambda: Control.objects.using(alias).stamp(Control.DRAINING))


def driven(alias: str) -> dict[UUID, int]:
    """Return the runs that some process drives now, with the epoch of each lease."""
    live = Run.objects.using(alias).filter(status=Run.Status.RUNNING, lease_expires_at__gt=Now())
    return dict(live.values_list("pk", "lease_epoch"))


def asked(alias: str) -> Exists:
    """Return the condition that this process was asked to claim nothing any more."""
    stamp = Control.objects.using(alias).filter(name=Control.DRAINING, seen_at__gte=started_at(alias))
    return Exists(stamp)


def is_asked(alias: str) -> bool:
    """Whether this process was asked to claim nothing any more."""
    stamps = Control.objects.using(alias).filter(name=Control.DRAINING).values_list("seen_at", flat=True)
    return any(stamp >= started_at(alias) for stamp in stamps)


class Look:
    """Callable, for one drive: whether it was asked to stop, looked up now and then."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.found = False
        self.looked = uptime()  # as it was claimed, which is refused to a process that was asked

    def __call__(self) -> bool:
        if not self.found and uptime() - self.looked >= EVERY:
            self.looked = uptime()
            with suppress(DatabaseError, InterfaceError):  # the drive itself deals with that
                self.found = is_asked(self.alias)
        return self.found
