from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField
from agentruns.redaction import redact


class Tombstone(models.Model):
    """What is left of a pruned session; its presence is what lets the journal's rows be deleted."""

    session_id = models.UUIDField(primary_key=True)
    key = models.CharField(_("key"), max_length=200)
    head = models.CharField(_("head"), max_length=64)
    idempotency_keys = CanonicalField(_("idempotency keys"), default=dict)
    created_at = models.DateTimeField(_("created at"), auto_now_add=True)

    class Meta:
        verbose_name = _("tombstone")
        verbose_name_plural = _("tombstones")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return redact(self.key)
