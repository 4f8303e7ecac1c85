"""The timeline of a PostgreSQL server: a promoted replica begins another one, without rows it never received.

A row of Control notes the timeline. On a promoted server the row still names the old one, and no run can be
claimed there until a sweep has decided what may be lost.
"""

from __future__ import annotations

from typing import NamedTuple

from django.db import DatabaseError, InterfaceError, ProgrammingError, connections
from django.db.models import Func, QuerySet, TextField

from agentruns.models import Control
from agentruns.utils.db import always_rollback, close_stale

CURRENT = "substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8)"
# Commits wait for a replica: nothing that was acknowledged is missing on the one that is promoted.
WAITS = (
    "CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit')"
    " IN ('on', 'remote_apply') THEN 'synchronous' ELSE 'asynchronous' END"
)


class Server(NamedTuple):
    """The server's timeline and kind of replication, as they are now and as they were noted.

    `position` is how far its log is, in bytes.
    """

    timeline: str
    replication: str
    position: int
    known: str | None
    was: str | None


def moved(alias: str) -> QuerySet[Control]:
    """Find the noted timeline if the server has another by now."""
    noted = Control.objects.using(alias).filter(name=Control.SERVER)
    if connections[alias].vendor != "postgresql":
        return noted.none()
    return noted.exclude(reason=Func(template=CURRENT, output_field=TextField()))


def server(alias: str) -> Server | None:
    """Ask a server for its timeline, and for the one that was noted; None if it has, or tells, none."""
    if connections[alias].vendor != "postgresql":
        return None
    noted = f"FROM \"{Control._meta.db_table}\" WHERE name = '{Control.SERVER}'"
    try:
        with always_rollback(), connections[alias].cursor() as cursor:
            # What is flushed a crash of the server takes back no more, unlike what is only inserted.
            position = "(pg_current_wal_flush_lsn() - '0/0')::bigint"
            cursor.execute(
                f"SELECT {CURRENT}, {WAITS}, {position}, (SELECT reason {noted}), (SELECT actor {noted})"
            )
            return Server(*cursor.fetchone())
    except ProgrammingError:  # these functions are refused, and so would be each claim that asks them
        Control.objects.using(alias).filter(name=Control.SERVER).delete()
    except (DatabaseError, InterfaceError):  # such as a standby's
        close_stale(alias)
    return None
