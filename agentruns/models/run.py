"""Runs, their definitions, and the tables of a run beside its journal."""

from __future__ import annotations

from typing import Any, Self

from django.db import models
from django.db.models import PROTECT, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import (
    CanonicalField,
    EscapedTextField,
    PersonNameField,
    loose_key,
    now,
    user_key,
)
from agentruns.models.session import Session
from agentruns.models.statuses import ACTIVE, ENDED, UNFINISHED, Constant, RunStatus
from agentruns.utils.bounds import NAME_LENGTH, is_name, said
from agentruns.utils.characters import isolated
from agentruns.utils.ids import uuid7

MOST_VALUES = 16  # of one run's context
SENSITIVE = ("sensitive", "sensitive_results")  # of a tool in a definition
FAILED_DRIVE = "The last drive failed: "  # beginning of `blocked_reason` while a run waits to be tried again
TURN = "Waits for its turn: "  # beginning of `blocked_reason` while a limit or a rate holds a run back
FREE = Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lt=Now())
# No worker has recorded that it cannot drive the run.
SERVED = Q(blocked_reason="")
SERVED |= Q(blocked_reason__startswith=FAILED_DRIVE) | Q(blocked_reason__startswith=TURN)


class Definition(models.Model):
    """The agent that a run was started with: model, parameters, instructions, tool schemas and policies."""

    hash = models.CharField(_("hash"), max_length=64, primary_key=True)
    body = CanonicalField(_("body"))
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)

    class Meta:
        verbose_name = _("definition")
        verbose_name_plural = _("definitions")
        default_permissions = ("view",)

    def __str__(self) -> str:
        return self.hash[:12]


class RunQuerySet(models.QuerySet["Run"]):
    def unfinished(self) -> Self:
        """Select the runs that have not ended."""
        return self.filter(status__in=UNFINISHED)

    def runnable(self) -> Self:
        """Select the runs that a worker may claim now, by the database's clock: due, without a live lease."""
        return self.filter(Q(status__in=ACTIVE), FREE, Q(not_before__isnull=True) | Q(not_before__lte=Now()))

    def live(self) -> Self:
        """Select the runs that are being driven now: whose lease is live by the database's clock."""
        return self.filter(status=Constant("running"), lease_expires_at__gt=Now())

    def with_context(self, given: dict[str, Any] | None = None, /, **values: Any) -> Self:
        """Select the runs with these searchable context values, such as `with_context(tenant=7)`."""
        runs = self
        for key, value in {**(given or {}), **values}.items():
            runs = runs.filter(context_values__key=key, context_values__value=said(value))
        return runs


class Run(models.Model):
    """One task given to one agent in a session."""

    # No columns: whether answers of the API show the reader all of it, and whether the service that returned
    # it has just created it, or sent the message that it reads.
    shows_all = is_new = False

    class Status(models.TextChoices):
        QUEUED = RunStatus.QUEUED, _("queued")
        RUNNING = RunStatus.RUNNING, _("running")
        AWAITING_APPROVAL = RunStatus.AWAITING_APPROVAL, _("waiting")
        WAITING = RunStatus.WAITING, _("waits for an event")
        ORPHANED = RunStatus.ORPHANED, _("in doubt")
        PAUSED = RunStatus.PAUSED, _("paused")
        COMPLETED = RunStatus.COMPLETED, _("completed")
        FAILED = RunStatus.FAILED, _("failed")
        CANCELLED = RunStatus.CANCELLED, _("cancelled")

    REWOUND = "journal_rewound"  # beginning of the reason if a run is held because of lost rows
    ENDED = ENDED
    UNFINISHED = UNFINISHED

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    session = models.ForeignKey(Session, verbose_name=_("session"), on_delete=PROTECT, related_name="runs")
    # Scope and owner are copies of the session's, for the unique constraints on the idempotency key.
    scope = models.CharField(_("scope"), max_length=NAME_LENGTH, default="")
    owner = user_key(_("owner"), "agentruns_runs")
    owner_name = PersonNameField(_("requester"), max_length=NAME_LENGTH, default="")
    requesters = models.TextField(default="")  # quoted ids of all requesters: " 5 17 "
    agent = models.CharField(_("agent"), max_length=100)
    version = models.CharField(_("version"), max_length=100)
    definition = models.ForeignKey(
        Definition, verbose_name=_("definition"), on_delete=PROTECT, related_name="runs"
    )
    idempotency_key = models.CharField(_("idempotency key"), max_length=NAME_LENGTH, default="")
    input = EscapedTextField(_("input"))
    title = EscapedTextField(_("task"), default="")  # first line of its input
    context = CanonicalField(_("context"), default=dict)
    # The run that this one repeats, or was forked from at row `origin_seq`; also in its first row.
    origin = loose_key("self", _("origin"), "derived", db_index=False)
    origin_seq = models.BigIntegerField(_("forked at row"), null=True)
    # The run whose call started this one; also in its first row.
    parent = loose_key("self", _("parent"), "children", db_index=False)
    # The rank of a Priority; also in its first row. Older code leaves it out.
    priority = models.SmallIntegerField(_("priority"), default=0, db_default=0)

    # Folded columns: a cache of the journal, equal to its fold after every append.
    status = models.CharField(_("status"), max_length=20, choices=Status.choices, default=Status.QUEUED)
    step = models.PositiveIntegerField(_("step"), default=0)
    usage = CanonicalField(_("usage"), default=dict)
    tokens = models.BigIntegerField(_("tokens"), default=0)  # input and output, all kinds
    cost = models.DecimalField(_("cost"), max_digits=24, decimal_places=12, null=True)
    pending_calls = CanonicalField(_("pending calls"), default=list)
    output = EscapedTextField(_("output"), null=True)
    error = EscapedTextField(_("error"), default="")

    # About the worker and not the history: never folded.
    lease_owner = models.CharField(_("lease owner"), max_length=64, default="")
    lease_epoch = models.BigIntegerField(_("lease epoch"), default=0)
    lease_expires_at = models.DateTimeField(_("lease expires at"), null=True)
    not_before = models.DateTimeField(_("not before"), null=True)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    blocked_reason = EscapedTextField(_("why it is blocked"), default="")
    blocked_at = models.DateTimeField(_("blocked at"), null=True)  # when a process last found it blocked

    created_at = models.DateTimeField(_("created at"), default=now, editable=False)
    # Accurate to a minute while the run is driven (journal.store).
    updated_at = models.DateTimeField(_("updated at"), default=now, editable=False)

    objects = RunQuerySet.as_manager()

    class Meta:
        verbose_name = _("run")
        verbose_name_plural = _("runs")
        default_permissions = ("view",)
        permissions = [
            ("start_run", _("Can start runs")),
            ("act_for", _("Can start runs for other users and in other scopes")),
            ("resume_run", _("Can resume runs")),
            ("cancel_run", _("Can cancel runs")),
            ("pause_run", _("Can pause runs")),
            ("fork_run", _("Can run again and fork runs")),
            ("erase_payload", _("Can erase values from the journal")),
            ("review_run", _("Can rate runs, note and assign them")),
            ("replay_run", _("Can ask a model what it would have done")),
            ("adopt_definition", _("Can let runs go on under another definition")),
            ("resolve_orphan", _("Can give the verdict on a call in doubt")),
            ("raise_budget", _("Can raise the budgets of runs")),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["session"],
                condition=Q(status__in=[each.value for each in UNFINISHED]),
                name="agentruns_one_unfinished_run",
            ),
            models.UniqueConstraint(
                fields=["owner", "scope", "idempotency_key"],
                condition=Q(owner__isnull=False) & ~Q(idempotency_key=""),
                name="agentruns_key_per_owner",
            ),
            models.UniqueConstraint(
                fields=["scope", "idempotency_key"],
                condition=Q(owner__isnull=True) & ~Q(idempotency_key=""),
                name="agentruns_key_unowned",
            ),
        ]
        indexes = [
            # Partial: the sweep asks only about the few runnable rows.
            models.Index(
                fields=["created_at"],
                condition=Q(status__in=["queued", "running"]),
                name="agentruns_runnable",
            ),
            models.Index(fields=["-updated_at", "-id"], name="agentruns_run_newest"),
            models.Index(fields=["origin"], condition=Q(origin__isnull=False), name="agentruns_run_derived"),
            models.Index(fields=["parent"], condition=Q(parent__isnull=False), name="agentruns_run_children"),
            models.Index(fields=["status", "-updated_at"], name="agentruns_run_status"),
            # Lists an agent's runs, and the agents. Like the two before it, it is written at each append.
            models.Index(fields=["agent", "-updated_at", "-id"], name="agentruns_run_agent"),
        ]

    def __str__(self) -> str:
        return f"{isolated(self.agent)} {str(self.id)[:13]}"

    @property
    def is_ended(self) -> bool:
        """Check whether the run has completed, failed or been cancelled."""
        return self.status in self.ENDED


class ContextValue(models.Model):
    """A searchable top-level value of a run's context, created with the run, deleted when it is erased."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="context_values")
    key = models.CharField(max_length=NAME_LENGTH)
    value = models.CharField(max_length=NAME_LENGTH)

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["value", "key", "run"], name="agentruns_context_value")]

    def __str__(self) -> str:
        return self.key

    @classmethod
    def of(cls, run: Run, definition: dict[str, Any]) -> list[ContextValue]:
        """Build a run's searchable context values: at most MOST_VALUES, short and not sensitive."""
        tools = definition.get("tools", {}).values() if run.context else ()
        hidden = {name for tool in tools for kind in SENSITIVE for name in tool.get(kind) or ()}
        texts = {name: said(value) for name, value in run.context.items() if name not in hidden}
        values = [(name, text) for name, text in texts.items() if text and is_name(name)]
        return [cls(run_id=run.pk, key=name, value=text) for name, text in values[:MOST_VALUES]]


class Draft(models.Model):
    """The text of a reply while it is written, for people who watch the run: no part of the journal.

    Event streams create the row and renew `watched_until`; the worker stores the text, masked. It is valid
    while `epoch` and `step` are the run's own, so no former worker's text and no journaled reply is shown.
    """

    run = models.OneToOneField(
        Run, primary_key=True, on_delete=models.CASCADE, db_constraint=False, related_name="draft"
    )
    watched_until = models.DateTimeField()
    epoch = models.BigIntegerField(default=0)
    step = models.PositiveIntegerField(default=0)
    text = EscapedTextField(default="")

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"draft of {self.pk}"


class Review(models.Model):
    """The opinion of people on a run, and its assignee: no part of the journal, deleted with the run."""

    class Rating(models.IntegerChoices):
        BAD = -1, _("bad")
        NONE = 0, _("not rated")
        GOOD = 1, _("good")

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="review")
    rating = models.SmallIntegerField(choices=Rating.choices, default=Rating.NONE)
    note = EscapedTextField(default="")
    assignee = user_key(None, "agentruns_assigned")
    assignee_name = PersonNameField(max_length=NAME_LENGTH, default="")
    author = user_key(None, "agentruns_reviews")
    author_name = PersonNameField(max_length=NAME_LENGTH, default="")
    created_at = models.DateTimeField(default=now, editable=False)
    updated_at = models.DateTimeField(default=now, editable=False)

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["rating"], name="agentruns_review_rating")]

    def __str__(self) -> str:
        return str(self.pk)
