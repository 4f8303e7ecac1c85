"""Tables beside runs: stamps, counts of starts, requests with idempotency keys, the fence, the outbox."""

from __future__ import annotations

import math
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, Self
from uuid import UUID

from django.db import connections, models
from django.db.models import CASCADE, Case, F, Q, Sum, Value, When
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from agentruns.exceptions import JournalConflictError
from agentruns.models.fields import EscapedTextField, now, user_key
from agentruns.models.run import Run
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.carry import schema_of
from agentruns.utils.db import database_now
from agentruns.utils.ids import secret, uuid7

_identities: dict[tuple[str, str], str] = {}


class ControlQuerySet(models.QuerySet["Control"]):
    def stamp(self, name: str) -> None:
        """Set the time of the row `name` to now, by the database's clock; create the row if it is missing."""
        name = name[: self.model._meta.get_field("name").max_length]
        if not self.filter(name=name).update(seen_at=Now()):
            self.put(name=name, seen_at=Now())

    def note(self, server: Any) -> None:
        """Store the timeline and replication of a `journal.timeline.Server` in the row named SERVER."""
        self.put(self.model.SERVER, reason=server.timeline, actor=server.replication, seen_at=Now())

    def put(self, name: str, **columns: Any) -> None:
        """Set these columns of the row `name`, or create the row, in one statement that sends no signal."""
        row = self.model(name=name, **columns)
        self.bulk_create([row], update_conflicts=True, unique_fields=["name"], update_fields=[*columns])

    def sweepers(self) -> Self:
        """Select the rows of sweepers: all rows except switches and those with a fixed name."""
        named = (self.model.DRAINING, self.model.SERVER, self.model.DATABASE)
        kinds = Q(name__startswith="off:") | Q(name__startswith=self.model.BLOCKED)
        kinds |= Q(name__startswith=self.model.SLOTS) | Q(name__startswith=self.model.RATE)
        return self.exclude(kinds | Q(name__in=named))

    def identity(self) -> str:
        """Find the database's random name, or create it; remember it if no transaction can roll it back."""
        place = self.db, schema_of(self.db)
        if (known := _identities.get(place)) is not None:
            return known
        rows = self.filter(name=self.model.DATABASE)
        if (name := rows.values_list("reason", flat=True).first()) is None:
            made = self.model(name=self.model.DATABASE, reason=secret(), seen_at=Now())
            self.bulk_create([made], ignore_conflicts=True)
            name = rows.get().reason
        if not connections[self.db].in_atomic_block:
            _identities[place] = name
        return name

    def switches(self) -> Self:
        """Select the switches of the agents and tools that are off, in order of name."""
        return self.filter(name__startswith="off:").order_by("name")


class Control(models.Model):
    """A named row with a time by the database's clock: a sweeper, the last request to drain, or a switch.

    The row of a sweeper has the time of its last sweep. A switch exists while an agent or a tool is off, with
    the reason and the name of the person. The row SERVER notes the server's timeline as `reason` and its kind
    of replication as `actor`. The row DATABASE has the database's random name as `reason`, which a copy of
    the database keeps. A row BLOCKED names a definition, and has the time of the notice about its runs.
    A row SLOTS names an agent with a limit, and is locked while a run of the agent is claimed. A row RATE
    names a rate, and has the time at which its requests so far are due.
    """

    DRAINING = "draining"
    SERVER = "server"
    DATABASE = "database"
    BLOCKED = "blocked:"
    SLOTS = "slots:"
    RATE = "rate:"

    name = models.CharField(_("name"), max_length=120, primary_key=True)
    seen_at = models.DateTimeField(_("seen at"))
    reason = EscapedTextField(_("reason"), default="", db_default="")  # which older code leaves out
    actor = EscapedTextField(_("actor"), default="", db_default="")

    objects = ControlQuerySet.as_manager()

    class Meta:
        verbose_name = _("control")
        verbose_name_plural = _("controls")
        default_permissions = ("view",)
        permissions = (("switch", _("Can switch agents and tools off and on")),)

    def __str__(self) -> str:
        return self.name


class StartCount(models.Model):
    """A count since `since`: starts of a user or visitor, a user's wrong passwords, or a user's digests."""

    # As text and no foreign key: users may live in another database.
    user_id = models.CharField(primary_key=True, max_length=NAME_LENGTH)
    since = models.DateTimeField()
    count = models.PositiveIntegerField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.user_id

    @classmethod
    def count_one(cls, alias: str, key: str, limit: int, window: timedelta) -> int:
        """Count one more under `key`; at `limit`, count nothing and return the seconds until the window ends.

        A window begins with what it counts first, by the database's clock.
        """
        key, now, counts = key[:NAME_LENGTH], database_now(alias), cls._default_manager.using(alias)
        counts.bulk_create([cls(user_id=key, since=now, count=0)], ignore_conflicts=True)
        is_over = Q(since__lte=now - window)
        # The condition is judged on the locked row, so that of two racing at the limit one passes.
        counted = limit > 0 and counts.filter(is_over | Q(count__lt=limit), user_id=key).update(
            since=Case(When(is_over, then=Value(now)), default=F("since")),
            count=Case(When(is_over, then=Value(1)), default=F("count") + 1),
        )
        if counted:
            return 0
        since = counts.values_list("since", flat=True).get(user_id=key)
        return max(1, math.ceil((since + window - now).total_seconds()))


class Spending(models.Model):
    """The cost that counts toward a budget of the policy on one day, such as that of the user 5."""

    key = models.CharField(max_length=NAME_LENGTH + 10)  # such as "user:5"
    day = models.DateField()
    spent = models.DecimalField(max_digits=24, decimal_places=12, default=0)

    class Meta:
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["day", "key"], name="agentruns_spending_of_day")]

    def __str__(self) -> str:
        return f"{self.key} on {self.day}"

    @classmethod
    def reserve(
        cls, alias: str, run_id: UUID, day: date, limits: dict[str, Decimal], amount: Decimal
    ) -> tuple[list[int], Spending | None]:
        """Reserve an amount for the next request of a run, in place of what is reserved for the run.

        `limits` are by key. Returns the ids of the rows with the reservation and None. If what is spent, and
        reserved for runs that are being driven, has reached a limit, reserves nothing, and returns that row.
        Needs an open transaction.
        """
        keys, rows = sorted(limits), cls._default_manager.using(alias)
        rows.bulk_create([cls(key=key, day=day) for key in keys], ignore_conflicts=True)  # locks on SQLite
        its = rows.filter(day=day, key__in=keys)
        locked = list(its.order_by("key").select_for_update())
        its.update(spent=F("spent"))  # which any isolation level notices
        if len(locked) < len(keys):  # made by another transaction that this one does not see
            raise JournalConflictError("The budgets of this day have just been made.")
        Reservation.forget(alias, run_id)
        held = Reservation._default_manager.using(alias).filter(run__in=Run.objects.using(alias).live())
        for row in locked:
            reserved = held.filter(spending=row).aggregate(sum=Sum("amount"))["sum"] or 0
            if row.spent + reserved >= limits[row.key]:
                return [], row
        made = [Reservation(run_id=run_id, spending=row, amount=amount) for row in locked]
        Reservation._default_manager.using(alias).bulk_create(made)
        return [row.pk for row in locked], None

    @classmethod
    def settle(cls, alias: str, run_id: UUID, ids: list[int], cost: Decimal) -> None:
        """Add the cost of a run's request to the rows `ids`, in place of the run's reservation.

        Needs the transaction that stores the reply, so that a crash neither loses the cost nor doubles it.
        """
        rows = cls._default_manager.using(alias).filter(pk__in=ids)
        for row in rows.order_by("key").select_for_update():
            rows.filter(pk=row.pk).update(spent=row.spent + cost)
        Reservation.forget(alias, run_id)


class Reservation(models.Model):
    """The most that the request in progress of a run may cost; it counts while the run is driven."""

    run = models.ForeignKey(Run, on_delete=CASCADE, db_constraint=False, related_name="reservations")
    spending = models.ForeignKey(Spending, on_delete=CASCADE, related_name="reservations")
    amount = models.DecimalField(max_digits=24, decimal_places=12)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.amount} of {self.spending}"

    @classmethod
    def forget(cls, alias: str, run_id: UUID) -> None:
        """Delete what is reserved for a run."""
        rows: Any = cls._default_manager.using(alias).filter(run_id=run_id)
        rows._raw_delete(alias)


class IdempotencyRecord(models.Model):
    """A request with an idempotency key that was carried out; a repeated request is not carried out again.

    Written in the same transaction as the request's effect, so that both or neither exist.
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


class CommitFence(models.Model):
    """A row that refers to nothing: while it exists, the database refuses to commit its transaction.

    A transactional handler works behind such a row, so that only the journal commits its writes, with the
    result. Its foreign key is checked at the COMMIT, as in all Django tables. The table is always empty.
    """

    nothing = models.ForeignKey("self", on_delete=models.DO_NOTHING, related_name="+", db_index=False)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"fence {self.pk}"


class Absence(models.Model):
    """A time in which a delegate gets the notices of a person as well. It gives the delegate no rights."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    # Keys of users as text and no foreign keys: users may live in another database.
    person_id = models.CharField(_("person"), max_length=NAME_LENGTH, db_index=True)
    delegate_id = models.CharField(_("delegate"), max_length=NAME_LENGTH)
    begins_at = models.DateTimeField(_("from"))
    ends_at = models.DateTimeField(_("until"))
    created_by_id = models.CharField(_("created by"), max_length=NAME_LENGTH, default="")

    class Meta:
        verbose_name = _("absence")
        verbose_name_plural = _("absences")
        default_permissions = ()
        permissions = (("plan_absence", _("Can plan the absences of others")),)

    def __str__(self) -> str:
        return f"{self.begins_at:%Y-%m-%d} to {self.ends_at:%Y-%m-%d}"


class Notification(models.Model):
    """One event for one notifier: written with the event itself, and tried until delivered or given up."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    event = models.CharField(_("event"), max_length=40)
    # Deleted with its run: a pruned run needs no announcement.
    run = models.ForeignKey(Run, verbose_name=_("run"), on_delete=CASCADE, related_name="notifications")
    approval_id = models.UUIDField(_("approval"), null=True)
    notifier = models.TextField(_("notifier"))
    # The key of the user to whom it goes; "" until the notifier has named users, or if it names none.
    recipient = models.CharField(_("recipient"), max_length=NAME_LENGTH, default="", db_default="")
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
            models.Index(fields=["notifier", "id"], condition=Q(sent_at=None), name="agentruns_unsent")
        ]

    def __str__(self) -> str:
        return f"{self.event} {self.id}"
