"""Very many rows, made by the database itself."""

from __future__ import annotations

from django.db import connection, models

SERIES = {
    "postgresql": "generate_series(1, {}) AS series(n)",
    "sqlite": "(WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < {})"
    " SELECT n FROM counted) AS series",
}
ID = {"postgresql": "lpad(to_hex({}), 32, '0')::uuid", "sqlite": "printf('%032x', {})"}


def multiply(model: type[models.Model], times: int, **columns: str) -> None:
    """Insert copies of the only row of a model, but for some columns, of which `n` is the number."""
    names = [field.column for field in model._meta.concrete_fields]
    values = [columns.get(name, f'"{name}"') for name in names]
    quoted = ", ".join(f'"{name}"' for name in names)
    table, key = model._meta.db_table, model._meta.pk.column
    series = SERIES[connection.vendor].format(times)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({quoted}) SELECT {', '.join(values)} "
            f"FROM (SELECT * FROM {table} ORDER BY {key} DESC LIMIT 1) AS model, {series}"
        )


def plan(query: str) -> str:
    """Ask the database for its plan of a query."""
    explain = "EXPLAIN QUERY PLAN " if connection.vendor == "sqlite" else "EXPLAIN "
    with connection.cursor() as cursor:
        cursor.execute(explain + query)
        return "\n".join(str(row[-1]) for row in cursor.fetchall())
