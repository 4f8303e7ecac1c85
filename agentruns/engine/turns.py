"""The order of claims, the limits of agents and the rates of models, which all processes share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import Case, DateTimeField, ExpressionWrapper, F, IntegerField, Value, When
from django.db.models.functions import Coalesce, Greatest, Now

from agentruns.agents.agent import get_agent, registered
from agentruns.conf import settings
from agentruns.exceptions import UnknownAgentError
from agentruns.models import Control, Run
from agentruns.models.run import SERVED, TURN, RunQuerySet
from agentruns.models.statuses import ACTIVE, Constant, Priority
from agentruns.providers.base import Model
from agentruns.providers.names import names_of
from agentruns.utils import clock
from agentruns.utils.db import in_transaction, later

AGEING = timedelta(minutes=10)  # of waiting, after which a run has the next higher priority
MOST = 1000  # runs in the list that says how many are before a run
LEAST = 0.05  # seconds that a run waits for a rate at least
Room = dict[str, tuple[int, str]]  # by agent: how many more runs may be driven now, and what limits them

# `due` also has the runs that are being driven. They take the first turns, so that their scope waits longer.
IN_TURN = """WITH due AS ({due}),
  of_agent AS (SELECT due.*, ROW_NUMBER() OVER (PARTITION BY scope, agent, priority
    ORDER BY is_live DESC, aged, created_at, id) AS nth FROM due),
  of_scope AS (SELECT of_agent.*, ROW_NUMBER() OVER (PARTITION BY scope
    ORDER BY is_live DESC, aged, nth, created_at, id) AS turn FROM of_agent),
  limited AS (SELECT of_scope.*, ROW_NUMBER() OVER (PARTITION BY agent, is_live
    ORDER BY aged, turn, created_at, id) AS place FROM of_scope)
SELECT id FROM {last} WHERE is_live = 0 AND {fits} ORDER BY aged, turn, created_at, id LIMIT %s"""


def in_turn(due: RunQuerySet, most: int, room: Room | None = None) -> list[UUID]:
    """List the ids of at most `most` of the runs `due`, in the order in which they are claimed.

    The higher priority comes first; it rises by one for each AGEING that a run waits. Within a priority,
    scopes take turns. Within a scope, agents take turns, and runs of an agent that began with different
    priorities. Older runs come first. `room` limits the number of runs of some agents.
    """
    connection, now = connections[due.db], clock.now(due.db)
    # A filter of its own, because only then SQLite uses an index for the status.
    rows: Any = (due | Run.objects.using(due.db).live()).filter(status__in=ACTIVE).order_by()
    rows = rows.annotate(since=Greatest("updated_at", Coalesce("not_before", "updated_at")))
    rises = (When(since__lte=now - each * AGEING, then=Constant(each)) for each in (2, 1))
    aged = F("priority") - Case(*rises, default=Constant(0), output_field=IntegerField())
    is_live = When(lease_expires_at__gt=Now(), then=Constant(1))
    rows = rows.annotate(
        aged=Greatest(aged, Constant(Priority.HIGH.rank), output_field=IntegerField()),
        is_live=Case(is_live, default=Constant(0), output_field=IntegerField()),
    )
    columns = rows.values("id", "scope", "agent", "priority", "created_at", "aged", "is_live")
    sql, values = columns.query.get_compiler(connection=connection).as_sql()
    last, fits, limits = "of_scope", "1 = 1", list[str | int]()
    for name, (left, _) in (room or {}).items():
        last, fits = "limited", f"{fits} AND (agent <> %s OR place <= %s)"
        limits += [name, left]
    with connection.cursor() as cursor:
        cursor.execute(IN_TURN.format(due=sql, last=last, fits=fits), [*values, *limits, most])
        return [UUID(str(run_id)) for (run_id,) in cursor.fetchall()]


def limit_of(name: str) -> int | None:
    """Find how many runs of an agent may be driven at once; None if there is no limit."""
    with suppress(UnknownAgentError):
        return get_agent(name).max_concurrent
    return None


def is_full(alias: str, agent: str) -> bool:
    """Check whether an agent's limit of runs at once is reached; costs no query if the agent has no limit.

    Locks the agent's row of Control, so that other claims of the agent wait until the open transaction ends.
    """
    if (most := limit_of(agent)) is None:
        return False
    Control.objects.using(alias).stamp(Control.SLOTS + agent)  # an UPDATE, which any isolation level notices
    return Run.objects.using(alias).live().filter(agent=agent).count() >= most


def room_of(alias: str) -> Room:
    """Map each agent with a limit or a rate to the number of runs that may start now, and what limits it."""
    agents = [get_agent(name) for name in {agent.name for agent in registered()}]
    room, live, due = Room(), Counter[str](), {}
    if any(agent.max_concurrent for agent in agents):
        live.update(Run.objects.using(alias).live().values_list("agent", flat=True))
    if settings.RATE:
        rows = Control.objects.using(alias).filter(name__startswith=Control.RATE)
        due = dict(rows.values_list("name", "seen_at"))
    for agent in agents:
        if most := agent.max_concurrent:
            why = f"the agent's limit of {most} runs at once is reached."
            room[agent.name] = most - live[agent.name], why
        if rate := rate_of(agent.model):
            every, burst = settings.rates[rate]
            now = clock.now(alias)
            ahead = (due.get(Control.RATE + rate, now) - now).total_seconds()
            free = int(burst - max(0, ahead) / every)
            free += int(1 / every) if free else 0  # those of the next second, too
            mine = free, _why(rate)
            room[agent.name] = min(room.get(agent.name, mine), mine)
    return room


def rate_of(model: Model | str) -> str:
    """Find the name in AGENTRUNS_RATE that limits a model: the model's, else its provider's, else ""."""
    return next((name for name in names_of(model) if name in settings.rates), "")


def spend(alias: str, model: Model | str) -> tuple[float, str]:
    """Count a request to a model toward its rate; return the seconds to wait and why, or (0, "") if counted.

    A rate has a row with a time. Each request moves the time on, by the distance between evenly spaced
    requests. If the time is too far ahead of the database's clock, the request has to wait (GCRA).
    """
    if not (rate := rate_of(model)):
        return 0, ""
    every, burst = settings.rates[rate]
    rows, ahead = Control.objects.using(alias), (burst - 1) * every
    row = rows.filter(name=Control.RATE + rate)
    next_due = Greatest("seen_at", Now()) + Value(timedelta(seconds=every))

    def count() -> float:
        free = row.filter(seen_at__lte=later(ahead))
        if free.update(seen_at=ExpressionWrapper(next_due, output_field=DateTimeField())):
            return 0
        if (due_at := row.values_list("seen_at", flat=True).first()) is None:
            # In the past: SQLite writes the time of a whole second in two ways, one of which is greater.
            new = Control(name=Control.RATE + rate, seen_at=later(-LEAST))
            rows.bulk_create([new], ignore_conflicts=True)
            return count()
        return max((due_at - clock.now(alias)).total_seconds() - ahead, LEAST)

    seconds = in_transaction(alias, count)
    return seconds, _why(rate) if seconds else ""


def reasons(alias: str, runs: Iterable[Run]) -> dict[UUID, str]:
    """Map each due run that has to wait to the reason: a limit, a rate, or how many runs are before it."""
    due = [run for run in runs if run.status == Run.Status.QUEUED and not run.blocked_reason]
    due = [run for run in due if run.not_before is None or run.not_before <= clock.now(alias)]
    if not due:
        return {}
    order, room = in_turn(Run.objects.using(alias).runnable().filter(SERVED), MOST), room_of(alias)
    before, found = {run_id: number for number, run_id in enumerate(order)}, dict[UUID, str]()
    for run in due:
        left, why = room.get(run.agent, (1, ""))
        number = before.get(run.pk, MOST)
        if left <= 0 or number:
            text = f"{number} before it." if number < MOST else f"at least {MOST} before it."
            found[run.pk] = TURN + (text if left > 0 else why)
    return found


def _why(rate: str) -> str:
    """Build the reason why a run waits for a rate, such as "anthropic is limited to 50/m."."""
    return f"{rate} is limited to {settings.RATE[rate]}."
