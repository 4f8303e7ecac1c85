"""Approvals that hold until the effect: what an approver relied on, read again before the call runs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

from django.db import connections, transaction

from agentruns.engine.driver import Driver
from agentruns.journal import events
from agentruns.journal.batch import Batch
from agentruns.journal.cards import CallApproval
from agentruns.journal.fold import Call
from agentruns.models.parts import keyed
from agentruns.models.statuses import ApprovalStatus
from agentruns.tools import Tool
from agentruns.tools.card import MASK, one_line, value_text
from agentruns.utils import json as canonical
from agentruns.utils.failpoints import reached
from agentruns.utils.ids import uuid7
from agentruns.utils.redaction import Secrets, redacted

UNREADABLE = "What its approval relies on could not be read."
NOT_KNOWN = "What {tool} relies on was not known when this was approved."
SHOWN, LONGEST = 3, 600  # members that differ, and characters about them


class Held(NamedTuple):
    """The value that a tool's `holds` returned, and its keyed digest; None and "" if it failed."""

    value: Any = None
    digest: str = ""
    why: str = ""  # how it differs from what was approved


def held(
    driver: Driver, tool: Tool, call_id: str, arguments: dict[str, Any], secret: str = ""
) -> Held | None:
    """Call a tool's `holds` for a call; None for a tool without it. The digest's key is the session's."""
    if tool.holds is None:
        return None
    alias = driver.alias
    # A transactional tool may lock rows, which stay locked only inside the handler's transaction.
    is_trial = tool.transactional and not connections[alias].in_atomic_block
    with transaction.atomic(using=alias) if is_trial else nullcontext():
        found = tool.held(arguments, driver.context(call_id, tool.name))
        if is_trial:
            transaction.set_rollback(True, using=alias)
    if not found:
        return Held()
    return Held(found[0], keyed(secret or driver.state.secret, canonical.dumps(found[0])))


def changed(driver: Driver, call: Call) -> Held | None:
    """Call a tool's `holds` again, and say how its value differs from the approved one; None if it does not.

    A value that cannot be read, or that was not known at the approval, differs.
    """
    tool, card = driver.agent.tools[call.tool], call.approval
    if card is None or (tool.holds is None and not card.held):
        return None
    now = held(driver, tool, call.id, call.arguments) or Held()
    if now.digest and now.digest == card.held:
        return None
    why = NOT_KNOWN.format(tool=tool.name) if now.digest else UNREADABLE
    is_known = now.digest and card.held
    return now._replace(why=_differences(card.holds, now.value, tool, call) if is_known else why)


def _differences(then: Any, now: Any, tool: Tool, call: Call) -> str:
    """Describe the members in which two values differ, in one sentence of at most SHOWN members.

    Masks the call's sensitive arguments, because no later mask finds a value of which only a piece is shown.
    """
    secrets = Secrets([call.arguments.get(name) for name in tool.sensitive])
    if not isinstance(then, dict) or not isinstance(now, dict):
        then, now = {"the value": then}, {"the value": now}
    found: list[str] = []
    for name in sorted({*then, *now}):
        if (one := canonical.first_difference(then.get(name), now.get(name), name)) is not None:
            is_hidden = canonical.passes(f".{one.path}", frozenset(tool.sensitive))
            shown = (secrets.walk(each, short=True) for each in (one.then, one.now))
            texts = [MASK if is_hidden else _word(each) for each in shown]
            found.append(f"{one.path} was {texts[0]} when this was approved, and is {texts[1]} now")
    more = [f"{len(found) - SHOWN} more differ"] if len(found) > SHOWN else []
    return one_line("; ".join([*found[:SHOWN], *more]) or "a member came or went", LONGEST) + "."


def _word(value: Any) -> str:
    return "another" if isinstance(value, dict | list) else value_text(redacted(value))


def ask_again(
    driver: Driver, batch: Batch, call: Call, approval: CallApproval, why: str, now: Held | None = None
) -> None:
    """Void the approvals of a call whose tool has changed; give people as long as at the first time.

    `now` is what the tool's `holds` returns now, if it was called.
    """
    payload = events.ApprovalVoided(approval=str(approval.id), voided=[*approval.given], why=why)
    # A value that changes again and again must not pile up its reasons.
    before = approval.why if now is None else approval.asked
    payload["asks"] = before if before.startswith(why) else f"{why} {before}"
    if now is not None:
        payload["holds"], payload["held"] = now.value, now.digest
    if approval.status == ApprovalStatus.CONSUMED:
        payload["renews"] = str(uuid7())
    if approval.expires_at is not None and approval.lifetime is not None:
        payload["expires_at"] = events.timestamp(batch.at + approval.lifetime)
    if tool := driver.agent.tools.get(call.tool):
        payload["risk"], payload["required"] = tool.risk, tool.approvals
        payload["approvers"] = tool.approvers or ""
    batch.add(events.APPROVAL_VOIDED, payload, call=call)


def still(driver: Driver, group: list[Call]) -> bool:
    """Check that what the approvals of a group rely on is the same; else ask anew about each other value."""
    other: dict[str, Held] = {}
    for call in group:
        if call.approval is not None and call.approval.status == ApprovalStatus.APPROVED:
            if (now := changed(driver, call)) is not None:
                other[call.id] = now
            driver.mend()
    if other:
        ask_anew(driver, other)
    return not other


def ask_anew(driver: Driver, other: dict[str, Held]) -> None:
    """Void the approvals of calls whose `holds` returns another value now, and ask with that value."""
    reached("before_void")

    def ask(batch: Batch) -> None:
        for call_id, now in other.items():
            call = batch.state.run.calls[call_id]
            if call.approval is not None and call.is_open and not call.decision:
                ask_again(driver, batch, call, call.approval, now.why, now)

    driver.commit(ask)
