"""Rewriting folded columns from the journal after something other than an append changed them."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import Model

from agentruns.exceptions import JournalConflictError
from agentruns.journal.fold import ACTIVE
from agentruns.journal.verify import Problem, check
from agentruns.models import Approval, Run
from agentruns.services.write import lock_session
from agentruns.utils.db import in_transaction


class Repaired(NamedTuple):
    """The columns that were rewritten, and the problems that remain."""

    changed: list[Problem]
    left: list[Problem]


def repair_session(alias: str, session_id: UUID) -> Repaired:
    """Rewrite the wrong folded columns of a session's runs and approvals from its journal, all or none.

    Never touches the journal, a lease or an epoch. A session whose journal itself is wrong is left alone,
    since its fold means nothing. Raises Session.DoesNotExist.
    """

    def action() -> Repaired:
        lock_session(alias, session_id)
        found = check(session_id, alias, files=False)
        if any(problem.seq is not None for problem in found):
            return Repaired([], found)
        changed = [problem for problem in found if problem.column]
        _rewrite(alias, changed)
        return Repaired(changed, [problem for problem in found if not problem.column])

    return in_transaction(alias, action)


def value_of(problem: Problem) -> Any:
    """Return the new value of a column; an active run becomes a queued one."""
    if problem.column == "status" and problem.folded == ACTIVE:
        return Run.Status.QUEUED.value
    return problem.folded


def _rewrite(alias: str, changed: list[Problem]) -> None:
    rows: dict[tuple[type[Model], Any, str], dict[str, Any]] = {}
    for problem in changed:
        model_of: type[Model] = Approval if problem.approval else Run
        row = (model_of, problem.approval or problem.run, problem.status)
        rows.setdefault(row, {})[problem.column] = value_of(problem)
    # Ended ones first: a session has one unfinished run at any moment.
    for (model, pk, status), columns in sorted(
        rows.items(), key=lambda item: item[1].get("status") not in Run.ENDED
    ):
        # A lease may be taken without the session's lock, which makes a queued run a running one.
        if model._default_manager.using(alias).filter(pk=pk, status=status).update(**columns) != 1:
            raise JournalConflictError(f"{model.__name__} {pk} is not {status} any more.")
