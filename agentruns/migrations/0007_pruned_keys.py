import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("agentruns", "0006_api"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="PrunedKey",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("key", models.CharField(max_length=200, verbose_name="idempotency key")),
                ("run_id", models.UUIDField(verbose_name="run")),
                (
                    "owner",
                    models.ForeignKey(
                        db_constraint=False,
                        db_index=False,
                        null=True,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="agentruns_pruned_keys",
                        to=settings.AUTH_USER_MODEL,
                        verbose_name="owner",
                    ),
                ),
                (
                    "tombstone",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="pruned_keys",
                        to="agentruns.tombstone",
                    ),
                ),
            ],
            options={
                "verbose_name": "pruned key",
                "verbose_name_plural": "pruned keys",
                "default_permissions": ("view",),
                "indexes": [models.Index(fields=["key", "owner"], name="agentruns_pruned_key")],
            },
        ),
    ]
