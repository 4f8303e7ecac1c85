"""The past of a run: its state at any row, and the replay of its replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple
from uuid import UUID

from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent, get_agent
from agentruns.conf import settings
from agentruns.exceptions import RunStateError, UnknownAgentError
from agentruns.journal import conversation, events
from agentruns.journal.batch import SessionState
from agentruns.journal.connection import require_no_transaction
from agentruns.journal.events import Row, timestamp
from agentruns.journal.fold import RunState, text_of
from agentruns.journal.masking import Mask, mask_of
from agentruns.journal.payloads import instructions_of
from agentruns.journal.read import definition_body, rows_until, session_rows
from agentruns.journal.verify import check
from agentruns.models import Run
from agentruns.models.statuses import Orphan
from agentruns.providers.attachments import limits_of
from agentruns.providers.base import Model, ModelReply, ModelRequest, call_model
from agentruns.providers.names import model_identity, resolve
from agentruns.services.runs.write import find_run
from agentruns.tools import InvalidArguments
from agentruns.tools.card import MASK
from agentruns.tools.excerpts import Bounds
from agentruns.utils.json import Difference, dumps, first_difference, loads, passes

OWN = "own"  # the model of the agent as it is registered now


def state_at(run_id: UUID | str, seq: int) -> RunState:
    """Compute the state of a run right after row `seq` of its session's journal.

    Raises DurableRunNotFoundError, and RunStateError if `seq` is before the run's first or after its last
    row.
    """
    return session_at(run_id, seq).run


def session_at(run_id: UUID | str, seq: int) -> SessionState:
    """Compute the state of the run's session right after row `seq`. Raises as `state_at`."""
    run = find_run(run_id)
    state = SessionState(run.session_id, run.pk)
    for row in rows_until(settings.DATABASE, run, seq):
        state.apply(row)
    return state


def record(state: RunState, mask: Mask) -> dict[str, Any]:
    """Build a JSON object of a run's state, with sensitive values masked. The caller redacts the object."""
    columns = state.columns()
    return {
        "run": str(state.run_id),
        "seq": state.seq,
        "agent": state.agent,
        **{name: columns[name] for name in ("version", "status", "step", "usage")},
        **{name: mask.json(columns[name]) for name in ("output", "error")},
        "definition": state.definition,
        "paused": mask.json(state.paused),
        "pause_requested": state.pause_requested,
        "raised_limits": state.limits,
        "cancel_requested": state.cancel_requested,
        "model_failures": state.failures,
        "calls": [
            {
                "id": call.id,
                "tool": call.tool,
                "arguments": mask.arguments(call.tool, call.arguments),
                "digest": call.digest,
                "idempotency_key": call.idempotency_key(state.task),
                "attempt": call.attempt,
                "started_at": timestamp(call.started_at) if call.started_at else None,
                "outcome": call.outcome or None,
                "in_doubt": call.in_doubt or (call.orphan == Orphan.HELD and call.is_open),
                "approval": (card := call.approval)
                and {"id": str(card.id), "status": card.status, "approved_by": card.names},
            }
            for call in state.calls.values()
        ],
    }


class ReplayStep(NamedTuple):
    """A recorded reply (`then`), and the reply that a model gives now (`now`; None without a model)."""

    seq: int
    step: int
    then: dict[str, Any]
    now: dict[str, Any] | None = None


@dataclass(slots=True)
class ReplayReport:
    """The steps of a replay up to the first difference, which is at row `seq` (None: no difference)."""

    run_id: UUID
    model: str | None = None
    steps: list[ReplayStep] = field(default_factory=list)
    seq: int | None = None
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)
    mask: Mask = field(default_factory=Mask)

    @property
    def is_equal(self) -> bool:
        """Check whether the replay found no difference."""
        return self.difference is None

    def record(self) -> dict[str, Any]:
        """Build a JSON object of the report, with sensitive values masked. The caller redacts the object."""
        difference = self.difference
        return {
            "run": str(self.run_id),
            "model": self.model,
            "equal": self.is_equal,
            "steps": [
                {**step._asdict(), "then": self.masked(step.then), "now": self.masked(step.now)}
                for step in self.steps
            ],
            "difference": difference
            and {
                "seq": self.seq,
                "path": difference.path,
                "then": self._shown(difference.path, difference.then),
                "now": self._shown(difference.path, difference.now),
            },
            "notes": [self.mask.json(note) for note in self.notes],
        }

    def masked(self, value: Any, name: str = "") -> Any:
        """Mask sensitive arguments in the JSON value of a member `name`, and sensitive values elsewhere."""
        # An input that is no object has no names, and may hold anything.
        unnamed = bool(self.hidden) and name == "input" and value is not None and not isinstance(value, dict)
        if unnamed or name in self.hidden:
            return MASK
        if isinstance(value, dict):
            return {name: self.masked(each, name) for name, each in value.items()}
        return [self.masked(each) for each in value] if isinstance(value, list) else self.mask.json(value)

    @property
    def hidden(self) -> frozenset[str]:
        """The names of sensitive arguments."""
        return frozenset(name for names in self.mask.arguments_of.values() for name in names)

    def _shown(self, path: str, value: Any) -> Any:
        return MASK if passes(path, self.hidden) else self.masked(value, path.rpartition(".")[2])


def replay_run(
    run_id: UUID | str,
    *,
    model: Model | str | None = None,
    observations: Mapping[int, Any] | None = None,
    limit: int | None = None,
) -> ReplayReport:
    """Replay at most `limit` replies of a run and report the first difference. Execute and store nothing.

    Without a model, compares the requests and calls that today's agent and code would make with the recorded
    ones. With a model (an object, a name, or "own" for the agent's present model), sends it the recorded
    conversations and compares its replies; this is possible only outside of a transaction. `observations`
    maps the row number of a result to the content that replaces the recorded content. Raises RunStateError if
    such a row is no result of the session, or if rows of the conversation were erased; UnknownAgentError for
    "own" if the agent is not registered; DurableRunNotFoundError, NotDurableError, ProviderError,
    PayloadError.
    """
    alias, run = settings.DATABASE, find_run(run_id)
    if model is not None:
        require_no_transaction(alias)
    report = ReplayReport(run.pk, mask=mask_of(run))

    @cache
    def agent_now(version: str) -> Agent | None:
        with suppress(UnknownAgentError):
            return get_agent(run.agent, version)
        try:
            agent = get_agent(run.agent)
        except UnknownAgentError:
            text = _("Agent %(agent)s is not registered here; only the journal was looked at.")
            report.notes.append(text % {"agent": repr(run.agent)})
            return None
        text = _("Version %(old)s is not registered any more; compared with %(new)s.")
        report.notes.append(text % {"old": version, "new": agent.version})
        return agent

    agent = agent_now(run.version)
    if model == OWN:
        if agent is None:
            facts = {"run": run.pk, "agent": repr(run.agent)}
            raise UnknownAgentError(_("Run %(run)s: its agent %(agent)s is not registered here.") % facts)
        model = agent.model
    report.model = None if model is None else model_identity(model)
    rows = session_rows(alias, run.session_id)
    if gone := [str(row.seq) for row in rows if row.is_erased and row.kind in conversation.KINDS]:
        text = _("Run %(run)s cannot be replayed: rows of its session were erased: %(rows)s.")
        raise RunStateError(text % {"run": run.pk, "rows": ", ".join(gone)})
    report.notes += [str(problem) for problem in check(run.session_id, alias)]
    own = (row for row in rows if row.run_id == run.pk and events.COPIED not in row.payload)
    # No model wrote the reply of a deferred call.
    replies = {row.seq for row in own if row.kind == events.ASSISTANT and row.payload["model"]}
    for number, one in enumerate(_recorded(run, rows, replies, observations or {})):
        if number == limit:
            seen = {"limit": limit, "replies": len(replies)}
            report.notes.append(_("Only the first %(limit)d of %(replies)d replies were looked at.") % seen)
            break
        agent = agent_now(one.made.version)
        report.mask.add(agent.definition() if agent else {})
        reply = None if model is None else _ask(one, model, run, agent)
        both = (each for each in (one.reply, reply) if each is not None)
        texts = ({"text": text_of(each.content), **_decision(each)} for each in both)
        report.steps.append(ReplayStep(one.seq, one.step, *texts))
        for seq, difference in _differences(one, agent, reply):
            if difference is not None:
                report.seq, report.difference = seq, difference
                return report
    return report


@dataclass(slots=True)
class _Recorded:
    """A recorded reply, its request, and the definition of its agent at that time."""

    seq: int
    payload: events.Assistant
    step: int
    body: dict[str, Any]
    messages: list[dict[str, Any]]
    replaced: list[dict[str, Any]]  # `messages` with replaced observations
    altered_at: int | None
    is_as_sent: bool
    made: RunState  # has the version, and the instructions and tools that were made for the run

    @property
    def reply(self) -> ModelReply:
        return ModelReply(self.payload["content"], self.payload.get("stop_reason"))

    @property
    def given(self) -> ModelReply:
        """The reply as the model gave it, before its calls were mended."""
        calls = iter(self.payload["calls"])
        content = [
            block | next(calls).get("original", {}) if block.get("type") == "tool_use" else block
            for block in self.reply.content
        ]
        return ModelReply(content, self.reply.stop_reason)


def _recorded(
    run: Run, rows: list[Row], replies: set[int], observations: Mapping[int, Any]
) -> Iterator[_Recorded]:
    body_of = cache(partial(definition_body, settings.DATABASE))
    then = SessionState(run.session_id, run.pk)
    now = SessionState(run.session_id, run.pk) if observations else then
    altered_at = None
    if unknown := {*observations} - {row.seq for row in rows if row.kind == events.TOOL_RESULT}:
        raise RunStateError(f"Run {run.pk} has no result of a call at row {min(unknown)}.")
    for row in rows:
        if row.seq in replies:
            state, body, read = then.run, body_of(then.run.definition), row.payload.get("read")
            limits = limits_of(body["model"], body.get("fallback") or body["model"])
            messages = then.conversation.messages(read, limits)
            yield _Recorded(
                row.seq,
                row.payload,
                step=state.inherited + state.step,
                body=body,
                messages=messages,
                replaced=now.conversation.messages(read, limits) if observations else messages,
                altered_at=altered_at,
                is_as_sent=then.was_sent_for(row) is not False,
                made=state,
            )
        then.apply(row)
        other = row
        if row.kind == events.TOOL_RESULT and row.seq in observations:
            altered = {**row.payload, "content": _plain(observations[row.seq])}
            altered.pop("stored", None)
            if first_difference(row.payload, altered) is not None:
                altered_at = altered_at or row.seq
            other = row._replace(payload=altered)
        if now is not then:
            now.apply(other)


def _differences(
    one: _Recorded, agent: Agent | None, reply: ModelReply | None
) -> Iterator[tuple[int, Difference | None]]:
    """Compare a recorded reply with the new `reply`, or with today's agent if `reply` is None.

    Yields (seq, difference) for each comparison; the difference is None if the compared values are equal.
    """
    seq = one.seq
    if reply is not None:
        yield seq, first_difference(_decision(one.given), _plain(_decision(reply)))
        return
    if not one.is_as_sent:
        text = _("the conversation that the journal adds up to now")
        yield seq, Difference("$.messages", _("the conversation that was sent"), text)
    if agent is not None:
        yield seq, first_difference(_head(one.body), _plain(_head(agent.definition())))
    if one.altered_at is not None:
        yield one.altered_at, first_difference(one.messages, one.replaced, "$.messages")
    if agent is None:
        return
    # The arguments of the reply's calls as recorded, and as today's tools complete or refuse them. Calls of
    # tools that the agent lacks are left out.
    payload = one.payload
    used = [block for block in payload["content"] if block.get("type") == "tool_use"]
    then, now = [], []
    for call, block in zip(payload["calls"], used, strict=False):
        tool = agent.tools.get(call["tool"])
        if tool is None or not call["digest"]:  # a call refused at the gate has no effective arguments
            continue
        then.append({"name": call["tool"], "arguments": call["arguments"]})
        try:
            given = call.get("original", {}).get("input", block["input"])
            effective = tool.effective(given)
            if first_difference(call["arguments"], effective) is not None:
                # Recorded values of defaults, such as the time, are kept.
                with suppress(InvalidArguments):
                    again = tool.effective(_filled(given, call["arguments"]))
                    if first_difference(call["arguments"], again) is None:
                        effective = again
            now.append({"name": call["tool"], "arguments": effective})
        except InvalidArguments as error:
            now.append({"name": call["tool"], "refused": str(error)})
    yield seq, first_difference({"calls": then}, {"calls": now})


def _head(body: dict[str, Any]) -> dict[str, Any]:
    """Select the parts of a definition that every request to the model sends again.

    The tools are a dict by name, so that a comparison ignores their order.
    """
    parts = ("name", "description", "input_schema")
    return {
        "model": body["model"],
        "system": body["instructions"],
        "params": body["model_params"],
        "tools": {name: {part: tool[part] for part in parts} for name, tool in body.get("tools", {}).items()},
        "output_schema": body.get("output"),
    }


def _filled(given: Any, recorded: Any) -> Any:
    """Add to `given` the recorded arguments that it lacks, at any depth of dicts."""
    if not isinstance(given, dict) or not isinstance(recorded, dict):
        return given
    kept = {name: value for name, value in recorded.items() if name not in given}
    return kept | {name: _filled(value, recorded.get(name)) for name, value in given.items()}


def _ask(one: _Recorded, model: Model | str, run: Run, agent: Agent | None) -> ModelReply:
    head, order = _head(one.body), list(agent.tools) if agent else []
    if agent is not None and _head(agent.definition())["params"] == head["params"]:
        head["params"] = dict(agent.model_params)  # a definition keeps no secret
    chosen = head["tools"] if "tools_for" not in one.body else one.made.tools or ()
    order += sorted({*head["tools"]} - {*order})  # tools that the agent does not have now come last
    names = [name for name in order if name in head["tools"] and name in chosen]
    request = ModelRequest(
        model=model_identity(model),
        system=head["system"] if isinstance(head["system"], str) else instructions_of(one.made),
        messages=Bounds.of_tools(agent.tools if agent else {}, names).apply(one.replaced),
        tools=[head["tools"][name] for name in names],
        params=head["params"],
        run_id=str(run.pk),
        step=one.step,
        output_schema=head["output_schema"],
    )
    return call_model(resolve(model), request)


def _decision(reply: ModelReply) -> dict[str, Any]:
    """Extract a reply's calls and stop reason. Leave out its text, which may differ at any time."""
    used = (block for block in reply.content if block.get("type") == "tool_use")
    calls = [{"name": block.get("name"), "input": block.get("input")} for block in used]
    return {"calls": calls, "stop_reason": reply.stop_reason}


def _plain(value: Any) -> Any:
    """Convert a value as the journal does, so that tuples become lists and keys become texts."""
    return loads(dumps(value))
