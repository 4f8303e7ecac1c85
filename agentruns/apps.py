"""The app's start-up: load the system checks and the agents of every installed app, install the triggers."""

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _


class AgentRunsConfig(AppConfig):
    name = "agentruns"
    label = "agentruns"
    verbose_name = _("Agent runs")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from agentruns import checks  # noqa: F401 - the import registers the checks
        from agentruns.agents.agent import autodiscover
        from agentruns.models.triggers import install_on_migrate

        post_migrate.connect(install_on_migrate, sender=self)
        autodiscover()
