from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "tests.hosts.accounts"
    default_auto_field = "django.db.models.BigAutoField"
