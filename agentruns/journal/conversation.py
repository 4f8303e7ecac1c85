"""The conversation of a session in the provider's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentruns.journal import events, payloads
from agentruns.journal.events import Row
from agentruns.journal.payloads import Stored
from agentruns.utils import json as canonical

EDITED = "Executed with the arguments a person set: {arguments}\n"
MISFIT = "The tool ran. Its result is not of the declared form ({misfit}):\n"
KEPT = 64 * 2**20  # bytes of files that a driver keeps in memory between requests

Blocks = list[dict[str, Any]]


class Conversation:
    """The messages of a session, made from its rows in order."""

    def __init__(self) -> None:
        self.tool_use_ids: set[str] = set()
        self._messages: list[dict[str, Any]] = []
        self._digests = [""]  # of the messages up to each one but the last, which may still grow
        self._previews: dict[tuple[int, int], _Whole] = {}  # message, block in it -> what it previews
        self._stored: dict[str, _Whole] = {}  # the same by call, for results not yet in a message
        self._kept = 0
        self._open: dict[str, str] = {}  # call -> provider's id, of the last reply
        self._results: dict[str, dict[str, Any]] = {}

    def apply(self, row: Row) -> None:
        """Add what one more row of the session's journal says."""
        if row.kind in _APPLY:
            _APPLY[row.kind](self, row, row.payload)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages to send. Every call of the last reply must be settled.

        Reads contents from their files; raises PayloadError for a file that is missing or was altered.
        """
        if len(self._results) < len(self._open):
            missing = sorted(self._open.keys() - self._results.keys())
            raise AssertionError(f"Calls {missing} have no result; no request may be built.")
        messages = self.settled_messages()
        for (number, place), whole in reversed(self._previews.items()):  # so that earlier places stay
            content = list(messages[number]["content"])
            content[place : place + 1] = self._load(whole)
            messages[number] = {**messages[number], "content": content}
        return messages

    def settled_messages(self) -> list[dict[str, Any]]:
        """Return the messages so far; the results of a reply appear once all of them are there.

        Reads no file: a content stored in one appears as its preview.
        """
        self._flush()
        return list(self._messages)

    def fingerprint(self) -> str:
        """Return a digest of the messages so far, computed once for each message."""
        self._flush()
        for message in self._messages[len(self._digests) - 1 : -1]:
            self._digests.append(canonical.digest([self._digests[-1], message]))
        return canonical.digest([self._digests[-1], self._messages[-1:]])

    def _user(self, row: Row, payload: events.User) -> None:
        self._flush()
        content = canonical.legal(payload["content"])
        joins = bool(self._messages) and self._messages[-1]["role"] == "user"
        whole = _whole(row, _user_blocks)
        if whole is not None:
            number = len(self._messages) - joins
            self._previews[number, len(self._messages[-1]["content"]) if joins else 0] = whole
        if joins:
            content = [*self._messages.pop()["content"], *content]
        self._messages.append({"role": "user", "content": content})

    def _assistant(self, row: Row, payload: events.Assistant) -> None:
        self._flush()
        content = _text_first([block for block in payload["content"] if not _is_empty_text(block)])
        if content:  # the provider refuses an assistant turn that says nothing
            self._messages.append({"role": "assistant", "content": canonical.legal(content)})
        self._open = {call["id"]: call["provider_id"] for call in payload["calls"]}
        self.tool_use_ids.update(self._open.values())

    def _tool_result(self, row: Row, payload: events.ToolResult) -> None:
        provider_id = self._open.get(row.call_id)
        if provider_id is None:
            return
        self._results[row.call_id] = result_block(provider_id, payload)
        whole = _whole(row, lambda payload: [result_block(provider_id, payload)])
        if whole is not None:
            self._stored[row.call_id] = whole

    def _flush(self) -> None:
        """Put the results of the last reply, in emission order, at the front of the next user message."""
        if self._open and len(self._results) == len(self._open):
            for place, call_id in enumerate(self._open):
                if call_id in self._stored:
                    self._previews[len(self._messages), place] = self._stored[call_id]
            self._messages.append(
                {"role": "user", "content": [self._results[call_id] for call_id in self._open]}
            )
            self._open, self._results, self._stored = {}, {}, {}

    def _load(self, whole: _Whole) -> Blocks:
        if whole.blocks is not None:
            return whole.blocks
        stored, blocks = whole.read()
        if self._kept + stored.size <= KEPT:
            self._kept += stored.size
            whole.blocks = blocks
        return blocks


_APPLY: dict[str, Callable[[Conversation, Row, Any], None]] = {
    events.USER: Conversation._user,
    events.ASSISTANT: Conversation._assistant,
    events.TOOL_RESULT: Conversation._tool_result,
}


class _Whole:
    """The whole content that a preview in the conversation stands for."""

    def __init__(self, row: Row, make: Callable[[Any], Blocks]) -> None:
        self.row = row
        self.make = make
        self.blocks: Blocks | None = None  # once they are read

    def read(self) -> tuple[Stored, Blocks]:
        """Return the file and the blocks in it; raises PayloadError."""
        row = self.row
        stored = payloads.of(row.run_id, row.seq, row.payload)
        if stored is None:
            raise AssertionError(f"Row {row.seq} of run {row.run_id} has no file.")
        return stored, self.make({**row.payload, "content": payloads.content_of(stored)})


def _whole(row: Row, make: Callable[[Any], Blocks]) -> _Whole | None:
    return _Whole(row, make) if row.payload.get("stored") else None


def _user_blocks(payload: dict[str, Any]) -> Blocks:  # the content of a file: a text, not blocks
    text: Blocks = canonical.legal([{"type": "text", "text": payload["content"]}])
    return text


def result_block(provider_id: str, payload: events.ToolResult) -> dict[str, Any]:
    """Return the provider's `tool_result` block for a row's payload."""
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
    """Move text before the first `tool_use`: after one the provider refuses text."""
    first = next((n for n, block in enumerate(content) if block.get("type") == "tool_use"), len(content))
    texts = [block for block in content[first:] if block.get("type") == "text"]
    return [*content[:first], *texts, *(block for block in content[first:] if block.get("type") != "text")]


def _is_empty_text(block: dict[str, Any]) -> bool:
    return block.get("type") == "text" and not str(block.get("text", "")).strip()
