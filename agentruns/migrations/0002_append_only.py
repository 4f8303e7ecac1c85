from typing import Any

from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from agentruns.models import triggers


def drop_unused(apps: Any, schema_editor: Any) -> None:
    """Drop an index that would cost each append a write: nobody looks for a digest by its beginning.

    PostgreSQL makes two on a foreign key that is a text, the second for LIKE.
    """
    if schema_editor.connection.vendor != "postgresql":
        return
    table = apps.get_model("agentruns", "Run")._meta.db_table
    with schema_editor.connection.cursor() as cursor:
        found = schema_editor.connection.introspection.get_constraints(cursor, table)
    for name, index in found.items():
        if index["columns"] == ["definition_id"] and name.endswith("_like"):
            schema_editor.execute(f"DROP INDEX {schema_editor.quote_name(name)}")


def install(apps: object, schema_editor: BaseDatabaseSchemaEditor) -> None:
    triggers.install(schema_editor.connection)


def remove(apps: object, schema_editor: BaseDatabaseSchemaEditor) -> None:
    triggers.remove(schema_editor.connection)


class Migration(migrations.Migration):
    """Triggers by which the database itself refuses to change the journal."""

    dependencies = [("agentruns", "0001_initial")]

    operations = [
        migrations.RunPython(drop_unused, migrations.RunPython.noop),
        migrations.RunPython(install, remove),
    ]
