from __future__ import annotations

from typing import Any, Self

from django.db import models
from django.db.models import Q
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField
from agentruns.models.kinds import merged
from agentruns.models.run import Run
from agentruns.models.session import Session


class MessageQuerySet(models.QuerySet["Message"]):
    def own(self) -> Self:
        """Select the rows of the run itself, without the rows that a fork copied from its origin."""
        return self.filter(seq__gt=Coalesce("run__origin_seq", 0))


class Message(models.Model):
    """One row of the journal. Triggers refuse changes except erasure, and deletions except pruning."""

    session = models.ForeignKey(Session, on_delete=models.PROTECT, related_name="messages", db_index=False)
    seq = models.BigIntegerField(_("seq"))
    run = models.ForeignKey(Run, on_delete=models.PROTECT, related_name="messages", db_index=False)
    kind = models.CharField(_("kind"), max_length=40)
    call_id = models.CharField(_("call"), max_length=36, default="")
    tool_name = models.CharField(_("tool"), max_length=64, default="")
    attempt = models.PositiveIntegerField(_("attempt"), default=0)
    epoch = models.BigIntegerField(_("epoch"), default=0)
    # The approval a `tool_started` row consumes, or the id under which it was renewed: each only once.
    consumes = models.UUIDField(_("consumed approval"), null=True)
    # The two parts of its payload, each with the salt of the hash that the chain is bound to.
    facts = CanonicalField(_("facts"))
    facts_salt = models.CharField(max_length=32)
    content = CanonicalField(_("content"), null=True)  # NULL, like its salt, once it is erased
    content_salt = models.CharField(max_length=32, null=True)  # noqa: DJ001 - "" would be a salt
    content_hash = models.CharField(max_length=64)
    prev_hash = models.CharField(max_length=64)
    hash = models.CharField(max_length=64)
    created_at = models.DateTimeField(_("created at"))

    objects = MessageQuerySet.as_manager()

    class Meta:
        verbose_name = _("journal row")
        verbose_name_plural = _("journal rows")
        default_permissions = ("view",)
        ordering = ["session", "seq"]
        constraints = [
            models.UniqueConstraint(fields=["session", "seq"], name="agentruns_session_seq"),
            models.UniqueConstraint(
                fields=["run", "call_id"], condition=Q(kind="tool_result"), name="agentruns_one_result"
            ),
            models.UniqueConstraint(
                fields=["run", "call_id", "attempt"],
                condition=Q(kind="tool_started"),
                name="agentruns_one_start",
            ),
            models.UniqueConstraint(
                fields=["consumes"], condition=Q(consumes__isnull=False), name="agentruns_single_use"
            ),
        ]
        indexes = [models.Index(fields=["run", "seq"], name="agentruns_run_seq")]

    def __str__(self) -> str:
        return f"{self.seq} {self.kind}"

    @property
    def payload(self) -> dict[str, Any]:
        """The payload, joined from facts and content; neutral values replace erased content."""
        return merged(self.kind, self.facts, self.content)
