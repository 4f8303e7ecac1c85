from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField, now


class Definition(models.Model):
    """An agent as a run was started with it: model, parameters, instructions, tool schemas and policies."""

    hash = models.CharField(_("hash"), max_length=64, primary_key=True)
    body = CanonicalField(_("body"))
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)

    class Meta:
        verbose_name = _("definition")
        verbose_name_plural = _("definitions")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.hash[:12]
