from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from agentruns.models.querysets import ControlQuerySet


class Control(models.Model):
    """A timestamp by the database clock: each sweeper's last pass, and the last request to drain."""

    DRAINING = "draining"

    name = models.CharField(_("name"), max_length=100, primary_key=True)
    seen_at = models.DateTimeField(_("seen at"))

    objects = ControlQuerySet.as_manager()

    class Meta:
        verbose_name = _("control")
        verbose_name_plural = _("controls")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name
