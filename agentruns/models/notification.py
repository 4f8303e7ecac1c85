from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from agentruns.models.run import Run
from agentruns.utils.ids import uuid7


class Notification(models.Model):
    """One event for one notifier: written with the event itself, kept until it is delivered."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    event = models.CharField(_("event"), max_length=40)
    # Deleted with its run: a pruned run needs no announcement.
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
            # Partial: the sweep asks only about the few unsent rows.
            models.Index(fields=["notifier", "id"], condition=Q(sent_at=None), name="agentruns_unsent"),
        ]

    def __str__(self) -> str:
        return f"{self.event} {self.id}"
