"""Rows to append together, folded into the writer's state as they are added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Unpack
from uuid import UUID

from agentruns.journal import events, payloads
from agentruns.journal.conversation import SessionState
from agentruns.journal.events import Row
from agentruns.journal.fold import Call, CallApproval
from agentruns.utils import json as canonical

# After these the run has moved on, so earlier crashes no longer count against it.
PROGRESS = (events.ASSISTANT, events.TOOL_RESULT)

Offload = Callable[[dict[str, Any]], dict[str, Any]]


class Batch:
    """The rows of one append. `epoch` is the writer's lease epoch, 0 for service rows.

    Adding folds at once: if the batch cannot be stored, discard its state and read it again.
    """

    def __init__(self, state: SessionState, epoch: int = 0) -> None:
        self.state = state
        self.epoch = epoch
        self.first_seq = state.next_seq
        self.first_head = state.head
        self.rows: list[Row] = []
        self.texts: list[str] = []
        self.before: dict[str, str] = {}  # call -> status of its approval before this batch, "" if new
        self.release = False
        self.delay: float | None = None  # seconds until the run may be claimed again
        self.failed_drive = False
        self.unpaused = False
        self.progressed = False  # whether a reply or a result is among the rows
        self.quiet = False  # nobody is told of these rows: no signal, no notification, no telemetry
        self.reported = False  # whether telemetry has its events

    @property
    def releases(self) -> bool:
        """Return whether the writer's lease ends with this append."""
        return self.release or self.delay is not None or self.state.run.status != "active"

    def add(
        self,
        kind: str,
        payload: Mapping[str, Any],
        *,
        call: Call | None = None,
        call_id: str = "",
        tool_name: str = "",
        attempt: int = 0,
        consumes: UUID | None = None,
        offload: Offload | None = None,
    ) -> Row:
        """Chain one more row and fold it; `payload` has the form of its kind in `events.PAYLOADS`.

        `offload` may put a large content into a file.
        """
        if call is not None:
            call_id, tool_name = call.id, call.tool
            self.before.setdefault(call.id, call.approval.status if call.approval else "")
        text = canonical.dumps({"v": events.VERSION, **payload})
        if offload is not None and payloads.may_be_large(text):
            text = canonical.dumps({"v": events.VERSION, **offload(dict(payload))})
        row = Row(
            seq=self.state.next_seq,
            run_id=self.state.run.run_id,
            kind=kind,
            call_id=call_id,
            tool_name=tool_name,
            attempt=attempt,
            epoch=self.epoch,
            payload=canonical.loads(text),
            created_at=datetime.now(UTC),
            prev_hash=self.state.head,
            hash="",
            consumes=consumes,
        )
        row = row._replace(hash=events.row_hash(self.state.session_id, row, text))
        self.rows.append(row)
        self.texts.append(text)
        self.progressed = self.progressed or kind in PROGRESS
        self.state.apply(row)
        return row

    def result(
        self,
        call: Call,
        content: Any,
        outcome: str,
        *,
        is_error: bool = False,
        offload: Offload | None = None,
        **facts: Unpack[events.ResultFacts],
    ) -> Row:
        """Add the one `tool_result` of a call, with the arguments it ran with if a person edited them.

        A content equal to the preview of a late result stands for the whole of that result.
        """
        if isinstance(content, str) and (stored := self.state.returned_late.get((call.id, content))):
            facts["stored"] = stored
        if call.edited and call.attempt:
            facts["edited"] = call.arguments
        payload: events.ToolResult = {"content": content, "is_error": is_error, "outcome": outcome, **facts}
        return self.add(events.TOOL_RESULT, payload, call=call, attempt=call.attempt, offload=offload)

    def changed_approvals(self) -> list[tuple[Call, CallApproval, str]]:
        """Return each approval that this batch requests or changes, with its call and its status before."""
        return [
            (call, call.approval, self.before[call.id])
            for call in self.state.run.calls.values()
            if call.approval is not None and call.id in self.before
        ]
