"""The conversation of a session in the provider's form, and the calls of it whose outcome is unknown."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from agentruns import canonical
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.fold import RunState

EDITED = "Executed with the arguments a person set: {arguments}\n"
MISFIT = "The tool ran. Its result is not of the declared form ({misfit}):\n"


class SessionState:
    """What a driver knows of a session: its chain's head, its conversation, its doubts and one run."""

    def __init__(self, session_id: UUID, run_id: UUID) -> None:
        self.session_id = session_id
        self.next_seq = 1
        self.head = canonical.GENESIS
        self.run = RunState(run_id)
        self.tool_use_ids: set[str] = set()
        # tool -> call of unknown outcome without a verdict -> its run
        self.doubts: dict[str, dict[str, UUID]] = {}
        self._messages: list[dict[str, Any]] = []
        self._open: dict[str, str] = {}  # call -> provider's id, of the last reply
        self._results: dict[str, dict[str, Any]] = {}

    def apply(self, row: Row) -> None:
        """Fold one more row of the session's journal."""
        self.next_seq, self.head = row.seq + 1, row.hash
        if row.run_id == self.run.run_id:
            self.run.apply(row)
        if row.kind == events.USER:
            self._say("user", row.payload["content"])
        elif row.kind == events.ASSISTANT:
            self._reply(row.payload)
        elif row.kind == events.TOOL_RESULT:
            self._result(row)
        elif row.kind == events.ORPHAN_RESOLVED and row.payload["verdict"] != "unknown":
            self.doubts.get(row.tool_name, {}).pop(row.call_id, None)

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation to send. Every call of the last reply must be settled."""
        if len(self._results) < len(self._open):
            raise AssertionError(f"Run {self.run.run_id} has unsettled calls; no request may be built.")
        return self.settled_messages()

    def settled_messages(self) -> list[dict[str, Any]]:
        """Return the conversation so far; results of a reply appear when all of them are there."""
        self._flush()
        return list(self._messages)

    def _reply(self, payload: dict[str, Any]) -> None:
        self._flush()
        content = _text_first([block for block in payload["content"] if not _is_empty_text(block)])
        if content:  # the provider refuses an assistant turn that says nothing
            self._messages.append({"role": "assistant", "content": canonical.legal(content)})
        self._open = {call["id"]: call["provider_id"] for call in payload["calls"]}
        self.tool_use_ids.update(self._open.values())

    def _result(self, row: Row) -> None:
        provider_id = self._open.get(row.call_id)
        if provider_id is None:
            return
        self._results[row.call_id] = result_block(provider_id, row.payload)
        if row.payload["outcome"] == "unknown":
            self.doubts.setdefault(row.tool_name, {})[row.call_id] = row.run_id

    def _flush(self) -> None:
        """Put the results of the last reply, in emission order, at the front of the next user message."""
        if self._open and len(self._results) == len(self._open):
            self._messages.append(
                {"role": "user", "content": [self._results[call_id] for call_id in self._open]}
            )
            self._open, self._results = {}, {}

    def _say(self, role: str, content: list[dict[str, Any]]) -> None:
        self._flush()
        content = canonical.legal(content)
        if self._messages and self._messages[-1]["role"] == role:
            last = self._messages[-1]
            self._messages[-1] = {"role": role, "content": [*last["content"], *content]}
        else:
            self._messages.append({"role": role, "content": content})


def result_block(provider_id: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Return the provider's `tool_result` for a `tool_result` row's payload."""
    content = payload["content"]
    text = content if isinstance(content, str) else canonical.legal_text(content)
    if payload.get("misfit"):
        text = MISFIT.format(misfit=payload["misfit"]) + text
    if payload.get("edited") is not None:
        text = EDITED.format(arguments=canonical.legal_text(payload["edited"])) + text
    block = {
        "type": "tool_result",
        "tool_use_id": provider_id,
        "content": canonical.legal(text) or "(no output)",
    }
    return {**block, "is_error": True} if payload["is_error"] else block


def _text_first(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move text that follows a `tool_use` before it: behind it the provider refuses text."""
    first = next((n for n, block in enumerate(content) if block.get("type") == "tool_use"), len(content))
    texts = [block for block in content[first:] if block.get("type") == "text"]
    return [*content[:first], *texts, *(block for block in content[first:] if block.get("type") != "text")]


def _is_empty_text(block: dict[str, Any]) -> bool:
    return block.get("type") == "text" and not str(block.get("text", "")).strip()
