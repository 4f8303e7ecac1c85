from typing import Any

from django.conf import settings
from django.db import migrations, models
from django.db.models import Case, F, Q, When

from agentruns.models.indexes import PrefixIndex
from agentruns.querysets import Constant


def drop_unused(apps: Any, schema_editor: Any) -> None:
    """Pay for the index that each append writes more: nobody looks for a digest by its beginning.

    PostgreSQL has two on a foreign key that is a text, the second for LIKE.
    """
    if schema_editor.connection.vendor != "postgresql":
        return
    table = apps.get_model("agentruns", "Run")._meta.db_table
    with schema_editor.connection.cursor() as cursor:
        found = schema_editor.connection.introspection.get_constraints(cursor, table)
    for name, index in found.items():
        if index["columns"] == ["definition_id"] and name.endswith("_like"):
            schema_editor.execute(f"DROP INDEX {schema_editor.quote_name(name)}")


class Migration(migrations.Migration):
    """What the lists, their filters and the search are read by, however many runs there are."""

    dependencies = [
        ("agentruns", "0007_pruned_keys"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AddIndex(
            model_name="approval",
            index=models.Index(
                Case(
                    When(risk=Constant("high"), then=Constant(0)),
                    When(risk=Constant("normal"), then=Constant(1)),
                    default=Constant(2),
                    output_field=models.IntegerField(),
                ),
                F("expires_at"),
                F("requested_at"),
                F("id"),
                condition=Q(status="pending"),
                name="agentruns_queue",
            ),
        ),
        migrations.AddIndex(
            model_name="approval",
            index=models.Index(
                fields=["requested_at", "id"], condition=Q(status="pending"), name="agentruns_longest_waiting"
            ),
        ),
        migrations.AddIndex(
            model_name="approval",
            index=models.Index(fields=["-requested_at", "-id"], name="agentruns_approval_newest"),
        ),
        migrations.AddIndex(
            model_name="run",
            index=models.Index(fields=["agent", "-updated_at", "-id"], name="agentruns_run_agent"),
        ),
        migrations.AddIndex(
            model_name="session", index=PrefixIndex(fields=["key"], name="agentruns_key_begins")
        ),
        migrations.AddIndex(
            model_name="session", index=PrefixIndex(fields=["owner_name"], name="agentruns_requester_begins")
        ),
        migrations.RunPython(drop_unused, migrations.RunPython.noop),
    ]
