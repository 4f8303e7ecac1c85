"""Repair of folded columns from the journal, after something other than an append changed them."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from django.db import IntegrityError
from django.db.models import Model

from agentruns.exceptions import JournalConflictError
from agentruns.journal.verify import Problem, check
from agentruns.models import Run
from agentruns.models.statuses import RunStatus
from agentruns.services.runs.write import lock_session
from agentruns.utils.db import in_transaction
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.repair")


class Repaired(NamedTuple):
    """The columns that were rewritten (`changed`), and the problems that remain (`left`)."""

    changed: list[Problem]
    left: list[Problem]


def repair_session(alias: str, session_id: UUID) -> Repaired:
    """Rewrite the columns of a session, its runs and its approvals that differ from its journal: all or none.

    Never changes the journal, a lease or an epoch. Changes nothing if the journal itself is wrong, because
    columns cannot be folded from it, or if another row has a unique value that is to be restored. Raises
    Session.DoesNotExist, and JournalConflictError if a run changed meanwhile.
    """

    def action() -> Repaired:
        lock_session(alias, session_id)
        problems = check(session_id, alias, files=False)
        if any(problem.seq is not None for problem in problems):
            return Repaired([], problems)
        changed = [problem for problem in problems if problem.column]
        rows: dict[tuple[type[Model], Any, str], dict[str, Any]] = {}
        for problem in changed:
            row = (problem.model, problem.approval or problem.run or session_id, problem.status)
            rows.setdefault(row, {})[problem.column] = value_of(problem)
        # Ended runs first, because a session has at most one unfinished run at any moment.
        in_order = sorted(rows.items(), key=lambda item: item[1].get("status") not in Run.ENDED)
        for (model, pk, status), columns in in_order:
            # A lease may be taken without the session's lock, which makes a queued run a running one.
            where = {"status": status} if status else {}  # a session has none, and is locked
            if model._default_manager.using(alias).filter(pk=pk, **where).update(**columns) != 1:
                raise JournalConflictError(f"{model.__name__} {pk} is not {status} any more.")
        return Repaired(changed, [problem for problem in problems if not problem.column])

    try:
        repaired = in_transaction(alias, action)
    except IntegrityError:  # another row holds what is to be restored, such as the key of the session
        return Repaired([], check(session_id, alias, files=False))
    for problem in repaired.changed:  # without values, which may be sensitive; some columns say who may act
        what, pk = problem.model.__name__, problem.approval or problem.run or session_id
        logger.warning("Rewrote a column from the journal: %s=%s column=%s", what, pk, problem.column)
    return repaired


def value_of(problem: Problem) -> Any:
    """Find the correct value of a problem's column. For the status of an active run, this is queued."""
    if problem.column == "status" and problem.folded == RunStatus.ACTIVE:
        return Run.Status.QUEUED.value
    return problem.folded
