"""Standing rules that answer requests for approval, their decisions, and the log of their changes."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple, Self
from uuid import UUID

from django.db import models
from django.db.models import Q, Sum
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField, EscapedTextField, PersonNameField, now, user_key
from agentruns.models.statuses import Constant
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.db import later
from agentruns.utils.ids import uuid7

BY_RULE = "rule:"  # channel of a decision by a standing rule, before the rule's id


class Amount(NamedTuple):
    """The amount of a call that counts toward one cap of a rule; `key` is a keyed hash of the cap's key."""

    cap: int  # place in ApprovalRule.caps
    key: str
    amount: Decimal


class RuleQuerySet(models.QuerySet["ApprovalRule"]):
    def unexpired(self) -> Self:
        """Select the rules that have not expired, by the database's clock."""
        return self.filter(Q(expires_at=None) | Q(expires_at__gt=Now()))

    def live(self) -> Self:
        """Select the rules that are active or on a dry run, and have not expired."""
        return self.unexpired().filter(status__in=[Constant(each) for each in ApprovalRule.LIVE])


class ApprovalRule(models.Model):
    """One version of a standing rule. Only its status changes; another wording is a new version."""

    class Status(models.TextChoices):
        DRAFT = "draft", _("draft")
        DRY_RUN = "dry-run", _("dry run")
        ACTIVE = "active", _("active")
        STOPPED = "stopped", _("stopped")
        RETIRED = "retired", _("retired")

    class Effect(models.TextChoices):
        """The answers of a rule to a card, in the order of precedence."""

        DENY = "deny", _("deny")
        ASK = "ask", _("ask a person")
        APPROVE = "approve", _("approve")

    LIVE = ("active", "dry-run")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    scope = models.CharField(_("scope"), max_length=NAME_LENGTH, default="")
    name = models.CharField(_("name"), max_length=64)
    version = models.PositiveIntegerField(_("version"))
    agent = models.CharField(_("agent"), max_length=100)
    tool = models.CharField(_("tool"), max_length=64)
    schema = models.CharField(_("hash of the tool's parameters"), max_length=64)
    effect = models.CharField(_("effect"), max_length=10, choices=Effect.choices, default=Effect.APPROVE)
    conditions = CanonicalField(_("conditions"))  # list of journal.rules.Condition as JSON
    caps = CanonicalField(_("caps"))  # list of journal.rules.Cap as JSON
    untrusted = models.BooleanField(_("answers although outsiders' text was read"), default=False)
    reason = EscapedTextField(_("reason"), default="")
    expires_at = models.DateTimeField(_("expires at"), null=True)
    status = models.CharField(_("status"), max_length=10, choices=Status.choices, default=Status.DRAFT)
    why = EscapedTextField(_("why it has this status"), default="")
    author = user_key(_("author"), "agentruns_rules", db_index=False)
    author_name = PersonNameField(_("author"), max_length=NAME_LENGTH, default="")
    activator = user_key(_("activated by"), "agentruns_activated_rules", db_index=False)
    activator_name = PersonNameField(_("activated by"), max_length=NAME_LENGTH, default="")
    # Ids of author and activator, and of the persons who acted in their names.
    people = CanonicalField(default=list, editable=False)
    created_at = models.DateTimeField(_("created at"), default=now)
    decided_at = models.DateTimeField(_("last decision at"), null=True)

    objects = RuleQuerySet.as_manager()

    class Meta:
        verbose_name = _("standing rule")
        verbose_name_plural = _("standing rules")
        default_permissions = ("view",)
        permissions = [
            ("write_rule", _("Can write standing rules and try them")),
            ("activate_rule", _("Can activate standing rules")),
        ]
        constraints = [
            models.UniqueConstraint(fields=["scope", "name", "version"], name="agentruns_rule_version"),
            models.UniqueConstraint(
                fields=["scope", "name"], condition=Q(status="active"), name="agentruns_one_active_rule"
            ),
        ]
        indexes = [
            models.Index(
                fields=["agent", "tool", "scope"],
                condition=Q(status__in=["active", "dry-run"]),
                name="agentruns_live_rules",
            )
        ]

    def __str__(self) -> str:
        return f"{self.name}:{self.version}"


class RuleDecision(models.Model):
    """The decision of a rule about one card, or the one that it would have made on its dry run."""

    rule = models.ForeignKey(ApprovalRule, on_delete=models.PROTECT, related_name="decisions")
    run_id = models.UUIDField(_("run"))
    call_id = models.CharField(_("call"), max_length=36, db_index=True)
    approval_id = models.UUIDField(_("approval"))
    effect = models.CharField(_("effect"), max_length=10, choices=ApprovalRule.Effect.choices)
    is_dry = models.BooleanField(_("dry run"), default=False)
    decided_at = models.DateTimeField(_("decided at"))
    released_at = models.DateTimeField(_("given back at"), null=True)  # the call was never started

    class Meta:
        verbose_name = _("decision of a rule")
        verbose_name_plural = _("decisions of rules")
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["rule", "approval_id"], name="agentruns_rule_decides_once")
        ]
        indexes = [models.Index(fields=["rule", "-decided_at"], name="agentruns_rule_decisions")]

    def __str__(self) -> str:
        return f"{self.effect} by rule {self.rule_id}"

    @classmethod
    def record(
        cls, alias: str, rule: ApprovalRule, effect: str, amounts: Iterable[Amount], **about: Any
    ) -> str:
        """Record a decision of a rule, and count its amounts toward the rule's caps; explain a refusal.

        `about` names the run, call and approval. Locks the rule until the transaction ends, so that two
        workers never pass a cap together. The rule must have the status that the caller knows. On a dry run a
        full cap is recorded as the effect "ask". Needs an open transaction.
        """
        rules = ApprovalRule._default_manager.using(alias).filter(pk=rule.pk, status=rule.status)
        if rules.unexpired().update(decided_at=Now()) != 1:
            return f"rule {rule} is not {rule.status} any more"
        is_dry = rule.status == ApprovalRule.Status.DRY_RUN
        if full := next((each for each in amounts if cls.is_full(alias, rule, each)), None):
            if not is_dry:
                return f"cap {full.cap + 1} of rule {rule} is used up"
            effect, amounts = ApprovalRule.Effect.ASK, ()
        at: Any = rules.values_list("decided_at", flat=True).get()
        decision = cls(rule_id=rule.pk, effect=effect, is_dry=is_dry, decided_at=at, **about)
        cls._default_manager.using(alias).bulk_create([decision])
        counted = [
            RuleAmount(decision_id=decision.pk, rule_id=rule.pk, cap=cap, key=key, amount=amount, at=at)
            for cap, key, amount in amounts
        ]
        RuleAmount._default_manager.using(alias).bulk_create(counted)
        return ""

    @classmethod
    def is_full(cls, alias: str, rule: ApprovalRule, amount: Amount) -> bool:
        """Check whether an amount would pass its cap; exact only while the rule is locked."""
        return cls.used(alias, rule, amount.cap, amount.key) + amount.amount > Decimal(
            rule.caps[amount.cap]["most"]
        )

    @classmethod
    def used(cls, alias: str, rule: ApprovalRule, cap: int, key: str | None = None) -> Decimal:
        """Sum what counts toward a cap now, of one key or of all; a dry run has counts of its own."""
        is_dry = rule.status == ApprovalRule.Status.DRY_RUN
        rows = RuleAmount._default_manager.using(alias).filter(rule=rule, cap=cap, decision__is_dry=is_dry)
        rows = rows.filter(at__gt=later(-rule.caps[cap]["seconds"]), decision__released_at=None)
        rows = rows if key is None else rows.filter(key=key)
        return rows.aggregate(sum=Sum("amount"))["sum"] or Decimal(0)

    @classmethod
    def release(cls, alias: str, run_id: UUID, call_ids: Iterable[str]) -> None:
        """Give back what decisions about these calls have counted, because the calls were never started."""
        rows = cls._default_manager.using(alias).filter(run_id=run_id, call_id__in=[*call_ids])
        rows = rows.filter(effect=ApprovalRule.Effect.APPROVE, is_dry=False, released_at=None)
        rows.update(released_at=Now())


class RuleAmount(models.Model):
    """The amount that one decision counts toward one cap of its rule."""

    decision = models.ForeignKey(RuleDecision, on_delete=models.CASCADE, related_name="amounts")
    rule = models.ForeignKey(ApprovalRule, on_delete=models.PROTECT, related_name="+", db_index=False)
    cap = models.PositiveIntegerField()
    key = models.CharField(max_length=64)
    amount = models.DecimalField(max_digits=30, decimal_places=12)
    at = models.DateTimeField()

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["rule", "cap", "key", "at"], name="agentruns_rule_amounts")]

    def __str__(self) -> str:
        return f"{self.amount} of cap {self.cap + 1}"


class RuleChange(models.Model):
    """One change of a rule's status, with its actor."""

    rule = models.ForeignKey(ApprovalRule, on_delete=models.PROTECT, related_name="changes")
    status = models.CharField(_("status"), max_length=10, choices=ApprovalRule.Status.choices)
    why = EscapedTextField(_("why"), default="")
    actor_id = models.CharField(_("id of the actor"), max_length=NAME_LENGTH, default="")
    actor_name = PersonNameField(_("by"), max_length=NAME_LENGTH, default="")
    at = models.DateTimeField(_("at"), default=now)

    class Meta:
        verbose_name = _("change of a rule")
        verbose_name_plural = _("changes of rules")
        default_permissions = ()
        ordering = ("-pk",)

    def __str__(self) -> str:
        return f"{self.status} at {self.at}"
