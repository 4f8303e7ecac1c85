"""The app's start-up: load the system checks and the agents of every installed app, install the triggers."""

from typing import Any
from uuid import UUID

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
        from agentruns.models.event import child_ended
        from agentruns.models.triggers import install_on_migrate

        post_migrate.connect(install_on_migrate, sender=self)
        child_ended.connect(_settle_call)
        autodiscover()


def _settle_call(run_id: UUID, **about: Any) -> None:
    """Give the parent of a child run that has ended its result."""
    from agentruns.services.runs.family import child_ended

    child_ended(run_id)
