from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from agentruns.journal import triggers


def install(apps: object, schema_editor: BaseDatabaseSchemaEditor) -> None:
    triggers.install(schema_editor.connection)


def remove(apps: object, schema_editor: BaseDatabaseSchemaEditor) -> None:
    triggers.remove(schema_editor.connection)


class Migration(migrations.Migration):
    """The database itself refuses to change the journal."""

    dependencies = [("agentruns", "0001_initial")]

    operations = [migrations.RunPython(install, remove)]
