import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("agentruns", "0004_notification"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="run",
            options={
                "default_permissions": ("view",),
                "permissions": [
                    ("resume_run", "Can resume runs"),
                    ("cancel_run", "Can cancel runs"),
                    ("pause_run", "Can pause runs"),
                    ("fork_run", "Can run again and fork runs"),
                    ("replay_run", "Can ask a model what it would have done"),
                    ("adopt_definition", "Can let runs go on under another definition"),
                    ("resolve_orphan", "Can give the verdict on a call in doubt"),
                ],
                "verbose_name": "run",
                "verbose_name_plural": "runs",
            },
        ),
        migrations.AddField(
            model_name="run",
            name="origin",
            field=models.ForeignKey(
                db_constraint=False,
                db_index=False,
                null=True,
                on_delete=django.db.models.deletion.DO_NOTHING,
                related_name="derived",
                to="agentruns.run",
                verbose_name="origin",
            ),
        ),
        migrations.AddField(
            model_name="run",
            name="origin_seq",
            field=models.BigIntegerField(null=True, verbose_name="forked at row"),
        ),
        migrations.AddIndex(
            model_name="run",
            index=models.Index(
                condition=models.Q(("origin__isnull", False)), fields=["origin"], name="agentruns_run_derived"
            ),
        ),
    ]
