"""The names that occur in a column: as many looks into its index as there are names, however many rows."""

from __future__ import annotations

from django.db import connections
from django.db.models import Model

# DISTINCT would read each row. What is left by now is the name after the one found last.
_NAMES = """
WITH RECURSIVE names(name) AS (
    SELECT MIN({column}) FROM {table}
    UNION ALL
    SELECT (SELECT MIN({column}) FROM {table} WHERE {column} > names.name) FROM names WHERE name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL
"""


def names(alias: str, model: type[Model], column: str) -> list[str]:
    """Return the names that occur in a text column which an index begins with, in its order."""
    connection = connections[alias]
    quote = connection.ops.quote_name
    sql = _NAMES.format(table=quote(model._meta.db_table), column=quote(column))
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return [name for (name,) in cursor.fetchall()]
