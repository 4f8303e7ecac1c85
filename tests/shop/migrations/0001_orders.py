from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    operations = [
        migrations.CreateModel(
            name="Order",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("number", models.CharField(max_length=20, unique=True)),
                ("customer", models.CharField(max_length=100)),
                ("total_cents", models.PositiveIntegerField()),
                ("refunded_cents", models.PositiveIntegerField(default=0)),
                ("note", models.TextField(blank=True)),
            ],
        ),
    ]
