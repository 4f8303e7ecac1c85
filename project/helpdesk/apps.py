from django.apps import AppConfig


class HelpdeskConfig(AppConfig):
    name = "project.helpdesk"
    default_auto_field = "django.db.models.BigAutoField"
