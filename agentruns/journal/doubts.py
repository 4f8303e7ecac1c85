"""Calls in doubt, which may have happened although nobody knows, and the rows that end a doubt. Pure."""

from __future__ import annotations

from typing import Any

from agentruns.journal import events
from agentruns.journal.events import Row

# Rows that begin a doubt, settle it, bring it back, or clear it.
KINDS = (events.TOOL_RESULT, events.APPROVAL_DECIDED, events.APPROVAL_VOIDED, events.ORPHAN_RESOLVED)


class Doubts:
    """The calls of a session whose result leaves open whether they happened, until a row clears the doubt."""

    def __init__(self) -> None:
        self.open: dict[str, Row] = {}  # call -> its result
        self._settled: dict[str, dict[str, Row]] = {}  # approved call -> doubts settled by its approval

    def apply(self, row: Row) -> None:
        """Fold one more row of the session's journal; rows come in order."""
        kind, payload = row.kind, row.payload
        if kind == events.TOOL_RESULT and events.leaves_doubt(payload):
            self.open[row.call_id] = row
        elif kind == events.APPROVAL_DECIDED and "settles" in payload:
            named = [call for call in payload["settles"] if call in self.open]
            self._settled[row.call_id] = {call: self.open.pop(call) for call in named}
        elif kind == events.APPROVAL_VOIDED:
            self.open |= self._settled.pop(row.call_id, {})
        elif kind == events.ORPHAN_RESOLVED and payload["verdict"] in events.CLEARING:
            self.open.pop(row.call_id, None)


def did_nothing(facts: dict[str, Any]) -> bool:
    """Check whether the facts of a result or a verdict rule out that the call had an effect."""
    is_error = facts.get("outcome") == "error" and not facts.get("in_doubt")
    return is_error or facts.get("verdict") == "not_occurred"
