from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import now, user_key
from agentruns.utils.bounds import NAME_LENGTH


class IdempotencyRecord(models.Model):
    """A request with an idempotency key that was done; the same again is not.

    Written in the same transaction as the request's effect, so that one exists exactly if the other does.
    """

    owner = user_key(_("owner"), "agentruns_idempotency_records", null=False)
    key = models.CharField(_("idempotency key"), max_length=NAME_LENGTH)
    fingerprint = models.CharField(_("fingerprint of the request"), max_length=64)
    status = models.PositiveIntegerField(_("status"), default=0)
    run_id = models.UUIDField(_("run"), null=True)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False, db_index=True)

    class Meta:
        verbose_name = _("idempotency record")
        verbose_name_plural = _("idempotency records")
        default_permissions = ("view",)
        constraints = [models.UniqueConstraint(fields=["owner", "key"], name="agentruns_answer_key")]

    def __str__(self) -> str:
        return self.key
