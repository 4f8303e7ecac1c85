from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class Control(models.Model):
    """One row per sweeper: when it was last seen, by the database clock."""

    name = models.CharField(_("name"), max_length=100, primary_key=True)
    seen_at = models.DateTimeField(_("seen at"))

    class Meta:
        verbose_name = _("control")
        verbose_name_plural = _("controls")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.name
