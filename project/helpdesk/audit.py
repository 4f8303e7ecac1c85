"""Comparison of the ledger of the outside world with the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from agentruns.models import Message
from project.helpdesk import ledger, words
from project.helpdesk.money import euros

ONCE = "once"
# The effect of each tool that has one.
EFFECTS = {"refund": "refund", "send_voucher": "voucher", "email_customer": "email", "await_return": "label"}


def findings() -> list[str]:
    """Find mismatches: effects that happened too often, are missing, or are not in the journal.

    Raises LedgerError.
    """
    times = Counter((line["key"], line["kind"], line["session"]) for line in ledger.lines())
    started, found = _starts(), []
    for (key, kind, session), count in times.items():
        if key not in started:
            found.append(
                f"The {kind} of {session} with key {key[:12]} is in the ledger, and no call of this journal "
                f"started it. Was the database deleted and {ledger.path()} kept? Delete both to start over."
            )
        elif count > 1 + _repeats_ordered(started[key]):
            found.append(f"The {kind} of {session} with key {key[:12]} happened {count} times.")
    return found + _missing({key for key, _, _ in times}, started)


def table(sessions: Collection[str]) -> list[tuple[Any, ...]]:
    """Build the rows of the ledger of some sessions: one row for each effect, with how often it happened."""
    lines = [line for line in ledger.lines() if line["session"] in sessions]
    times = Counter(line["key"] for line in lines)
    first = {line["key"]: line for line in reversed(lines)}
    started = _starts()
    return [
        (
            line["session"],
            line["kind"],
            _what(line),
            key[:12],
            line["pid"],
            _often(times[key], _repeats_ordered(started.get(key))),
        )
        for key, line in reversed(first.items())
    ]


def _starts() -> dict[str, Message]:
    return {row.payload["key"]: row for row in Message.objects.filter(kind="tool_started")}


def _repeats_ordered(row: Message | None) -> int:
    """Count the verdicts of people that the call did not happen, each of which lets the call run again."""
    if row is None:
        return 0
    verdicts = Message.objects.filter(run=row.run_id, call_id=row.call_id, kind="orphan_resolved")
    return sum(
        verdict.payload["verdict"] == "not_occurred" and verdict.payload.get("channel") != "reconcile"
        for verdict in verdicts
    )


def _missing(keys: set[str], started: dict[str, Message]) -> list[str]:
    by_call = {(row.run_id, row.call_id): key for key, row in started.items()}
    results = Message.objects.filter(kind="tool_result", tool_name__in=EFFECTS).select_related("session")
    return [
        f"The journal says that {row.tool_name} of {row.session.key} succeeded (row {row.seq}), and the "
        f"ledger has no such {EFFECTS[row.tool_name]}."
        for row in results
        if row.payload["outcome"] == "ok" and by_call.get((row.run_id, row.call_id)) not in keys
    ]


def _what(line: dict[str, Any]) -> str:
    if line["kind"] == "refund":
        return f"{euros(line['amount_cents'])} for order {line['order']}"
    if line["kind"] == "voucher":
        return f"{euros(line['amount_cents'])} for order {line['order']}: {line['occasion']}"
    if line["kind"] == "label":
        return f"{line['label']} for the return of order {line['order']}"
    return f'"{words.short(line["subject"], 50)}"'


def _often(times: int, ordered: int) -> str:
    if times == 1:
        return ONCE
    return f"{times} times, as a person ordered" if times == 1 + ordered else f"{times} TIMES"
