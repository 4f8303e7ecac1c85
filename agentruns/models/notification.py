from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from agentruns.models.run import Run
from agentruns.utils.ids import uuid7


class Notification(models.Model):
    """One event one notifier is to be told of: written with what happened, kept until it was delivered."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    event = models.CharField(_("event"), max_length=40)
    # Goes with its run: what is pruned needs no announcement.
    run = models.ForeignKey(
        Run, verbose_name=_("run"), on_delete=models.CASCADE, related_name="notifications"
    )
    approval_id = models.UUIDField(_("approval"), null=True)
    notifier = models.TextField(_("notifier"))
    created_at = models.DateTimeField(_("created at"))
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    not_before = models.DateTimeField(_("not before"), null=True)
    sent_at = models.DateTimeField(_("sent at"), null=True)

    class Meta:
        verbose_name = _("notification")
        verbose_name_plural = _("notifications")
        default_permissions = ("view",)
        indexes = [
            # The sweep's question, on the few rows it can concern.
            models.Index(fields=["notifier", "id"], condition=Q(sent_at=None), name="agentruns_unsent"),
        ]

    def __str__(self) -> str:
        return f"{self.event} {self.id}"
