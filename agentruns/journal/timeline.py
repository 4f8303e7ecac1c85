"""The timeline of a PostgreSQL server, which changes when a replica that may lack rows is promoted.

A row of Control notes the timeline. On a promoted server the row still names the old timeline, and no run can
be claimed there until a sweep has decided which rows may be lost.
"""

from __future__ import annotations

from typing import NamedTuple

from django.db import DatabaseError, InterfaceError, ProgrammingError, connections
from django.db.models import Func, QuerySet, TextField

from agentruns.models import Control
from agentruns.utils.db import always_rollback, close_stale, delete_rows

CURRENT = "substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8)"
# Commits wait for a replica: nothing that was acknowledged is missing on the one that is promoted.
WAITS = (
    "CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit')"
    " IN ('on', 'remote_apply') THEN 'synchronous' ELSE 'asynchronous' END"
)
positions: dict[str, int] = {}  # alias -> the highest log position seen, on its server's timeline


class Server(NamedTuple):
    """A server's present timeline and replication, and those that its Control row notes (`known`, `was`).

    `position` is the length of its log in bytes.
    """

    timeline: str
    replication: str
    position: int
    known: str | None
    was: str | None


def moved(alias: str) -> QuerySet[Control]:
    """Select the Control row with PostgreSQL's timeline if the server has another timeline now."""
    noted = Control.objects.using(alias).filter(name=Control.SERVER)
    if connections[alias].vendor != "postgresql":
        return noted.none()
    return noted.exclude(reason=Func(template=CURRENT, output_field=TextField()))


def server(alias: str) -> Server | None:
    """Query the server's timeline, replication and log position; None without PostgreSQL or if this fails.

    Deletes the Control row of the timeline if the database user has no right to call these functions.
    """
    if connections[alias].vendor != "postgresql":
        return None
    noted = f"FROM \"{Control._meta.db_table}\" WHERE name = '{Control.SERVER}'"
    try:
        with always_rollback(), connections[alias].cursor() as cursor:
            # The flushed part of the log survives a crash of the server, the inserted part may not.
            position = "(pg_current_wal_flush_lsn() - '0/0')::bigint"
            columns = f"{CURRENT}, {WAITS}, {position}, (SELECT reason {noted}), (SELECT actor {noted})"
            cursor.execute(f"SELECT {columns}")
            return Server(*cursor.fetchone())
    except ProgrammingError:  # no right to call these functions: without the note, no claim calls them
        delete_rows(Control.objects.using(alias).filter(name=Control.SERVER))
    except (DatabaseError, InterfaceError):  # such as a standby's
        close_stale(alias)
    return None
