"""The state of a run, folded from its journal rows without any query."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import quote
from uuid import UUID

from agentruns.agents import prices
from agentruns.journal import events
from agentruns.journal.cards import CallApproval
from agentruns.journal.doubts import did_nothing
from agentruns.journal.events import Actor, Row
from agentruns.models.rule import BY_RULE
from agentruns.models.statuses import (
    ApprovalStatus,
    GateVerdict,
    Orphan,
    Outcome,
    Priority,
    RunStatus,
    Verb,
    Verdict,
)
from agentruns.utils import json as canonical

WAITING = (RunStatus.AWAITING_APPROVAL, RunStatus.WAITING, RunStatus.ORPHANED, RunStatus.PAUSED)
DECIDED: dict[str, str] = {  # verb that ends a wait without letting the call run -> the approval's status
    Verb.DENY: ApprovalStatus.DENIED,
    Verb.ANSWER: ApprovalStatus.ANSWERED,
    Verb.EXPIRE: ApprovalStatus.EXPIRED,
}
TOKENS = ("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
MOST_TOKENS = 2**63 - 1
# Members of a row that a Call or a CallApproval has under the same name
OF_CALL = ("id", "provider_id", "tool", "arguments", "digest", "parallel", "child", "deferred")
OF_CARD = (
    "digest", "title", "why", "holds", "held", "required", "approvers", "risk", "only_answers", "settles",
    "escalate_to",
)  # fmt: skip


@dataclass(slots=True)
class Call:
    """A call of the last reply, with its approval, its attempts and its outcome so far."""

    id: str
    provider_id: str
    tool: str
    step: int
    ordinal: int
    arguments: dict[str, Any]
    digest: str
    parallel: bool = False
    child: bool = False  # it starts a child run
    deferred: str | None = None  # the child run is the call itself: why its gate asks, "" if it does not
    verdict: str = GateVerdict.RUN
    edited: bool = False
    adopted: bool = False  # the gate's verdict is that of a definition before the run's present one
    approval: CallApproval | None = None
    attempt: int = 0
    key: str = ""  # idempotency key of its first attempt
    started_at: datetime | None = None
    timeout: float | None = None  # seconds of that attempt
    declares: str = ""  # by its tool when it started: decides what happens if it is in doubt
    awaits: str = ""  # name of the event, with the call's own key, that may bring its result
    untrusted: bool = False  # that attempt reads text of outsiders
    event: events.EventAwaited | None = None  # for which it waits, since its handler returned
    returned_late: bool = False  # its handler returned without error after the worker had lost the run
    may_be_lost: bool = False  # an earlier start may stand in rows that a restore has taken back
    asked_since: int = 0  # people who approved the call, knowing that its start may be lost
    orphan: str = ""  # held | retry | reconcile | surfaced | not_occurred
    in_doubt: bool = False  # its result is an error that may have come after the effect
    raised: str = ""  # error of that attempt's handler, until the call is reconciled
    outcome: str = ""

    @property
    def is_open(self) -> bool:
        """Check whether the call has no result yet."""
        return not self.outcome

    @property
    def is_started(self) -> bool:
        """Check whether the call has no result although its effect may have happened."""
        if self.declares == "transactional" and not self.orphan:  # without its result nothing was committed
            return False
        if self.orphan == Orphan.NOT_OCCURRED and not self.returned_late:
            return False
        return self.is_open and (self.attempt > 0 or self.orphan in (Orphan.HELD, Orphan.RECONCILE))

    @property
    def may_have_happened(self) -> bool:
        """Check whether the open call was started, or may have been started in rows that are lost."""
        if self.event is not None and self.event.get("harmless"):
            return False
        is_asked = self.verdict != GateVerdict.REFUSE and not self.decision
        return self.is_started or (self.is_open and self.may_be_lost and is_asked)

    @property
    def is_contradicted(self) -> bool:
        """Check whether the handler returned although a verdict says that the call did not happen."""
        return self.orphan == Orphan.NOT_OCCURRED and self.returned_late

    @property
    def is_waiting(self) -> bool:
        """Check whether the call waits for a person's approval or verdict."""
        if self.orphan == Orphan.HELD:
            return True
        if self.verdict != GateVerdict.ASK:
            return False
        return self.approval is None or self.approval.status == ApprovalStatus.PENDING

    @property
    def is_pending(self) -> bool:
        """Check whether the call waits for an event; its handler has returned, so it is not in doubt."""
        return self.is_open and self.event is not None

    @property
    def decision(self) -> str:
        """The approval's status if the call may not run: "denied", "answered" or "expired"; else ""."""
        if self.approval is not None and self.approval.status in DECIDED.values():
            return self.approval.status
        return ""

    def idempotency_key(self, task: UUID | str) -> str:
        """Build the key by which an outside system recognises the call, the same for every attempt.

        `task` is the run's `RunState.task`.
        """
        return self.key or canonical.digest([str(task), self.step, self.ordinal, self.tool, self.digest])


@dataclass(slots=True)
class RunState:
    """The state of a run, folded from its rows: `on_...` folds a row of the kind in its name."""

    run_id: UUID
    seq: int = 0
    first_seq: int = 0  # its `run_started`
    agent: str = ""
    version: str = ""
    definition: str = ""
    actor: Actor | None = None
    owner: Actor | None = None
    session: str = ""  # key
    scope: str = ""
    key: str = ""  # idempotency key
    origin: dict[str, Any] = field(default_factory=dict)  # events.Origin, or empty
    parent: dict[str, Any] = field(default_factory=dict)  # events.Parent, or empty
    priority: int = 0  # rank
    context: dict[str, Any] = field(default_factory=dict)
    requesters: list[str] = field(default_factory=list)  # ids of all who asked for it
    tools: list[str] | None = None  # chosen by the agent's `tools_for`, if it has one
    instructions: str | None = None  # made by the agent's function, if it has one
    stored: tuple[int, events.StoredFile] | None = None  # row and file of the full instructions
    started_at: datetime | None = None
    inherited: int = 0  # replies of its origin, up to the fork
    step: int = 0
    stop_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)  # tokens by kind; "cost" as exact digits
    calls: dict[str, Call] = field(default_factory=dict)  # of the last reply, in emission order
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)  # (tool, digest) -> reason
    failures: int = 0  # model attempts that failed since the last reply
    failure: str = ""  # error of the last such attempt
    pauses: int = 0  # consecutive `pause_turn` replies
    corrections: int = 0  # answers sent back because they did not fit
    cancel_requested: bool = False
    cancel_requested_at: datetime | None = None
    pause_requested: bool = False
    paused: str = ""  # the reason
    refused: bool = False  # paused because the provider refuses the conversation
    limits: dict[str, Any] = field(default_factory=dict)  # in place of the definition's budgets, by name
    spent: dict[str, Any] = field(default_factory=dict)  # by child runs that have ended: budgets, by name
    exhausted: str = ""  # name of the used up budget that paused the run
    low: frozenset[str] = frozenset()  # names of budgets that a notice was sent about
    last_usage: dict[str, Any] = field(default_factory=dict)  # of the last reply
    acted: frozenset[str] = frozenset()  # started calls that are not known to have had no effect
    restored_at: datetime | None = None  # held because rows of the journal are lost, or may be
    restored_seq: int = 0  # number of the row that held the run so
    task: str = ""  # the run's name in the keys of its calls
    ended: str = ""
    output: str | None = None
    error: str = ""
    status: str = RunStatus.ACTIVE
    waited: timedelta = timedelta()
    waiting_since: datetime | None = None

    def apply(self, row: Row) -> None:
        """Fold one more row of the run; skip kinds that are unknown here, and rows that a fork copied."""
        self.seq = row.seq
        if row.kind not in _APPLY or events.COPIED in row.payload:
            return
        _APPLY[row.kind](self, row, row.payload)
        # A worker that has to stop pauses the run.
        stops = self.cancel_requested or (self.pause_requested and not self.paused)
        open_calls = self.open_calls()
        if self.ended:
            self.status = self.ended
        elif (
            self.cancel_requested
            and self.open_children()
            and not any(call.is_started and not call.child for call in open_calls)
        ):
            self.status = RunStatus.WAITING  # it ends after its child runs
        elif stops or not (self.paused or (open_calls and not self.next_calls())):
            self.status = RunStatus.ACTIVE
        elif any(call.orphan == Orphan.HELD for call in open_calls):
            self.status = RunStatus.ORPHANED
        elif self.paused:
            self.status = RunStatus.PAUSED
        else:
            asks = any(call.is_waiting for call in open_calls)
            self.status = RunStatus.AWAITING_APPROVAL if asks else RunStatus.WAITING
        if self.status in WAITING:
            self.waiting_since = self.waiting_since or row.created_at
        elif self.waiting_since:
            self.waited += row.created_at - self.waiting_since
            self.waiting_since = None

    def open_calls(self) -> list[Call]:
        """List the calls of the last reply that have no result yet."""
        return [call for call in self.calls.values() if call.is_open]

    def open_children(self) -> list[Call]:
        """List the open calls that have started a child run."""
        return [call for call in self.open_calls() if call.child and call.is_pending]

    def next_calls(self) -> list[Call]:
        """List the open calls that may run now.

        After a call that waits, only parallel calls may; right after calls that wait for child runs, calls
        that start further child runs may as well.
        """
        if self.paused or self.ended or (self.cancel_requested and self.open_children()):
            return []
        blocked, has_child, ready = False, False, []
        for call in self.open_calls():
            if call.is_pending and call.child:
                has_child = True
            elif call.is_waiting or call.is_pending:
                blocked = True
            elif call.parallel or not (blocked or (has_child and not call.child)):
                ready.append(call)
            else:
                blocked = True
        return ready

    def is_after_unknown(self, call: Call) -> bool:
        """Check whether a call must be cancelled because an earlier call has the outcome `unknown`.

        All later calls of the reply have been cancelled except calls whose start may be lost. Such a call is
        cancelled once it is known that the call has not run. False for a parallel call.
        """
        is_known = call.orphan == Orphan.NOT_OCCURRED or (not call.orphan and call.asked_since > 0)
        if call.attempt or not call.may_be_lost or not is_known or call.parallel:
            return False
        earlier = (each for each in self.calls.values() if each.ordinal < call.ordinal)
        return any(each.outcome == Outcome.UNKNOWN for each in earlier)

    def elapsed(self, now: datetime) -> timedelta:
        """Compute the time since the run's start, without the time it waited or was paused."""
        if self.started_at is None:
            return timedelta()
        waiting = now - self.waiting_since if self.waiting_since else timedelta()
        return max(timedelta(), now - self.started_at - self.waited - waiting)

    @property
    def tokens(self) -> int:
        """The number of tokens read and written, of all kinds that a budget counts."""
        return sum(self.usage.get(kind, 0) for kind in TOKENS)

    def used(self, budget: str) -> Decimal:
        """Compute how much of `token_budget` or `cost_budget` the run and its ended child runs have used."""
        own = self.tokens if budget == "token_budget" else self.usage.get("cost", "0")
        return Decimal(own) + Decimal(self.spent.get(budget, 0))

    @property
    def cost(self) -> Decimal | None:
        """The cost of all replies, rounded and limited to fit its column; None if no reply had a price."""
        return prices.stored(Decimal(self.usage["cost"])) if "cost" in self.usage else None

    def columns(self) -> dict[str, Any]:
        """Build the folded columns of Run; `status` is "active" for both queued and running."""
        same = ("status", "version", "step", "usage", "cost", "output", "error")
        return {
            **{name: getattr(self, name) for name in same},
            "definition_id": self.definition,
            "requesters": f" {' '.join(map(quote, self.requesters))} " if self.requesters else "",
            "tokens": min(max(self.tokens, 0), MOST_TOKENS),
            "pending_calls": [call.id for call in self.open_calls()],
        }

    def given(self, imported_into: str | None = None) -> dict[str, Any]:
        """Build the columns of Run that its first row sets for good.

        `imported_into` is the scope of an imported session: its runs get this scope and no owner id.
        """
        owner, origin = self.owner or {"id": None, "name": ""}, self.origin
        whose, scope = (owner["id"], self.scope) if imported_into is None else (None, imported_into)
        columns = {"owner_id": whose, "owner_name": owner["name"], "scope": scope, "context": self.context}
        columns |= {"origin_id": origin.get("run"), "origin_seq": origin.get("seq")}
        columns |= {"parent_id": self.parent.get("run")}
        return {**columns, "agent": self.agent, "idempotency_key": self.key, "priority": self.priority}

    def _add_usage(self, payload: events.Assistant | events.ModelFailed) -> None:
        for name, amount in (payload.get("usage") or {}).items():
            if name != "cost" and isinstance(amount, int) and not isinstance(amount, bool):
                self.usage = {**self.usage, name: self.usage.get(name, 0) + amount}
        if (cost := payload.get("cost")) is not None:
            self.usage = {**self.usage, "cost": prices.added(self.usage.get("cost", "0"), cost)}

    def on_run_started(self, row: Row, payload: events.RunStarted) -> None:
        self.first_seq = row.seq
        self.agent, self.version = payload["agent"], payload["version"]
        self.definition, self.requesters = payload["definition"], payload.get("requesters", [])
        self.actor, self.owner = payload.get("actor"), payload.get("owner")
        self.session = payload.get("session", "")
        self.key = payload.get("idempotency_key", payload.get("key_hash", ""))
        self.task = payload.get("task") or str(row.run_id)
        self.scope, self.context = payload.get("scope", ""), payload.get("context", {})
        due = events.moment(payload.get("not_before"))
        self.started_at = max(row.created_at, due) if due else row.created_at
        self.origin = payload.get("origin") or {}  # type: ignore[assignment]
        self.parent = payload.get("parent") or {}  # type: ignore[assignment]
        self.priority = {each.value: each.rank for each in Priority}.get(payload.get("priority", ""), 0)
        self.inherited, self.limits = self.origin.get("steps", 0), payload.get("limits", {})
        if self.origin.get("restored"):
            self.restored_at, self.restored_seq = row.created_at, row.seq
        self._rendered(row, payload)

    def _rendered(self, row: Row, payload: events.RunStarted | events.RunAdopted) -> None:
        self.tools = payload.get("tools", self.tools)
        if "instructions" in payload:
            self.instructions = payload["instructions"]
            self.stored = (row.seq, payload["stored"]) if "stored" in payload else None

    def on_user(self, row: Row, payload: events.User) -> None:
        self.corrections += payload.get("reason") == events.OUTPUT_INVALID
        self.requesters = [*dict.fromkeys([*self.requesters, *events.askers(payload)])]
        if (about := payload.get("about")) and about["outcome"] == Outcome.DENIED:
            self.refusals[about["tool"], about["digest"]] = about["reason"]

    def on_assistant(self, row: Row, payload: events.Assistant) -> None:
        self.step += 1
        self.failures, self.failure, self.stop_reason = 0, "", payload.get("stop_reason")
        self.pauses = self.pauses + 1 if self.stop_reason == "pause_turn" else 0
        self.last_usage = payload.get("usage") or {}
        self._add_usage(payload)
        self.calls = {
            call["id"]: Call(
                **{name: call[name] for name in OF_CALL if name in call},  # type: ignore[literal-required]
                step=self.step,
                ordinal=ordinal,
                # A verdict of newer code lets nothing run.
                verdict=call["verdict"] if call["verdict"] in [*GateVerdict] else GateVerdict.REFUSE,
                may_be_lost=self.restored_at is not None,
            )
            for ordinal, call in enumerate(payload["calls"])
        }

    def on_approval_requested(self, row: Row, payload: events.ApprovalRequested) -> None:
        call = self.calls[row.call_id]
        if call.verdict == GateVerdict.RUN:  # the gate of a definition that was adopted since asks
            call.verdict = GateVerdict.ASK
        ends = events.moment(payload.get("expires_at"))
        call.approval = CallApproval(
            id=UUID(payload["approval"]),
            **{name: payload[name] for name in OF_CARD if name in payload},  # type: ignore[literal-required]
            asked=payload["why"],
            requested_at=row.created_at,
            lifetime=ends - row.created_at if ends else None,
            expires_at=ends,
            remind_at=events.moment(payload.get("remind_at")),
            escalate_at=events.moment(payload.get("escalate_at")),
        )

    def on_approval_decided(self, row: Row, payload: events.ApprovalDecided) -> None:
        call = self.calls[row.call_id]
        if (approval := call.approval) is None:
            return
        approval.actor, approval.reason = payload.get("actor"), payload.get("reason", "")
        approval.decided_at = row.created_at
        channel = payload.get("channel", "")  # absent from journals of old releases
        approval.rule = channel.removeprefix(BY_RULE) if channel.startswith(BY_RULE) else ""
        if payload["verb"] == Verb.APPROVE:
            if "arguments" in payload:  # an edit has a new digest, and voids earlier approvals
                call.arguments, call.digest, call.edited = payload["arguments"], payload["digest"], True
                approval.digest, approval.title = payload["digest"], payload["title"]
                approval.holds, approval.held = payload.get("holds"), payload.get("held", "")
                approval.given, approval.names, approval.by = [], [], {}
                approval.editor = (approval.actor or events.PROGRAM)["id"]
            actor = approval.actor or events.PROGRAM
            call.asked_since = (0 if "arguments" in payload else call.asked_since) + call.may_be_lost
            approval.given.append(actor["id"])
            approval.names.append(actor["name"])
            approval.channels[actor["id"]] = payload["channel"]
            approval.by |= {actor["id"]: actor["by"]} if "by" in actor else {}
            is_enough = len(approval.given) >= approval.required
            approval.status = ApprovalStatus.APPROVED if is_enough else ApprovalStatus.PENDING
            return
        if (status := DECIDED.get(payload["verb"])) is None:  # a verb of newer code
            return
        approval.status, approval.text = status, payload.get("text", "")
        if status == ApprovalStatus.DENIED and not approval.rule:  # a rule decides anew each time
            self.refusals[(call.tool, call.digest)] = approval.reason

    def on_approval_extended(self, row: Row, payload: events.ApprovalExtended) -> None:
        if approval := self.calls[row.call_id].approval:
            approval.expires_at = events.moment(payload["expires_at"])

    def on_approval_reminded(self, row: Row, payload: events.ApprovalReminded) -> None:
        if approval := self.calls[row.call_id].approval:
            approval.remind_at = None

    def on_approval_escalated(self, row: Row, payload: events.ApprovalEscalated) -> None:
        if approval := self.calls[row.call_id].approval:
            approval.remind_at = approval.escalate_at = None

    def on_approval_voided(self, row: Row, payload: events.ApprovalVoided) -> None:
        call = self.calls[row.call_id]
        if (approval := call.approval) is None:
            return
        if "renews" in payload:  # nothing of the start was committed
            call.key = ""
            self.acted -= {call.id}
        approval.void(payload)

    def on_tool_started(self, row: Row, payload: events.ToolStarted) -> None:
        call = self.calls[row.call_id]
        call.attempt, call.started_at, call.orphan, call.raised = row.attempt, row.created_at, "", ""
        call.declares, call.timeout = payload["declares"], payload.get("timeout")
        call.awaits, call.event = payload.get("awaits", ""), None
        call.untrusted = payload.get("untrusted", False)
        call.key = call.key or payload["key"]
        if payload["declares"] != "safe_to_retry" and call.deferred is None:
            self.acted |= {row.call_id}
        if call.approval is not None:
            call.approval.status = ApprovalStatus.CONSUMED

    def on_event_awaited(self, row: Row, payload: events.EventAwaited) -> None:
        call = self.calls[row.call_id]
        call.event, call.orphan = payload, ""

    def on_tool_result(self, row: Row, payload: events.ToolResult) -> None:
        call = self.calls[row.call_id]
        call.outcome, call.orphan, call.in_doubt = payload["outcome"], "", payload.get("in_doubt", False)
        for name, amount in payload.get("spent", {}).items():
            self.spent = {**self.spent, name: prices.added(str(self.spent.get(name, 0)), str(amount))}
        if did_nothing(payload):
            self.acted -= {row.call_id}
        unused = (ApprovalStatus.PENDING, ApprovalStatus.APPROVED)
        if call.approval is not None and call.approval.status in unused:
            call.approval.status = ApprovalStatus.CANCELLED

    def on_model_failed(self, row: Row, payload: events.ModelFailed) -> None:
        self.failures += 1
        self.failure = "{type}: {text}".format(**payload["error"])
        self._add_usage(payload)

    def on_late_result(self, row: Row, payload: events.LateResult) -> None:
        call = self.calls.get(row.call_id)
        if call is not None and not payload.get("never_entered") and not payload.get("is_error"):
            call.returned_late = True

    def on_orphan_found(self, row: Row, payload: events.OrphanFound) -> None:
        call = self.calls[row.call_id]
        call.orphan, call.raised = payload["action"], payload.get("raised", call.raised)
        call.untrusted = call.untrusted or payload.get("untrusted", False)
        if call.orphan == Orphan.RECONCILE:
            call.event = None

    def on_orphan_resolved(self, row: Row, payload: events.OrphanResolved) -> None:
        if did_nothing(payload):
            self.acted -= {row.call_id}
        if (call := self.calls.get(row.call_id)) is None or payload["verdict"] not in events.CLEARING:
            return
        call.in_doubt = False
        if call.is_open and payload["verdict"] == Verdict.NOT_OCCURRED:
            call.orphan = Orphan.NOT_OCCURRED

    def on_run_resumed(self, row: Row, payload: events.RunResumed) -> None:
        if payload.get("unpause"):
            self.paused, self.pause_requested, self.refused, self.exhausted = "", False, False, ""
        if self.started_at and row.created_at < self.started_at:  # somebody starts it before its time
            self.started_at, self.waiting_since = row.created_at, None

    def on_run_pause_requested(self, row: Row, payload: events.RunPauseRequested) -> None:
        self.pause_requested = True

    def on_run_paused(self, row: Row, payload: events.RunPaused) -> None:
        self.paused, self.pause_requested = payload.get("reason") or "paused", False
        self.refused, self.exhausted = payload.get("refused", False), payload.get("budget", "")
        if payload.get("restored"):
            self.restored_at, self.restored_seq = row.created_at, row.seq
            for call in self.open_calls():
                call.may_be_lost, call.asked_since = True, 0
                if call.orphan == Orphan.NOT_OCCURRED:  # a later attempt may be among the lost rows
                    call.orphan = ""

    def on_run_cancel_requested(self, row: Row, payload: events.RunCancelRequested) -> None:
        self.cancel_requested = True
        self.cancel_requested_at = self.cancel_requested_at or row.created_at

    def on_run_adopted(self, row: Row, payload: events.RunAdopted) -> None:
        self.definition, self.version = payload["new"], payload["version"]
        for call in self.open_calls():
            call.adopted = True
        self._rendered(row, payload)

    def on_run_completed(self, row: Row, payload: events.RunCompleted) -> None:
        self.ended, self.paused, self.output = RunStatus.COMPLETED, "", payload.get("output")

    def on_run_failed(self, row: Row, payload: events.RunFailed) -> None:
        error = payload.get("error")
        self.ended, self.paused = RunStatus.FAILED, ""
        self.error = f"{error['type']}: {error['text']}" if error else ""

    def on_run_cancelled(self, row: Row, payload: events.RunCancelled) -> None:
        self.ended, self.paused = RunStatus.CANCELLED, ""

    def on_budget_low(self, row: Row, payload: events.BudgetLow) -> None:
        self.low |= {payload["budget"]}

    def on_budget_raised(self, row: Row, payload: events.BudgetRaised) -> None:
        self.limits = {**self.limits, **payload["limits"]}
        self.low -= payload["limits"].keys()


def fold(run_id: UUID, rows: Iterable[Row]) -> RunState:
    """Compute the state of a run from its rows in order; skip rows of other runs."""
    state = RunState(run_id)
    for row in (row for row in rows if row.run_id == run_id):
        state.apply(row)
    return state


def text_of(content: list[dict[str, Any]]) -> str:
    """Join the text blocks of a reply."""
    return "".join(str(block.get("text", "")) for block in content if block.get("type") == "text")


# Change nothing: a delivery's next row has the result, and an erased row is folded with neutral values.
NEUTRAL = (events.EVENT_DELIVERED, events.PAYLOAD_ERASED, events.LEFT_OUT)
# Each other kind has its method in RunState; a kind without one fails this import.
_APPLY: dict[str, Callable[[RunState, Row, Any], None]] = {
    kind: getattr(RunState, f"on_{kind}") for kind in events.KINDS if kind not in NEUTRAL
}
