"""Runs that a deploy blocks, the reasons, and the adoption of the present definition by all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.db.models import Count, Q

from agentruns.agents.agent import definition_difference, registered
from agentruns.exceptions import AgentRunsError, UnknownAgentError
from agentruns.journal import events
from agentruns.journal.read import definition_body
from agentruns.models import Run
from agentruns.models.querysets import UNFINISHED
from agentruns.models.run import SERVED, RunQuerySet
from agentruns.services.runs.control import adopt_definition, agent_again
from agentruns.services.runs.waiting import FOR_PEOPLE, STALLED

MOST = 1000  # runs that are counted


def lacking() -> Q:
    """Build the condition for unfinished runs whose definition no agent of this process has."""
    hashes = [agent.definition_hash for agent in registered()]
    return Q(status__in=UNFINISHED, session__imported_at=None) & ~Q(definition_id__in=hashes)


def blocked() -> Q:
    """Build the condition for runs that nobody drives, and that this process or the last worker cannot."""
    rests = Q(status__in=(*FOR_PEOPLE, Run.Status.QUEUED)) | STALLED
    is_recorded = Q(status=Run.Status.QUEUED) & ~SERVED
    return Q(status__in=UNFINISHED, session__imported_at=None) & ((rests & lacking()) | is_recorded)


def by_definition(runs: RunQuerySet) -> list[dict[str, Any]]:
    """Count the unfinished `runs` that this code cannot continue by definition, and explain why it cannot.

    `runs` of a result are the counts by status, `parts` the parts of the definition that differ. `adopts` is
    the version that the runs would adopt, None if the agent is not registered.
    """
    found: dict[str, dict[str, Any]] = {}
    columns = ("agent", "version", "definition_id", "status")
    counts = runs.filter(lacking()).values_list(*columns).annotate(Count("pk")).order_by(*columns)
    for agent, version, definition, status, count in counts:
        about = {"agent": agent, "version": version, "definition": definition, "runs": {}}
        found.setdefault(definition, about)["runs"][status] = count
    for about in found.values():
        about |= {"parts": [], "adopts": None}
        try:
            new = agent_again(Run(agent=about["agent"], version=about["version"]))
            old, about["adopts"] = definition_body(runs.db, about["definition"]), new.version
            about["parts"] = definition_difference(old, new.definition())
            about["reason"] = f"version {new.version} differs in {', '.join(about['parts'])}"
        except (UnknownAgentError, LookupError) as error:
            about["reason"] = str(error)
    return list(found.values())


def adopt_all(runs: RunQuerySet, actor: Any = None, *, reason: str = "") -> Iterator[tuple[UUID, str]]:
    """Let each of `runs` that this code cannot continue adopt its agent's definition, oldest first.

    Yields each run's id with the reason why the run did not adopt, or "". A refusal stops no other run.
    Raises TypeError if the actor is neither a user nor None.
    """
    events.is_program(actor)

    def adopted(run_id: UUID) -> tuple[UUID, str]:
        try:
            adopt_definition(run_id, actor, reason=reason)
        except AgentRunsError as error:
            return run_id, str(error)
        return run_id, ""

    lost = runs.filter(lacking()).order_by("created_at")
    return map(adopted, list(lost.values_list("pk", flat=True)))
