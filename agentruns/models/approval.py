from __future__ import annotations

from typing import Self, TypeAlias

from django.db import models
from django.db.models import Exists, F, OuterRef, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField, EscapedTextField, PersonNameField, user_key
from agentruns.models.run import Run
from agentruns.models.statuses import PENDING, RISK_RANK, ApprovalStatus, RunStatus
from agentruns.utils.bounds import NAME_LENGTH

HELD = (RunStatus.PAUSED, RunStatus.ORPHANED)  # runs whose calls wait, also approved ones


class ApprovalQuerySet(models.QuerySet["Approval"]):
    def pending(self) -> Self:
        """Select the approvals that wait for a person; an overdue one waits until a sweep expires it."""
        return self.filter(status=PENDING)

    def expired(self) -> Self:
        """Select the pending approvals whose time is over, by the database's clock."""
        return self.pending().filter(expires_at__lte=Now())

    def due(self) -> Self:
        """Select the pending approvals that people have to be reminded of, unless their run is held."""
        waits = [status for status in Run.UNFINISHED if status not in HELD]
        # Not a join, which would read all waiting runs.
        run = Run.objects.filter(pk=OuterRef("run_id"), status__in=waits)
        return self.pending().filter(Exists(run), due_at__lte=Now())


class Approval(models.Model):
    """The approval of one call, copied from the journal for fast lists."""

    shows_all = False  # as of a run

    Status: TypeAlias = ApprovalStatus

    class Risk(models.TextChoices):
        LOW = "low", _("low")
        NORMAL = "normal", _("normal")
        HIGH = "high", _("high")

    id = models.UUIDField(primary_key=True, editable=False)
    run = models.ForeignKey(Run, verbose_name=_("run"), on_delete=models.PROTECT, related_name="approvals")
    call_id = models.CharField(_("call"), max_length=36)
    tool_name = models.CharField(_("tool"), max_length=64)
    arguments = CanonicalField(_("arguments"))
    digest = models.CharField(_("digest"), max_length=64)
    holds = CanonicalField(_("holds"), null=True)  # what its approval relies on
    # Equal for equal calls in all sessions; a keyed hash, so that nobody can guess the arguments.
    same_call = models.CharField(max_length=64, default="", editable=False)
    title = EscapedTextField(_("title"))
    risk = models.CharField(_("risk"), max_length=10, choices=Risk.choices, default=Risk.NORMAL)
    why = EscapedTextField(_("why it is asked"), default="")
    status = models.CharField(_("status"), max_length=20, choices=Status.choices, default=Status.PENDING)
    approvers = models.CharField(_("who may approve"), max_length=NAME_LENGTH, default="")
    required = models.PositiveIntegerField(_("approvals required"), default=1)
    approved_count = models.PositiveIntegerField(_("approvals given"), default=0)
    requested_at = models.DateTimeField(_("requested at"))
    expires_at = models.DateTimeField(_("expires at"), null=True)
    due_at = models.DateTimeField(_("next reminder or escalation"), null=True)
    escalate_to = models.CharField(_("escalates to"), max_length=NAME_LENGTH, default="", db_default="")
    decided_at = models.DateTimeField(_("decided at"), null=True)
    decided_by = user_key(_("decided by"), "agentruns_decisions")
    decided_by_name = PersonNameField(_("decided by"), max_length=NAME_LENGTH, default="")
    reason = EscapedTextField(_("reason"), default="")

    objects = ApprovalQuerySet.as_manager()

    class Meta:
        verbose_name = _("approval")
        verbose_name_plural = _("approvals")
        default_permissions = ("view",)
        permissions = [
            ("decide_approval", _("Can decide approvals")),
            ("reveal_arguments", _("Can see the sensitive arguments of an approval")),
        ]
        constraints = [models.UniqueConstraint(fields=["run", "call_id"], name="agentruns_one_card")]
        indexes = [
            models.Index(
                fields=["expires_at", "requested_at"], condition=Q(status="pending"), name="agentruns_pending"
            ),
            # The queue's default order: riskiest first, then soonest to expire, then longest waiting.
            models.Index(
                RISK_RANK,
                F("expires_at"),
                F("requested_at"),
                F("id"),
                condition=Q(status="pending"),
                name="agentruns_queue",
            ),
            models.Index(
                fields=["requested_at", "id"], condition=Q(status="pending"), name="agentruns_longest_waiting"
            ),
            models.Index(fields=["-requested_at", "-id"], name="agentruns_approval_newest"),
            # Partial: the sweep asks only about the cards that people are reminded of.
            models.Index(
                fields=["due_at"], condition=Q(status="pending", due_at__isnull=False), name="agentruns_due"
            ),
            # Earlier calls of the tool, and earlier requests for the same call.
            models.Index(fields=["tool_name", "-requested_at"], name="agentruns_precedents"),
            models.Index(fields=["same_call"], name="agentruns_same_call"),
        ]

    def __str__(self) -> str:
        return f"{self.tool_name} {str(self.id)[:13]}"  # the title may quote sensitive values
