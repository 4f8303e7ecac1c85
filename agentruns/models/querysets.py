"""Parts of querysets: statuses, constants in the SQL text, the order of risks."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Case, When

from agentruns.models.statuses import RunStatus

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
