import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

import agentruns.ids
import agentruns.models.fields


class Migration(migrations.Migration):
    dependencies = [
        ("agentruns", "0005_origin"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="ApiToken",
            fields=[
                (
                    "id",
                    models.UUIDField(
                        default=agentruns.ids.uuid7, editable=False, primary_key=True, serialize=False
                    ),
                ),
                ("prefix", models.CharField(max_length=16, unique=True, verbose_name="prefix")),
                ("digest", models.CharField(max_length=64, verbose_name="digest")),
                ("name", models.CharField(default="", max_length=100, verbose_name="name")),
                ("scopes", agentruns.models.fields.CanonicalField(default=list, verbose_name="scopes")),
                ("created_at", models.DateTimeField(auto_now_add=True, verbose_name="created at")),
                ("expires_at", models.DateTimeField(null=True, verbose_name="expires at")),
                ("last_used_at", models.DateTimeField(null=True, verbose_name="last used at")),
                ("revoked_at", models.DateTimeField(null=True, verbose_name="revoked at")),
                (
                    "owner",
                    models.ForeignKey(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="agentruns_tokens",
                        to=settings.AUTH_USER_MODEL,
                        verbose_name="owner",
                    ),
                ),
            ],
            options={
                "verbose_name": "API token",
                "verbose_name_plural": "API tokens",
                "permissions": [("revoke_api_token", "Can revoke API tokens")],
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="IdempotencyRecord",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("key", models.CharField(max_length=200, verbose_name="idempotency key")),
                ("fingerprint", models.CharField(max_length=64, verbose_name="fingerprint of the request")),
                ("status", models.PositiveIntegerField(default=0, verbose_name="status")),
                ("body", agentruns.models.fields.EscapedTextField(default="", verbose_name="answer")),
                (
                    "created_at",
                    models.DateTimeField(auto_now_add=True, db_index=True, verbose_name="created at"),
                ),
                (
                    "owner",
                    models.ForeignKey(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="agentruns_idempotency_records",
                        to=settings.AUTH_USER_MODEL,
                        verbose_name="owner",
                    ),
                ),
            ],
            options={
                "verbose_name": "idempotency record",
                "verbose_name_plural": "idempotency records",
                "default_permissions": ("view",),
                "constraints": [
                    models.UniqueConstraint(fields=("owner", "key"), name="agentruns_answer_key")
                ],
            },
        ),
    ]
