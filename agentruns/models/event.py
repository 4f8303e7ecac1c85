from __future__ import annotations

from typing import Self
from uuid import UUID

from django.db import models
from django.db.models import CASCADE, Q
from django.db.models.functions import Now
from django.dispatch import Signal
from django.utils.translation import gettext_lazy as _

from agentruns.models.fields import CanonicalField, now
from agentruns.models.run import Run
from agentruns.utils.bounds import NAME_LENGTH, OWN_EVENTS
from agentruns.utils.ids import uuid7

CHILD = f"{OWN_EVENTS}child"  # name of the event that a child run has ended; its key is the child's id
DEFERRED = f"{OWN_EVENTS}deferred"  # the same of a deferred call, for which its run does not wait
child_ended = Signal()  # sent after the commit with `run_id`; where it is lost, the sweep settles the event


class EventQuerySet(models.QuerySet["Event"]):
    def named(self, scope: str, name: str, key: str) -> Self:
        """Select the event with this name and key in a scope."""
        return self.filter(scope=scope, name=name, key=key)

    def unsettled(self) -> Self:
        """Select the events whose outcome the journal does not have yet."""
        return self.filter(settled_at__isnull=True)

    def due(self) -> Self:
        """Select the unsettled events that the sweep has to look at, by the database's clock."""
        return self.unsettled().filter(due_at__lte=Now())


class Event(models.Model):
    """Something outside that a run may wait for: a row that the run or the delivery makes first.

    The journal of `run` has what the row says of the wait, and has the payload once the event is settled.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    scope = models.CharField(_("scope"), max_length=NAME_LENGTH, default="")
    name = models.CharField(_("name"), max_length=NAME_LENGTH)
    key = models.CharField(_("key"), max_length=NAME_LENGTH)
    payload = CanonicalField(_("payload"), null=True)  # cleared once the journal has it
    actor = CanonicalField(_("actor"), null=True)  # the record of the deliverer
    delivered_at = models.DateTimeField(_("delivered at"), null=True)
    # The run and call that wait, or that may wait once the call's handler returns; null: nobody yet.
    run_id: UUID | None
    run = models.ForeignKey(Run, verbose_name=_("run"), null=True, on_delete=CASCADE, related_name="awaited")
    call_id = models.CharField(_("call"), max_length=36, default="")
    waits_since = models.DateTimeField(_("waits since"), null=True)
    # The next moment at which the sweep has to look: the time-out of a wait, the moment of a delivery that
    # the journal does not have yet, the next poll of a server's task, or the end of an event that nobody
    # waits for. Null: never.
    due_at = models.DateTimeField(_("due at"), null=True)
    settled_at = models.DateTimeField(_("settled at"), null=True)
    created_at = models.DateTimeField(_("created at"), default=now, editable=False)

    objects = EventQuerySet.as_manager()

    class Meta:
        verbose_name = _("event")
        verbose_name_plural = _("events")
        default_permissions = ("view",)
        permissions = [("deliver_event", _("Can deliver events"))]
        constraints = [
            models.UniqueConstraint(fields=["scope", "name", "key"], name="agentruns_one_event"),
        ]
        indexes = [
            # Partial: an idle sweep reads no entry, however many runs wait.
            models.Index(fields=["due_at"], condition=Q(settled_at=None), name="agentruns_event_due"),
        ]

    def __str__(self) -> str:
        return f"{self.name} {self.id}"
