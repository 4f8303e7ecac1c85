"""Calls in doubt, of which nobody knows whether they happened, and the rows that end a doubt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.models.statuses import Outcome, Verdict

KINDS = tuple(kind for kind in events.KINDS.values() if kind.moves_doubts)


class Doubts:
    """The calls of a session that may have happened, until a verdict or an approval ends the doubt."""

    def __init__(self) -> None:
        self.open: dict[str, Row] = {}  # call -> its result
        self._settled: dict[str, dict[str, Row]] = {}  # approved call -> doubts settled by its approval
        self._cleared: set[str] = set()  # calls with a verdict, which may come before the message about them

    def apply(self, row: Row) -> None:
        """Fold one more row of the session's journal; rows come in order."""
        if (result := events.TOOL_RESULT.of(row)) and events.leaves_doubt(result):
            self.open[row.call_id] = row
        elif (said := events.USER.of(row)) and (about := said.get("about")) and about.get("in_doubt"):
            if about["call"] not in self._cleared:
                # As if the result of the deferred call stood in this journal; in a fork it is a copy.
                facts = {"in_doubt": about.get("raised", False), "content": about.get("detail", "")}
                run_id = row.run_id if events.COPIED in said else UUID(about["run"])
                its = row._replace(run_id=run_id, call_id=about["call"], payload=facts)
                its = its._replace(tool_name=about["tool"])
                self.open[its.call_id] = its
        elif (decision := events.APPROVAL_DECIDED.of(row)) and "settles" in decision:
            named = [call for call in decision["settles"] if call in self.open]
            self._settled[row.call_id] = {call: self.open.pop(call) for call in named}
        elif row.kind == events.APPROVAL_VOIDED:
            self.open |= self._settled.pop(row.call_id, {})
        elif (judged := events.ORPHAN_RESOLVED.of(row)) and judged["verdict"] in events.CLEARING:
            for doubts in (self.open, *self._settled.values()):
                doubts.pop(row.call_id, None)
            self._cleared.add(row.call_id)


def deferred_after(waiting: dict[str, Row], row: Row) -> dict[str, Row]:
    """Compute the deferred calls of a session without a message about them, after one more row.

    Maps the id of each call's run to the call's result. Leaves out what a fork copied: its origin hears it.
    """
    if (result := events.TOOL_RESULT.of(row)) and "deferred" in result and events.COPIED not in result:
        return {**waiting, result["deferred"]["run"]: row}
    if (said := events.USER.of(row)) and "about" in said:
        return {run_id: each for run_id, each in waiting.items() if run_id != said["about"]["run"]}
    return waiting


def did_nothing(facts: Mapping[str, Any]) -> bool:
    """Check whether the facts of a result or a verdict rule out that the call had an effect."""
    is_error = facts.get("outcome") == Outcome.ERROR and not facts.get("in_doubt")
    return is_error or facts.get("verdict") == Verdict.NOT_OCCURRED
