"""A run as the journal tells it: rows, their fold, and batches of rows, each as small as can be.

Mirrors `journal/fold.py`, `journal/batch.py` and `engine/in_doubt.py`. Times, texts and arguments are left
out, because they decide nothing here.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tests.model.guards import Off


class Tool(NamedTuple):
    """The tool of one call of the run's first reply."""

    declares: str = "nothing"  # nothing | retry | reconcile | transactional
    gated: bool = False  # a person has to approve the call
    parallel: bool = False
    sure: bool = True  # whether its `reconcile` knows the answer
    awaits: str = ""  # its result comes with an event: "call" has the call's own key, "other" another


Tools = tuple[Tool, ...]


class Call(NamedTuple):
    """One call, folded from its rows."""

    attempt: int = 0
    orphan: str = ""  # held | retry | reconcile | surfaced | not_occurred
    card: str = ""  # pending | approved | denied | expired | consumed | cancelled
    outcome: str = ""
    late: bool = False  # its handler returned after its driver had lost the run
    pending: bool = False  # its handler has returned, and an event will bring its result

    @property
    def is_open(self) -> bool:
        """Check whether the call has no result."""
        return not self.outcome

    @property
    def waits(self) -> bool:
        """Check whether the call waits for a person."""
        return self.orphan == "held" or self.card == "pending"

    @property
    def decision(self) -> str:
        """The decision that ends the call without its handler; "" if there is none."""
        return self.card if self.card in ("denied", "expired") else ""

    @property
    def is_contradicted(self) -> bool:
        """Check whether the handler returned although a person said that the call did not happen."""
        return self.orphan == "not_occurred" and self.late


class Run(NamedTuple):
    """One run, folded from its rows: a reply with one call for each tool, then a reply that ends the run."""

    replies: int = 0
    calls: tuple[Call, ...] = ()
    cancel: bool = False  # requested
    ended: str = ""  # completed | cancelled


class Row(NamedTuple):
    """One row of the journal."""

    kind: str
    call: int = -1
    word: str = ""  # outcome, action, verb or verdict
    attempt: int = 0  # of a row of an event: the place of its key


@cache
def apply(run: Run, row: Row, tools: Tools) -> Run:
    """Fold one more row."""
    match row.kind:
        case "assistant":
            calls = tuple(Call() for _ in tools) if run.replies == 0 else ()
            return run._replace(replies=run.replies + 1, calls=calls)
        case "run_cancel_requested":
            return run._replace(cancel=True)
        case "run_completed" | "run_cancelled":
            return run._replace(ended=row.kind.removeprefix("run_"))
    if not 0 <= row.call < len(run.calls):
        return run  # the row changes no state, or tells of a call of an earlier reply
    call = run.calls[row.call]
    match row.kind:
        case "approval_requested":
            call = call._replace(card="pending")
        case "approval_decided":
            call = call._replace(card=row.word)
        case "tool_started":
            card = call.card and row.word
            call = call._replace(attempt=row.attempt, orphan="", card=card, pending=False)
        case "event_awaited":
            call = call._replace(pending=True)
        case "tool_result":
            unused = call.card in ("pending", "approved")
            call = call._replace(outcome=row.word, orphan="", card="cancelled" if unused else call.card)
        case "late_result" if row.word != "never entered":
            call = call._replace(late=True)
        case "orphan_found":
            call = call._replace(orphan=row.word)
        case "orphan_resolved" if row.word == "not_occurred" and call.is_open:
            call = call._replace(orphan="not_occurred")
    return run._replace(calls=(*run.calls[: row.call], call, *run.calls[row.call + 1 :]))


@cache
def next_calls(run: Run, tools: Tools, off: Off) -> tuple[int, ...]:
    """List the open calls that may run now, by their place in the reply."""
    blocked, ready = False, []
    for place, call in enumerate(run.calls):
        if not call.is_open or run.ended:
            continue
        waits = call.waits or call.pending
        if "the gate" in off and call.card == "pending":
            waits = False
        if waits:
            blocked = "the order" not in off
        elif tools[place].parallel or not blocked:
            ready.append(place)
    return tuple(ready)


@cache
def status(run: Run, tools: Tools, off: Off) -> str:
    """Compute the folded status of a run; "active" stands for queued and for running."""
    open_calls = [call for call in run.calls if call.is_open]
    if run.ended:
        return run.ended
    if run.cancel or not open_calls or next_calls(run, tools, off):
        return "active"
    if any(call.orphan == "held" for call in open_calls):
        return "orphaned"
    return "awaiting-approval" if any(call.waits for call in open_calls) else "waiting"


@cache
def is_started(run: Run, place: int, tools: Tools) -> bool:
    """Check whether a call has no result although its effect may have happened."""
    call = run.calls[place]
    if tools[place].declares == "transactional" and not call.orphan:
        return False
    if call.orphan == "not_occurred" and not call.late:
        return False
    return call.is_open and (call.attempt > 0 or call.orphan in ("held", "reconcile"))


class Batch:
    """The rows of one append, folded as they are added."""

    def __init__(self, run: Run, tools: Tools, off: Off) -> None:
        self.run, self.tools, self.off = run, tools, off
        self.rows: list[Row] = []

    def add(self, kind: str, call: int = -1, word: str = "", attempt: int = 0) -> None:
        """Add one row."""
        row = Row(kind, call, word, attempt)
        self.rows.append(row)
        self.run = apply(self.run, row, self.tools)

    def result(self, call: int, outcome: str) -> None:
        """Add the result of a call."""
        self.add("tool_result", call, outcome)

    def start(self, place: int) -> None:
        """Add the start of a call's next attempt, which consumes its approval."""
        call = self.run.calls[place]
        used = call.card if "the consumption" in self.off else "consumed"
        self.add("tool_started", place, used, call.attempt + 1)

    def start_next(self) -> None:
        """Add the start of the next call to the rows before it, if nothing has to be asked or told first."""
        if self.run.cancel and "cancel before start" not in self.off:
            return
        if any(row.kind in ANNOUNCED for row in self.rows):
            return
        if any(is_started(self.run, place, self.tools) for place in range(len(self.run.calls))):
            return
        ready = next_calls(self.run, self.tools, self.off)
        if not ready or "start before handler" in self.off:
            return
        tool, call = self.tools[ready[0]], self.run.calls[ready[0]]
        if tool.parallel or tool.gated or call.attempt or call.decision or call.orphan:
            return
        self.start(ready[0])

    def decided(self, place: int) -> None:
        """Add the result of a call that was denied or that nobody decided in time."""
        call = self.run.calls[place]
        if call.is_open and call.decision:
            self.result(place, call.decision)

    def surface(self, place: int) -> None:
        """Tell the model that a call's outcome is unknown; cancel the later calls that are not parallel."""
        self.result(place, "unknown")
        if "the stop after a doubt" in self.off:
            return
        for later in range(place + 1, len(self.run.calls)):
            call = self.run.calls[later]
            if call.is_open and not self.tools[later].parallel:
                if call.decision:
                    self.decided(later)
                elif not is_started(self.run, later, self.tools):
                    self.result(later, "cancelled")

    def orphan(self, place: int, *, tell_model: bool = False, failed: bool = False) -> None:
        """Put a started call in doubt, as its tool declared; `failed` holds it whatever that was."""
        declares = self.tools[place].declares
        if declares == "transactional" and not failed:
            return
        action = declares if declares in ("retry", "reconcile") and not failed else "held"
        if "the hold" in self.off and declares == "nothing":
            action = "retry"
        if "the question" in self.off and action == "reconcile":
            action = "retry"
        told = action == "held" and tell_model
        self.add("orphan_found", place, "surfaced" if told else action)
        if told:
            self.surface(place)

    def close(self) -> None:
        """Settle the open calls and end the run as cancelled."""
        for place, call in enumerate(self.run.calls):
            if call.is_open and "the settlement" not in self.off:
                self.result(place, "unknown" if is_started(self.run, place, self.tools) else "cancelled")
        self.add("run_cancelled")


# Rows that are told to others at once: no call may count as started meanwhile.
ANNOUNCED = {
    "approval_requested", "approval_decided", "late_result", "orphan_found", "orphan_resolved",
    "run_completed", "run_cancelled",
}  # fmt: skip
