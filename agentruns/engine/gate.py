"""The gate: the verdict on each call of a reply, given once, before any of the calls runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from agentruns.agents.agent import Agent
from agentruns.conf import settings
from agentruns.engine import holds
from agentruns.engine.driver import Driver
from agentruns.engine.leases import why_off
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.fold import Call
from agentruns.journal.policy import Reminders, ask
from agentruns.models import Message, Run
from agentruns.models.parts import keyed
from agentruns.models.statuses import ApprovalStatus, GateVerdict, Outcome
from agentruns.providers.base import ModelReply
from agentruns.tools import InvalidArguments, Tool
from agentruns.tools.card import one_line
from agentruns.tools.options import REQUESTER
from agentruns.utils import json as canonical
from agentruns.utils.bounds import MAX_CALLS, MAX_DEPTH, is_deeper
from agentruns.utils.ids import uuid7
from agentruns.utils.redaction import conceal

DENIED = (
    "Not executed. This is not a failure: a person decided against it. "
    "Do not repeat this call. Reason: {reason}"
)
DENIED_BY_RULE = (
    "Not executed. This is not a failure: a standing rule of the operators forbids it. "
    "Do not repeat this call. Reason: {reason}"
)
NOBODY = "Not executed: this call needs a person's approval, and nobody can be asked in a stateless run."
CUT_OFF = "Not executed: the reply ended with stop_reason {stop!r}, so this call may be incomplete."
GONE = " (or may have: that run is gone)"
TOO_MANY = (
    "Not executed: the reply has {count} calls, and at most {most} are taken from one. Neither this call nor "
    "those after it, which are left out here, were executed. Make what is still needed in later replies."
)
REQUIRES = "{tool} requires approval."
OUTWARD = (
    "{tool} sends or pays outside, and this conversation holds text that outsiders wrote, read by {readers}."
)
OFF = "the tool is switched off for now"
IN_DOUBT = "An earlier call of {tool} in this session has an unknown outcome; it may have happened: {calls}."

_ID = re.compile("[a-zA-Z0-9_-]+")
_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")


@dataclass(slots=True)
class Intent:
    """A call of a reply with the gate's verdict: run, ask (`approval`) or refuse (`refusal`)."""

    id: str
    provider_id: str
    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    parallel: bool = False
    child: bool = False
    deferred: str | None = None
    verdict: str = GateVerdict.RUN
    original: dict[str, Any] = field(default_factory=dict)
    approval: events.ApprovalRequested | None = None
    by_tool: bool = False  # only the tool itself asks, so that a standing rule may answer
    refusal: dict[str, Any] | None = None

    def record(self) -> events.AskedCall:
        """Build the form in which the `assistant` row stores the call."""
        names = ("id", "provider_id", "tool", "arguments", "digest", "parallel", "verdict")
        kept: Any = {name: getattr(self, name) for name in names}
        kept |= {"child": True} if self.child else {}
        kept |= {} if self.deferred is None else {"deferred": self.deferred}
        kept |= {"original": self.original} if self.original else {}
        record: events.AskedCall = kept
        return record

    def refuse(self, content: str, outcome: str, *, is_error: bool) -> None:
        """Set the verdict `refuse`, with the result that the model gets instead."""
        self.verdict = GateVerdict.REFUSE
        self.refusal = {"content": content, "outcome": outcome, "is_error": is_error}


def call_digest(secret: str, tool: str, arguments: dict[str, Any]) -> str:
    """Compute the HMAC of a tool and its effective arguments with the session's secret."""
    if not secret:
        raise AssertionError("A state that is only looked at has no key for digests.")
    return keyed(secret, canonical.dumps({"tool": tool, "arguments": arguments}))


def judge(
    driver: Driver, reply: ModelReply
) -> tuple[list[dict[str, Any]], list[Intent], list[dict[str, Any]]]:
    """Build a reply's content as it can be sent back, an intent for each call, and a list of calls left out.

    Mends the id, name or input of a `tool_use` if no provider would accept it; the intent has the original.
    Refuses the first call after MAX_CALLS with one error for all later calls. Leaves the later calls out,
    because each would need a result of its own.
    """
    content: list[dict[str, Any]] = []
    intents: list[Intent] = []
    left_out: list[dict[str, Any]] = []
    count = sum(block.get("type") == "tool_use" for block in reply.content)
    earlier, seen = driver.state.conversation.tool_use_ids, set[str]()
    for block in reply.content:
        if block.get("type") != "tool_use":
            content.append(block)
            continue
        if len(intents) > MAX_CALLS:
            left_out.append({**block, "input": _storable(block.get("input"))})
            continue
        provider_id, name, given = block.get("id"), block.get("name"), block.get("input")
        is_id = isinstance(provider_id, str) and _ID.fullmatch(provider_id)
        if not is_id or provider_id in earlier or provider_id in seen:
            provider_id = f"toolu_{uuid7().hex}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            name = re.sub("[^a-zA-Z0-9_-]", "_", str(name))[:64] or "_"
        fits = isinstance(given, dict) and not is_deeper(given, MAX_DEPTH)
        mended: dict[str, Any] = {"id": provider_id, "name": name, "input": given if fits else {}}
        seen.add(mended["id"])
        intent = Intent(str(uuid7()), mended["id"], mended["name"])
        intent.original = {key: _storable(block.get(key)) for key in mended if block.get(key) != mended[key]}
        if len(intents) == MAX_CALLS:
            intent.refuse(TOO_MANY.format(count=count, most=MAX_CALLS), Outcome.ERROR, is_error=True)
        else:
            _decide(driver, intent, block.get("name"), block.get("input"), reply.stop_reason)
        content.append({**block, **mended})
        intents.append(intent)
    return content, intents, left_out


def _storable(value: Any) -> Any:
    """Convert a value to a form that a row can store: a value that is nested too deeply becomes text."""
    if not is_deeper(value, MAX_DEPTH):
        return value
    try:
        return canonical.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return "(nested too deeply to be written)"


def write(batch: Batch, intents: list[Intent]) -> None:
    """Add a reply's requests for approval and its refusals to the batch with the `assistant` row."""
    for intent in intents:
        call = batch.state.run.calls[intent.id]
        if intent.approval is not None:
            batch.add(events.APPROVAL_REQUESTED, intent.approval, call=call)
        if intent.refusal is not None:
            batch.result(call, **intent.refusal)


def _decide(driver: Driver, intent: Intent, name: Any, raw: Any, stop_reason: str | None) -> None:
    """Set the verdict on a call, and its request for approval or the result that refuses the call."""
    if stop_reason != "tool_use":
        intent.refuse(CUT_OFF.format(stop=stop_reason), Outcome.ERROR, is_error=True)
        return
    # Find the tool by the original name, because a mended name may be that of another tool.
    tool = driver.tools.get(name) if isinstance(name, str) else None
    if tool is None:
        known = ", ".join(sorted(driver.tools)) or "none"
        text = f"Not executed: there is no tool {one_line(repr(name))}. Tools: {known}."
        intent.refuse(text, Outcome.ERROR, is_error=True)
        return
    if is_off(driver, tool.name):
        intent.refuse(f"Not executed: {OFF}. Nothing happened.", Outcome.ERROR, is_error=True)
        return
    try:
        intent.arguments = tool.effective(raw)
    except InvalidArguments as error:
        intent.refuse(f"Not executed: {error}", Outcome.ERROR, is_error=True)
        return
    conceal([intent.arguments.get(each) for each in tool.sensitive])
    intent.digest = call_digest(driver.state.secret, tool.name, intent.arguments)
    intent.parallel, intent.child = tool.parallel, bool(tool.agent)
    earlier = driver.run.refusals.get((tool.name, intent.digest))
    if earlier is not None:
        intent.refuse(DENIED.format(reason=earlier), Outcome.DENIED, is_error=False)
        return
    # Calls in doubt, because of which the next call of a tool without a declaration needs approval.
    doubts = driver.state.in_doubt.open.values() if tool.recovery == "nothing" else ()
    doubted = [result for result in doubts if result.tool_name == tool.name]
    why = ""
    if doubted:
        calls = ", ".join(f"call {result.call_id} of run {result.run_id}" for result in doubted)
        why = IN_DOUBT.format(tool=tool.name, calls=calls)
    elif since := run_since(driver, tool):
        why = since
    elif driver.run.restored_at and tool.recovery == "nothing":
        why = (
            f"This run was held because rows of its journal were lost, or may be. {tool.name} may have been "
            "called in those rows: find out before you approve."
        )
    if why:
        why = f"{warned(driver, tool)} {why}".strip()
    else:
        why = requires(driver, tool, intent.id, intent.arguments)
        intent.by_tool = True
        # Not in a child run, whose parent waits for it and passes no message on.
        if tool.deferred and (why or tool.awaits) and driver.store.durable and not driver.run.parent:
            intent.child, intent.deferred = True, why
            return
    if why and not driver.store.durable:
        intent.refuse(NOBODY, Outcome.DENIED, is_error=False)
    elif why:
        intent.verdict = GateVerdict.ASK
        intent.approval = request(driver, tool, intent, why)
        # The approval settles the doubts about calls whose handler raised.
        if raised := [result.call_id for result in doubted if result.payload.get("in_doubt")]:
            intent.approval["settles"] = raised


def requires(driver: Driver, tool: Tool, call_id: str, arguments: dict[str, Any]) -> str:
    """Explain why a call needs approval by its tool's declaration and what was read; "" if it does not."""
    is_fixed = isinstance(tool.requires_approval, bool)
    asks = tool.requires_approval if is_fixed else tool.asks(arguments, driver.context(call_id, tool.name))
    own = REQUIRES.format(tool=tool.name) if asks else ""
    return f"{warned(driver, tool)} {own}".strip()


def warned(driver: Driver, tool: Tool) -> str:
    """Name what has read text of outsiders before a call that acts outside; "" if nothing has."""
    names = ", ".join(_readers(driver, tool))
    return OUTWARD.format(tool=tool.name, readers=names) if names else ""


def _readers(driver: Driver, tool: Tool) -> list[str]:
    """List the tools that have read text of outsiders before a call that acts outside; [] for another."""
    return [*dict.fromkeys([*driver.state.read, *driver.agent.unjournaled_readers])] if tool.outward else []


def request(
    driver: Driver, tool: Tool, call: Intent | Call, why: str, secret: str = ""
) -> events.ApprovalRequested:
    """Build the request for approval of a call; `secret` is that of the call's session, if not the driver's.

    Calls the project's code.
    """
    lifetime, plan = tool.expires_in or settings.APPROVAL_EXPIRES, ask("reminders", None, tool) or Reminders()
    now = holds.held(driver, tool, call.id, call.arguments, secret)
    asked: events.ApprovalRequested = {
        "approval": str(uuid7()),
        "digest": call.digest,
        "arguments": call.arguments,
        "title": tool.title(call.arguments),
        "risk": tool.risk,
        "why": why,
        "preview": tool.preview_of(call.arguments),
        "approvers": tool.approvers or "",
        "required": tool.approvals,
        "expires_at": events.timestamp(driver.now() + lifetime) if lifetime else None,
    }
    if plan.remind_after:
        asked["remind_at"] = events.timestamp(driver.now() + plan.remind_after)
    if plan.escalate_after and plan.escalate_to:
        asked["escalate_at"] = events.timestamp(driver.now() + plan.escalate_after)
        asked["escalate_to"] = plan.escalate_to
    if tool.only_answers:
        asked["only_answers"] = True
    if tool.origin:
        asked["origin"] = tool.origin
    if names := _readers(driver, tool):
        asked["untrusted"] = names
    if now is not None:
        asked["holds"], asked["held"] = now.value, now.digest
        asked["why"] = why if now.digest else f"{holds.UNREADABLE} {why}"
    return asked


def stricter(driver: Driver, call: Call) -> str:
    """Explain why an adopted definition lets a call that has not started run only after another request.

    Returns "" if the request that was made, or none, is enough for the tool as it is now.
    """
    tool, card = driver.agent.tools[call.tool], call.approval
    is_begun = call.attempt and (card is None or card.status == ApprovalStatus.CONSUMED)
    if not call.adopted or is_begun or call.deferred is not None:  # its child run asks
        return ""
    if card is None:
        return requires(driver, tool, call.id, call.arguments)
    if card.rule and (why := warned(driver, tool)):  # only a rule that says so may answer such calls
        return why.removesuffix(".")
    if card.required < tool.approvals:
        return f"{tool.approvals} people have to approve it"
    if card.approvers != (tool.approvers or "") and (tool.approvers or card.approvers == REQUESTER):
        return f"{tool.approvers or 'other people'} decide about it"
    if tool.risk == "high" != card.risk:
        return "its risk is high"
    return why_never(tool) if card.rule else ""


def why_never(tool: Tool) -> str:
    """Explain why no standing rule may answer calls of a tool; "" if rules may."""
    if tool.only_answers:
        return "it is a question to a person"
    if tool.approvals > 1:
        return f"{tool.approvals} people have to approve it"
    if tool.approvers == REQUESTER:
        return "the requester confirms it"
    if tool.rules is False:
        return "it is declared with rules=False"
    if tool.risk == "high" and not tool.rules:
        return "its risk is high, and it is not declared with rules=True"
    return ""


def misfit(agent: Agent, tool: str, arguments: dict[str, Any]) -> str:
    """Explain why an agent's tool cannot run a recorded call with the recorded arguments; "" if it can."""
    if tool not in agent.tools:
        return f"there is no tool {tool!r} any more"
    try:
        agent.tools[tool].revalidated(arguments)
    except (TypeError, ValueError, RecursionError) as error:  # among them InvalidArguments
        why = str(error).removeprefix("Invalid arguments:\n- ").replace("\n- ", "; ")
        return one_line(why.removesuffix(".") or type(error).__name__)
    return ""


def is_off(driver: Driver, tool: str) -> bool:
    """Check whether a tool is switched off; False for a stateless run."""
    return driver.store.durable and bool(why_off(driver.alias, "tool", tool, driver.schema))


def run_since(driver: Driver, tool: Tool) -> str:
    """Describe the calls of a tool that a fork left out and that its origin has started since.

    Includes calls whose run is gone. Returns "" if there are none, or if the tool is safe to retry.
    """
    left_out = driver.state.open_elsewhere.get(tool.name)
    if not left_out or tool.recovery == "safe_to_retry":
        return ""
    rows = Message.objects.using(driver.alias).filter(run_id__in={*left_out.values()}, call_id__in=left_out)
    started = {*rows.filter(kind=events.TOOL_STARTED).values_list("call_id", flat=True)}
    here = {*Run.objects.using(driver.alias).filter(pk__in=left_out.values()).values_list("pk", flat=True)}
    gone = {one: GONE for one, run_id in left_out.items() if run_id not in here}
    calls = [f"call {one} of run {left_out[one]}{gone.get(one, '')}" for one in sorted({*started, *gone})]
    text = f"{tool.name} was left out when this run was forked, and its origin has executed it since: "
    return f"{text}{', '.join(calls)}." if calls else ""
