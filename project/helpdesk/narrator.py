"""The narrator of the demo, who tells the rows of a run's journal as sentences while the run happens."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from django.utils import timezone

from agentruns.models import Message, Run
from agentruns.models.event import CHILD
from project.helpdesk import words
from project.helpdesk.models import Ticket

WHO, INDENT, WIDEST = 15, 27, 120

ORPHANS = {
    "reconcile": "{call} was started and has no result. Its tool knows how to find out (reconcile): "
    "it asks the payment provider by idempotency key.",
    "retry": "{call} was started and has no result. It is safe to repeat, so it runs again.",
    "held": "{call} was started and has no result. Its tool declares nothing, so nobody guesses: the call is "
    "in doubt, and the run waits until a person has found out whether it happened.",
    "surfaced": "{call} was started and has no result. The model is told that the call is in doubt.",
}
VERDICTS = {
    "occurred": "{who} says: {call} did happen. That becomes its result; it is not repeated.",
    "not_occurred": "{who} says: {call} did not happen. It runs again, with the same key.",
    "unknown": "{who} says: nobody can tell whether {call} happened. The model is told so.",
}
DECISIONS = {"approve": "approves", "deny": "denies", "answer": "answers", "expire": "let expire"}


class Narrator:
    """A printer of lines with time, actor and action, which remembers the last row printed of each run."""

    def __init__(self, out: Callable[[str], object], style: Any) -> None:
        self.out = out
        self.style = style
        self.width = min(WIDEST, shutil.get_terminal_size((100, 24)).columns)
        self._told: dict[Any, int] = {}
        self._arguments: dict[str, dict[str, Any]] = {}

    def heading(self, text: str) -> None:
        """Print the heading of a part of the story."""
        self.out("")
        self.out(self.style.MIGRATE_HEADING(text))

    def ticket(self, ticket: Ticket) -> None:
        """Print the heading of a ticket's story."""
        self.heading(f'Ticket {ticket.number}  {ticket.customer}: "{ticket.subject}"')

    def says(self, who: str, what: str, at: datetime | None = None, style: str = "") -> None:
        """Print that `who` did `what`, wrapped to the terminal's width."""
        clock = timezone.localtime(at or timezone.now())
        lines = textwrap.wrap(what, max(30, self.width - INDENT)) or [""]
        paint = getattr(self.style, style) if style else str
        self.out(f"  {clock:%H:%M:%S}  {who:<{WHO}}{paint(lines[0])}")
        for line in lines[1:]:
            self.out(" " * INDENT + paint(line))

    def explains(self, text: str) -> None:
        """Print an explanation, wrapped to the terminal's width."""
        for line in textwrap.wrap(text, max(30, self.width - INDENT)):
            self.out(" " * INDENT + line)

    def columns(self, rows: Iterable[Iterable[object]]) -> None:
        """Print rows in columns; the first row is the heading."""
        texts = [[str(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        for number, cells in enumerate(texts):
            line = "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
            self.out("  " + (line if number else self.style.MIGRATE_LABEL(line)))

    def skip(self, run: Run, but: tuple[str, ...] = ()) -> None:
        """Skip a run's existing rows, but print the rows of the kinds in `but`."""
        for row in self._new_rows(run):
            sentence = self._sentence(row)
            if row.kind in but:
                self.says("earlier", sentence, row.created_at)

    def follow(self, run: Run, who: str) -> None:
        """Print the rows added since the last call, as actions of `who`, or of the child that the run is."""
        who = f"child {run.agent}" if run.parent_id else who
        for row in self._new_rows(run):
            sentence = self._sentence(row)
            if sentence:
                done = row.kind == "run_completed"
                self.says(who, words.short(sentence, 400), row.created_at, "SUCCESS" if done else "")

    def call_name(self, row: Message) -> str:
        """Name the call of a row for people."""
        return words.call(row.tool_name, self._arguments.get(row.call_id, {}))

    def _new_rows(self, run: Run) -> Iterable[Message]:
        rows = Message.objects.filter(run=run, seq__gt=self._told.get(run.pk, 0)).order_by("seq")
        for row in rows:
            self._told[run.pk] = row.seq
            yield row

    def _sentence(self, row: Message) -> str:
        tell = getattr(self, f"_{row.kind}", None)
        return tell(row, row.payload) if tell else ""

    # One method for each kind of row with a sentence. The sentence of a result covers the start of its call.

    def _assistant(self, row: Message, payload: dict[str, Any]) -> str:
        for call in payload["calls"]:
            self._arguments[call["id"]] = call["arguments"]
        if not payload["calls"]:
            return ""  # the final text comes with the end of the run
        text = " ".join(block["text"] for block in payload["content"] if block["type"] == "text")
        return f'says: "{text}"' if text.strip() else ""

    def _user(self, row: Message, payload: dict[str, Any]) -> str:
        text = " ".join(block.get("text", "") for block in payload["content"])
        return f'writes again: "{text}"' if payload.get("reason") == "message" else ""

    def _tool_result(self, row: Message, payload: dict[str, Any]) -> str:
        outcome, call = payload["outcome"], self.call_name(row)
        if payload.get("reconciled"):
            return ""
        if outcome == "ok":
            return f"{call}: {words.result(row.tool_name, payload['content'])}"
        if outcome == "error":
            return f"{call}: {payload['content']}"
        return f"{call}: the model is told that it is {outcome}"

    def _approval_requested(self, row: Message, payload: dict[str, Any]) -> str:
        return f"{payload['title']}? A person decides. The run waits and holds no worker."

    def _approval_decided(self, row: Message, payload: dict[str, Any]) -> str:
        if "arguments" in payload:
            self._arguments[row.call_id] = payload["arguments"]
        verb = DECISIONS.get(payload["verb"], payload["verb"])
        return f"{_name(payload)} {verb} it{_reason(payload)}"

    def _orphan_found(self, row: Message, payload: dict[str, Any]) -> str:
        return ORPHANS[payload["action"]].format(call=self.call_name(row))

    def _orphan_resolved(self, row: Message, payload: dict[str, Any]) -> str:
        who = "The provider" if payload.get("channel") == "reconcile" else _name(payload)
        return VERDICTS[payload["verdict"]].format(who=who, call=self.call_name(row))

    def _event_awaited(self, row: Message, payload: dict[str, Any]) -> str:
        call = self.call_name(row)
        if payload["name"] == CHILD:
            return f"{call}: handed to a run of its own. This run waits and holds no worker."
        return f"{call}: waits for {payload['name']} {payload['key']}. The run holds no worker."

    def _event_delivered(self, row: Message, payload: dict[str, Any]) -> str:
        return f"{payload['name']} {payload['key']} is here, and the run can go on"

    def _budget_raised(self, row: Message, payload: dict[str, Any]) -> str:
        limits = ", ".join(f"{name} {limit}" for name, limit in payload["limits"].items())
        return f"{_name(payload)} raises the budget to {limits}{_reason(payload)}"

    def _run_resumed(self, row: Message, payload: dict[str, Any]) -> str:
        if payload.get("unpause"):
            return ""  # the row before says who let it go on
        return f"takes the run over: {payload['reason']}"

    def _model_failed(self, row: Message, payload: dict[str, Any]) -> str:
        return f"the model failed: {payload['error']['text']}"

    def _run_paused(self, row: Message, payload: dict[str, Any]) -> str:
        return f"paused until a person looks: {payload.get('reason', '')}"

    def _run_completed(self, row: Message, payload: dict[str, Any]) -> str:
        return f'done: "{payload.get("output")}"'

    def _run_failed(self, row: Message, payload: dict[str, Any]) -> str:
        return f"failed: {payload['error']['text']}"

    def _run_cancelled(self, row: Message, payload: dict[str, Any]) -> str:
        return f"cancelled by {_name(payload)}"


def _name(payload: dict[str, Any]) -> str:
    actor = payload.get("actor")
    return f"user {actor['name']}" if actor else "the program"


def _reason(payload: dict[str, Any]) -> str:
    return f": {payload['reason']}" if payload.get("reason") else ""
