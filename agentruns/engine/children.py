"""Child runs: the runs that calls of a run start, in the transaction of the rows that start the calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from agentruns.agents.agent import Agent, get_agent
from agentruns.engine import gate, rules
from agentruns.engine.driver import Driver
from agentruns.engine.rendering import begun, render, renders
from agentruns.engine.wakeup import CHANNEL
from agentruns.exceptions import RenderingError, UnknownAgentError
from agentruns.journal import events, payloads
from agentruns.journal.batch import Batch, Birth, SessionState
from agentruns.journal.copies import title_of
from agentruns.journal.fold import Call, RunState
from agentruns.journal.rulings import Ruling
from agentruns.models import Definition, Run, Session
from agentruns.models.event import CHILD, DEFERRED
from agentruns.models.parts import keyed
from agentruns.models.statuses import GateVerdict, Outcome, RunStatus
from agentruns.tools.options import REQUESTER
from agentruns.utils import json as canonical

MAX_DEPTH = 5
MILLIONTH = Decimal("0.000001")
MAX_FAMILY = 100


@dataclass(frozen=True, slots=True)
class Plan:
    """A child run that a call is to start; its ids are derived from the call, so that it starts once."""

    call: Call
    agent: Agent
    run_id: UUID
    session_id: UUID
    secret: str
    made: dict[str, Any]  # members of its first row
    task: events.User
    own: gate.Intent | None = None  # the deferred call that the child run makes, with its digest there
    trials: Iterable[Ruling] = ()  # about the deferred call, by rules on a dry run


def plan(driver: Driver, call: Call, beside: int) -> Plan | str:
    """Plan the child run of a call, or explain why the call may not start one; nothing is started yet.

    Calls the functions of the child's agent, and stores long texts in files. `beside` runs start with it.
    """
    run, alias, parent = driver.run, driver.alias, driver.run.parent
    if (depth := parent.get("depth", 0)) >= MAX_DEPTH:
        return f"this run is {depth} levels below the first run of its family, and there may be {MAX_DEPTH}"
    count = len(family(alias, UUID(parent["root"]) if parent else run.run_id)) + beside
    if count >= MAX_FAMILY:
        return f"its family has {count} runs, and there may be {MAX_FAMILY}"
    if call.deferred is not None:
        return _plan_deferred(driver, call)
    try:
        agent = get_agent(driver.agent.tools[call.tool].agent)
    except UnknownAgentError as error:
        return str(error).rstrip(".")
    if run.owner is None and any(tool.approvers == REQUESTER for tool in agent.tools.values()):
        return f"calls of agent {agent.name} are confirmed by the requester, and this run has no owner"
    run_id, session_id, secret = _derived(driver, call)
    text, made = call.arguments["task"], dict[str, Any]()
    if renders(agent):
        about = {"run_id": str(run_id), "session_key": str(session_id), "text": text}
        about |= {"scope": run.scope, "context": run.context, "actor": run.actor}
        try:
            made = render(agent, about, run.owner, origin=Run.objects.using(alias).get(pk=run.run_id))
        except RenderingError as error:
            return str(error).rstrip(".")
        kept = payloads.put(f"{session_id}/instructions", made.get("instructions", ""))
        made |= {"instructions": kept["content"], "stored": kept["stored"]} if kept else {}
    kept = payloads.put(f"{session_id}/input", text)
    task = events.User(content=[{"type": "text", "text": kept.get("content", text)}], giver=driver.agent.name)
    task |= {"stored": kept["stored"]} if kept else {}
    return Plan(call, agent, run_id, session_id, secret, made, task)


def _derived(driver: Driver, call: Call) -> tuple[UUID, UUID, str]:
    """Derive the id of a call's child run, the id of its session, and the session's secret."""
    # With the session's key, so that nobody can take the name of the child's session beforehand.
    key, secret = call.idempotency_key(driver.run.task), driver.state.secret
    run_id, session_id = (UUID(keyed(secret, f"{what} of {key}")[:32]) for what in ("run", "session"))
    return run_id, session_id, keyed(secret, f"secret of {key}")


def _plan_deferred(driver: Driver, call: Call) -> Plan | str:
    """Plan the child run that makes a deferred call, with its request for approval; calls users' code."""
    tool, run, rows = driver.agent.tools[call.tool], driver.run, driver.state.conversation.rows
    replies = (row.payload for row in rows if row.kind == events.ASSISTANT)
    asked_before = {one["id"]: one["arguments"] for reply in replies for one in reply["calls"]}
    for waiting, result in driver.state.deferred.items():
        # Not by the digest that was stored: an erasure in the session replaces the key of its digests.
        earlier = gate.call_digest(driver.state.secret, result.tool_name, asked_before[result.call_id])
        if earlier == gate.call_digest(driver.state.secret, call.tool, call.arguments):
            why = f"this call waits already, reference {waiting}"
            return f"{why}; its outcome comes as a message from the program"
    run_id, session_id, secret = _derived(driver, call)
    own = gate.Intent(call.id, call.provider_id, call.tool, call.arguments, by_tool=True)
    own.digest = gate.call_digest(secret, call.tool, call.arguments)
    why = call.deferred or (gate.requires(driver, tool, call.id, call.arguments) if call.adopted else "")
    if why:
        own.verdict, own.approval = GateVerdict.ASK, gate.request(driver, tool, own, why, secret)
    trials = [each for answer in rules.choose(driver, [own]) for each in answer.trials]
    for each in trials:
        each.run_id = run_id
    text = f"{tool.title(call.arguments)} (a deferred call of run {run.run_id})"
    made = {} if run.tools is None else {"tools": run.tools}
    task = events.User(content=[{"type": "text", "text": text}], giver="")
    return Plan(call, driver.agent, run_id, session_id, secret, made, task, own, trials)


def share(run: RunState, definition: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Divide what is left of a run's budgets among the child runs that its reply has yet to start.

    Build the limits of the next one, by name; `own` is its definition. A limit is at least one token or a
    millionth, because a run without any budget left has to pause.
    """
    limits: dict[str, Any] = {}
    for name in ("token_budget", "cost_budget"):
        if (limit := run.limits.get(name, definition.get(name))) is None:
            continue
        given = [call.event.get("limits", {}) for call in run.open_children() if call.event]
        taken = sum(Decimal(each.get(name, 0)) for each in given)
        children = [call for call in run.open_calls() if call.child and call.deferred is None]
        waiting = sum(not call.is_pending for call in children)
        most = (Decimal(limit) - run.used(name) - taken) / waiting
        most = most if own.get(name) is None else min(most, Decimal(own[name]))
        limits[name] = max(int(most), 1) if name == "token_budget" else f"{max(most, MILLIONTH):.6f}"
    return limits


def family(alias: str, run_id: UUID) -> set[UUID]:
    """Find the ids of a run and of all runs below it."""
    found, last = {run_id}, {run_id}
    while last:
        last = {*Run.objects.using(alias).filter(parent__in=last).values_list("pk", flat=True)} - found
        found |= last
    return found


def add(batch: Batch, plan: Plan, parents: dict[str, Any]) -> None:
    """Add the child run of a plan to the batch that starts its call, and the row that the call awaits it.

    `parents` is the definition of the run, whose budgets the child run shares.
    """
    run, agent = batch.state.run, plan.agent
    text = plan.call.arguments["task"] if plan.own is None else plan.task["content"][0]["text"]
    root, depth = run.parent.get("root", str(run.run_id)), run.parent.get("depth", 0) + 1
    parent = {"run": str(run.run_id), "call": plan.call.id, "root": root, "depth": depth}
    facts: dict[str, Any] = {"actor": run.actor, "owner": run.owner, "requesters": run.requesters}
    facts |= {"session": str(plan.session_id), "scope": run.scope, "parent": parent}
    first_row = begun(agent, plan.made, run.context, run.priority, facts)
    limits = share(run, parents, agent.definition()) if plan.own is None else {}
    if limits:
        first_row["limits"] = limits
    first = Batch(SessionState(plan.session_id, plan.run_id, plan.secret))
    if plan.own is not None:
        first_row["parent"]["deferred"] = run.session
    if batch.state.read:
        first_row["parent"]["untrusted"] = [*batch.state.read]
    first.add(events.RUN_STARTED, first_row)
    first.add(events.USER, plan.task)
    if (own := plan.own) is not None:  # as a reply that no model wrote
        used = {"type": "tool_use", "id": own.provider_id, "name": own.tool, "input": own.arguments}
        reply: events.Assistant = {
            "content": [used], "calls": [own.record()], "read": first.state.next_seq - 1,
            "sent": first.state.conversation.fingerprint(), "stop_reason": "tool_use",
            "model": "", "request_id": "", "usage": {},
        }  # fmt: skip
        first.add(events.ASSISTANT, reply)
        gate.write(first, [own])
        batch.rulings += plan.trials
    state, title = first.state, title_of(text)
    given = state.run.given()
    session = Session(
        id=plan.session_id,
        key=first_row["session"],
        title=title,
        secret=plan.secret,
        next_seq=state.next_seq,
        head=state.head,
        created_at=first.at,
        **{name: given[name] for name in ("owner_id", "owner_name", "scope")},
    )
    columns = {**state.run.columns(), **given, "created_at": first.at, "updated_at": first.at}
    if state.run.status == RunStatus.ACTIVE:
        columns["status"] = Run.Status.QUEUED.value
    child = Run(id=plan.run_id, session=session, input=text, title=title, **columns)
    definition = Definition(hash=agent.definition_hash, body=agent.definition(), created_at=first.at)
    batch.births.append(Birth(child, definition, first, CHANNEL))
    call, name = run.calls[plan.call.id], CHILD if plan.own is None else DEFERRED
    awaited = events.EventAwaited(name=name, key=str(plan.run_id), until=None)
    awaited |= {"limits": limits} if limits else {}
    batch.add(events.EVENT_AWAITED, awaited, call=call, attempt=call.attempt)
    if plan.own is not None:
        what = "its event" if plan.own.approval is None else "a person's decision"
        deferred = events.Deferral(run=str(plan.run_id), digest=call.digest)
        text = (
            f"This call waits for {what}, reference {plan.run_id}. Nothing is known to have happened yet. Go "
            "on without its outcome, and do not repeat the call: a message from the program will tell the "
            "outcome."
        )
        batch.result(call, text, Outcome.OK, deferred=deferred)


def finish(batch: Batch) -> None:
    """End the run of a deferred call that has its result, whatever that is, without asking the model."""
    results = (row for row in batch.state.conversation.rows if row.kind == events.TOOL_RESULT)
    payload = next(results).payload
    # Customers read an output, and nothing that staff or the program wrote.
    is_public = payload["outcome"] == Outcome.OK and "actor" not in payload
    content = payload["content"] if is_public else payload["outcome"]
    text = content if isinstance(content, str) else canonical.dumps(content)
    batch.add(events.RUN_COMPLETED, events.RunCompleted(output=text))
