"""Querysets of runs, journal rows, controls and approvals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from django.db import connections, models
from django.db.models import Case, Q, When
from django.db.models.functions import Coalesce, Now

from agentruns.models.statuses import RunStatus
from agentruns.utils.bounds import said
from agentruns.utils.ids import secret

if TYPE_CHECKING:
    from agentruns.models import Approval, Control, Message, Run  # noqa: F401

_identities: dict[tuple[str, str], str] = {}
ENDED = (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)
UNFINISHED = tuple(status for status in RunStatus if status not in (RunStatus.ACTIVE, *ENDED))


class Constant(models.Value):
    """A constant in the SQL text itself, because a planner matches no parameter with a partial index."""

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[str | int, ...]]:
        """Format the value as an SQL literal."""
        return repr(self.value), ()


ACTIVE = [Constant("queued"), Constant("running")]
PENDING = Constant("pending")
# 0 is the riskiest, as in the queue's index.
RISK_RANK = Case(
    When(risk=Constant("high"), then=Constant(0)),
    When(risk=Constant("normal"), then=Constant(1)),
    default=Constant(2),
    output_field=models.IntegerField(),
)


class RunQuerySet(models.QuerySet["Run"]):
    def unfinished(self) -> Self:
        """Select the runs that have not ended."""
        return self.filter(status__in=UNFINISHED)

    def runnable(self) -> Self:
        """Select the runs that a worker may claim now, by the database's clock: due, without a live lease."""
        return self.filter(
            Q(status__in=ACTIVE),
            Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lt=Now()),
            Q(not_before__isnull=True) | Q(not_before__lte=Now()),
        )

    def with_context(self, given: dict[str, Any] | None = None, /, **values: Any) -> Self:
        """Select the runs with these searchable context values, such as `with_context(tenant=7)`."""
        runs = self
        for key, value in {**(given or {}), **values}.items():
            runs = runs.filter(context_values__key=key, context_values__value=said(value))
        return runs


class MessageQuerySet(models.QuerySet["Message"]):
    def own(self) -> Self:
        """Select the rows of the run itself, without the rows that a fork copied from its origin."""
        return self.filter(seq__gt=Coalesce("run__origin_seq", 0))


class ControlQuerySet(models.QuerySet["Control"]):
    def stamp(self, name: str) -> None:
        """Set the time of the row `name` to now, by the database's clock; create the row if it is missing."""
        name = name[: self.model._meta.get_field("name").max_length]
        if not self.filter(name=name).update(seen_at=Now()):
            self.update_or_create(name=name, defaults={"seen_at": Now()})

    def note(self, server: Any) -> None:
        """Note the timeline and the replication of the server (a `journal.timeline.Server`)."""
        noted = {"reason": server.timeline, "actor": server.replication, "seen_at": Now()}
        self.update_or_create(name=self.model.SERVER, defaults=noted)

    def sweepers(self) -> Self:
        """Select the rows of sweepers: all rows except switches and those with a fixed name."""
        named = (self.model.DRAINING, self.model.SERVER, self.model.DATABASE)
        return self.exclude(name__in=named).exclude(name__startswith="off:")

    def identity(self) -> str:
        """Find the database's random name, or create it; a process keeps the name once it is committed."""
        connection = connections[self.db]
        place = self.db, getattr(connection, "schema_name", "")  # of django-tenants
        if place not in _identities:
            made = {"reason": secret(), "seen_at": Now()}
            name: str = self.get_or_create(name=self.model.DATABASE, defaults=made)[0].reason
            if connection.in_atomic_block:  # which may be rolled back
                return name
            _identities[place] = name
        return _identities[place]

    def switches(self) -> Self:
        """Select the agents and tools that are switched off, by name."""
        return self.filter(name__startswith="off:").order_by("name")


class ApprovalQuerySet(models.QuerySet["Approval"]):
    def pending(self) -> Self:
        """Select the approvals that wait for a person."""
        return self.filter(status=PENDING)

    def expired(self) -> Self:
        """Select the pending approvals whose time is over, by the database's clock."""
        return self.pending().filter(expires_at__lte=Now())
