"""Requests of people about a run, from any process: cancel, pause, adopt, raise a budget, settle a doubt."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

from django.db.models import Count
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent, checked_limits, definition_difference, get_agent
from agentruns.conf import settings
from agentruns.engine import budgets, in_doubt
from agentruns.engine.rendering import renders
from agentruns.exceptions import AgentRunsError, RunStateError, SessionBusyError, UnknownAgentError
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.conversation import has_block, without
from agentruns.journal.read import definition_body
from agentruns.models import Definition, Message, Run
from agentruns.models.run import RunQuerySet
from agentruns.models.statuses import Orphan, Outcome, Verdict
from agentruns.services import permissions
from agentruns.services.runs import family
from agentruns.services.runs.requests import put_away, rendered, request_again
from agentruns.services.runs.waiting import lacking
from agentruns.services.runs.write import find_run, require_unfinished, write
from agentruns.tools import to_jsonable
from agentruns.utils import clock

ORPHAN_VERDICTS = tuple(Verdict)


def cancel_run(run_id: UUID | str, actor: Any = None, *, reason: str = "") -> Run:
    """Cancel a run: at once if no worker drives it, else before the worker's next tool starts.

    A request made at least AGENTRUNS_LEASE_SECONDS after the first ends the run at once. The outcome of the
    worker's call is then recorded as unknown. A result that arrives later is kept as evidence only. Child
    runs are cancelled as well, and the run ends after them. Raises PermissionDeniedError, and RunStateError
    if the run has ended.
    """
    return family.cancel(permissions.require(actor, "cancel", find_run(run_id)).pk, actor, reason)


def pause_run(run_id: UUID | str, actor: Any = None, *, reason: str = "") -> Run:
    """Pause a run: at once if no worker drives it, else at the worker's next step.

    Stops a reply in progress; `resume_run` requests it again. Child runs pause and go on with it. Raises
    PermissionDeniedError, and RunStateError if the run has ended, is paused already or is being cancelled.
    """
    return family.pause(permissions.require(actor, "pause", find_run(run_id)).pk, actor, reason)


def hold_run(run_id: UUID | str, actor: Any = None, *, reason: str = "") -> Run:
    """Pause a run for staff even if a worker has its lease, because leases are stale after a restore.

    Rows may be lost, so from then on every call counts as one that may have happened already. A tool with
    `reconcile` is reconciled even before a first attempt, and a call of a tool that declares nothing about
    its effects needs approval. Raises RunStateError if the run has ended or is held already,
    PermissionDeniedError.
    """
    run = permissions.require(actor, "unpause", find_run(run_id))

    def change(run: Run, batch: Batch) -> None:
        require_unfinished(run, _("held"))
        if batch.state.run.paused and batch.state.run.restored_seq == batch.state.run.seq:
            raise RunStateError(_("Run %(run)s is held already.") % {"run": run.pk})
        who, why = events.actor_ref(actor), reason or "held for staff"
        batch.add(events.RUN_PAUSED, events.RunPaused(actor=who, reason=why, restored=True))

    return write(run.pk, change, takes_lease=True, by_force=lambda state: True)


def adopt_definition(run_id: UUID | str, actor: Any = None, *, reason: str = "") -> Run:
    """Let a run continue under its agent's present definition. The journal records both hashes.

    Takes the run's version of the agent, or the highest version if that is gone. The run keeps the
    instructions and tools that functions of the agent made for it; functions that its old definition lacked
    are called. A started call is still judged by its tool's declaration at that time. Raises RunStateError if
    the run has ended, is live, or has that definition already; UnknownAgentError; RenderingError;
    PermissionDeniedError.
    """
    run = permissions.require(actor, "adopt", find_run(run_id))
    made: dict[str, Any] = {}
    if not run.is_ended and renders(newest := agent_again(run)):
        body = definition_body(settings.DATABASE, run.definition_id)
        has = {"instructions"} if not isinstance(body["instructions"], str) else set()
        if "tools_for" in body:
            has.add("tools")
        request = request_again(run, newest, actor, run_id=run.pk)
        made = put_away(rendered(request, has=has), run.session_id, has_text=False).rendered

    def change(run: Run, batch: Batch) -> None:
        require_unfinished(run, _("given another definition"))
        agent = agent_again(run)
        if not batch.epoch:
            text = _("Run %(run)s is live in another process; pause it first.")
            raise RunStateError(text % {"run": run.pk})
        if agent.definition_hash == run.definition_id:
            text = _("Run %(run)s has this definition of %(agent)s already.")
            raise RunStateError(text % {"run": run.pk, "agent": repr(agent.name)})
        definition = Definition(hash=agent.definition_hash, body=agent.definition())
        Definition.objects.using(settings.DATABASE).bulk_create([definition], ignore_conflicts=True)
        who, old, new = events.actor_ref(actor), run.definition_id, agent.definition_hash
        adopted = events.RunAdopted(actor=who, reason=reason, old=old, new=new, version=agent.version)
        adopted |= made  # type: ignore[typeddict-item]
        batch.add(events.RUN_ADOPTED, adopted)

    return write(run.pk, change, takes_lease=True)


def raise_budget(
    run_id: UUID | str,
    actor: Any = None,
    *,
    max_steps: int | None = None,
    token_budget: int | None = None,
    cost_budget: Decimal | float | str | None = None,
    deadline: timedelta | None = None,
    reason: str = "",
) -> Run:
    """Give a run higher limits, in place of the present ones; None leaves a limit as it is.

    A run that is paused because a budget is used up goes on, unless another budget is used up. A worker that
    drives the run learns of the limits at its next append. Raises RunStateError if the run has ended, if a
    limit is not higher than the present one and what is used, or if the run has no such limit; TypeError or
    ValueError for a limit of the wrong form, PermissionDeniedError.
    """
    run = permissions.require(actor, "raise_budget", find_run(run_id))
    given: dict[str, Any] = {"max_steps": max_steps, "token_budget": token_budget}
    given |= {"cost_budget": cost_budget, "deadline": deadline}
    given = {name: each for name, each in given.items() if each is not None}
    limits = checked_limits("raise_budget", **given)

    def change(run: Run, batch: Batch) -> None:
        require_unfinished(run, _("given a higher budget"))
        state, now = batch.state.run, partial(clock.now, settings.DATABASE)
        definition = definition_body(settings.DATABASE, run.definition_id)
        present = {each.name: each for each in budgets.budgets_of(definition, state, now)}
        if not limits or not limits.keys() <= present.keys():
            text = _("Run %(run)s has the limits %(limits)s. Name one of these to raise it.")
            raise RunStateError(text % {"run": run.pk, "limits": ", ".join(present)})
        for name, limit in limits.items():
            if Decimal(limit) <= max(present[name].used, present[name].limit):
                text = _("Run %(run)s: %(figures)s Give a limit that is higher than both.")
                raise RunStateError(text % {"run": run.pk, "figures": present[name]})
        who = events.actor_ref(actor)
        batch.add(events.BUDGET_RAISED, events.BudgetRaised(limits=limits, actor=who, reason=reason))
        if state.exhausted in present and not budgets.exceeded(definition, state, now):
            batch.resume(who, "budget raised")

    return write(run.pk, change, takes_lease=True)


def leave_out(
    run_id: UUID | str, seq: int, actor: Any = None, *, block: int | None = None, reason: str = ""
) -> Run:
    """Let later requests have a placeholder for row `seq` of a run's session: a reply, a result or a message.

    With `block`, leaves out only that place in the row's content, such as a file. The journal keeps the row.
    A run that is paused because the provider refuses the conversation goes on; after an ended run, the
    session's next task goes on without the row. Does nothing if the row is left out already. Writes to the
    session's unfinished run if there is one, and returns that run. Raises RunStateError if the session has no
    such row or block, or if a worker drives the run; SessionBusyError, PermissionDeniedError.
    """
    run = permissions.require(actor, "resume", find_run(run_id))
    its_runs = Run.objects.using(settings.DATABASE).filter(session_id=run.session_id)
    if (unfinished := its_runs.unfinished().exclude(pk=run.pk).first()) is not None:
        if not permissions.sees(actor, unfinished.pk):
            raise SessionBusyError(str(permissions.BUSY_UNSEEN))
        run = permissions.require(actor, "resume", find_run(unfinished.pk))
    omission = events.LeftOut(seq=seq, actor=events.actor_ref(actor), reason=reason)
    if block is not None:
        omission["block"] = block

    def change(run: Run, batch: Batch) -> None:
        if its_runs.unfinished().exclude(pk=run.pk).exists():
            raise SessionBusyError(_("A new run of the session has just begun. Try again."))
        if not (run.is_ended or batch.epoch):
            text = _("Run %(run)s is live in another process; pause or cancel it first.")
            raise RunStateError(text % {"run": run.pk})
        row = next((row for row in batch.state.conversation.rows if row.seq == seq), None)
        if row is None or not permissions.sees(actor, row.run_id) or not has_block(row, block):
            text = _("Run %(run)s cannot leave out row %(seq)s: it has no reply, result or message there.")
            raise RunStateError(text % {"run": run.pk, "seq": seq})
        if without(row, omission, str(run.pk)).payload == row.payload:
            return
        batch.closed = run.is_ended
        batch.add(events.LEFT_OUT, omission)
        if batch.state.run.refused:
            batch.resume(omission["actor"], "left out")

    return write(run.pk, change, takes_lease=True)


def agent_again(run: Run) -> Agent:
    """Find the agent in the run's version, or in the highest if that is gone. Raises UnknownAgentError."""
    try:
        return get_agent(run.agent, run.version)
    except UnknownAgentError:
        return get_agent(run.agent)


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

    return map(adopted, list(runs.filter(lacking()).order_by("created_at").values_list("pk", flat=True)))


def resolve_orphan(
    run_id: UUID | str,
    call_id: str,
    verdict: str,
    actor: Any,
    *,
    result: Any = None,
    evidence: str = "",
    channel: str = "service",
) -> Run:
    """Record the verdict on a call in doubt.

    "occurred" stores `result` as the call's result, "not_occurred" lets the call run again with the same key,
    "unknown" gives the model this outcome. If the model has this outcome already, "occurred" and
    "not_occurred" only end the doubt, and "unknown" leaves it. Raises RunStateError if the call is not in
    doubt, if the run is live, or if a late result contradicts "not_occurred"; ValueError for another verdict;
    PermissionDeniedError.
    """
    if verdict not in ORPHAN_VERDICTS:
        raise ValueError(f"A verdict is one of {', '.join(ORPHAN_VERDICTS)}, not {verdict!r}.")
    run = permissions.require(actor, "resolve", find_run(run_id))
    occurred = to_jsonable(result)[0]

    def change(run: Run, batch: Batch) -> None:
        call = batch.state.run.calls.get(call_id)
        doubt = batch.state.in_doubt.open.get(call_id)  # of a surfaced call without a clearing verdict
        tool = doubt.tool_name if doubt is not None and doubt.run_id == run.pk else None
        held = call is not None and call.is_open and call.orphan == Orphan.HELD
        if not held and tool is None:
            text = _("Call %(call)s of run %(run)s is not in doubt; there is nothing to decide.")
            raise RunStateError(text % {"call": call_id, "run": run.pk})
        if held and not run.is_ended and not batch.epoch:
            text = _("Run %(run)s is live in another process; wait until the call waits for a person.")
            raise RunStateError(text % {"run": run.pk})
        rows = Message.objects.using(settings.DATABASE)  # never a replica's, which may not have it yet
        late = rows.filter(run_id=run.pk, kind=events.LATE_RESULT, call_id=call_id)
        for row in late if held and verdict == Verdict.NOT_OCCURRED else ():
            if not row.payload.get("never_entered") and not row.payload.get("is_error"):
                text = _(
                    "Call %(call)s returned after its worker lost the run (row %(seq)s), so it did happen. "
                    "Give the verdict 'occurred' with that result."
                )
                raise RunStateError(text % {"call": call_id, "seq": row.seq})
        who = events.actor_ref(actor)
        payload = events.OrphanResolved(
            verdict=verdict, actor=who, reason=evidence, evidence=evidence, channel=channel
        )
        if held and call is not None:
            batch.add(events.ORPHAN_RESOLVED, payload, call=call, attempt=call.attempt)
            if verdict == Verdict.OCCURRED:
                batch.result(call, occurred, Outcome.OK, actor=events.actor_ref(actor))
            elif verdict == Verdict.UNKNOWN:
                in_doubt.surface(batch, call, actor)
        else:
            payload["result"] = occurred
            batch.add(events.ORPHAN_RESOLVED, payload, call_id=call_id, tool_name=tool or "")
            if (parent := batch.state.run.parent).get("deferred"):
                # The session that asked for the deferred call has, or will have, the same doubt.
                write(UUID(parent["run"]), partial(pass_on, payload=payload, tool=tool or ""), closed=True)

    def pass_on(run: Run, batch: Batch, payload: events.OrphanResolved, tool: str) -> None:
        batch.add(events.ORPHAN_RESOLVED, payload, call_id=call_id, tool_name=tool)

    held_now = run.status == Run.Status.ORPHANED
    return write(run.pk, change, takes_lease=held_now, closed=not held_now)
