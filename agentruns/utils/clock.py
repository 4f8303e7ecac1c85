"""The journal's clock: the time of its database, known without a query each time.

Stored times come from this clock and are compared with it, never with the clock of the reading machine: with
a slow or fast clock a call would be reconciled, or a run ended, before its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connections

from agentruns.utils.db import close_stale, database_now, uptime

REFRESH = 60.0  # seconds that a reading is good for: the clocks of two machines drift apart
PRECISION = 1.0  # seconds that a reading may have taken; it is off by half of them at most


@dataclass(frozen=True, slots=True)
class Reading:
    """A time of a database, and the `uptime` before and after the query for that time."""

    moment: datetime
    sent: float
    received: float

    def now(self) -> datetime:
        """Compute the database's present time from this reading."""
        return self.moment + timedelta(seconds=uptime() - (self.sent + self.received) / 2)


_readings: dict[str, Reading] = {}


def now(alias: str | None) -> datetime:
    """Find the present time by the clock of a PostgreSQL database; otherwise by the clock of this machine.

    `alias` is None for a stateless run. Queries the database only if its last known time is over a minute
    old. If the query fails, computes the time from the last known one; without one, raises the error.
    """
    if alias is None or connections[alias].vendor != "postgresql":
        return datetime.now(UTC)
    known = _readings.get(alias)
    if known is not None and uptime() - known.received <= REFRESH:
        return known.now()
    for _ in range(3):
        sent = uptime()
        try:
            reading = Reading(database_now(alias), sent, uptime())
        except Exception:  # user code broke the connection, or the server ended it
            close_stale(alias)  # so that a new try has a new connection
            if known is None:
                raise
            return known.now()  # better a little off than a reply lost because it cannot be timed
        if reading.received - sent <= PRECISION:
            break
    _readings[alias] = reading
    return reading.now()


def told(alias: str, moment: datetime, sent: float) -> None:
    """Remember the time that a database returned for a statement that was sent at `sent` (`uptime`).

    Ignores the time if the answer took over a second, or took longer than a known time that is fresh.
    """
    # If the answer took long, or this process was stopped meanwhile, the time is too inexact.
    reading, known = Reading(moment.astimezone(UTC), sent, uptime()), _readings.get(alias)
    took = reading.received - sent
    if took > PRECISION:
        return
    if known is None or took <= known.received - known.sent or sent - known.received > REFRESH / 2:
        _readings[alias] = reading


def utc(moment: datetime) -> str:
    """Format a time as ISO 8601 in UTC with six digits, as the journal hashes it."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
