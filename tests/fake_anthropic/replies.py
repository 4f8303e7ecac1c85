"""Earlier replies: signatures of thinking, and a memory to compare with messages sent back."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from typing import Any

THINKING = ("thinking", "redacted_thinking")

Block = dict[str, Any]


def sign(thinking: str, shown: str) -> str:
    """Return the signature of a thinking block."""
    return hashlib.sha256(json.dumps([thinking, shown]).encode()).hexdigest()


def signed(content: list[Block], *, omitted: bool) -> list[Block]:
    """Return the content with every thinking block signed; `omitted`: without its text, as on request."""
    return [_signed(block, omitted) if block.get("type") == "thinking" else block for block in content]


def _signed(block: Block, omitted: bool) -> Block:
    thinking = block.get("thinking", "")
    shown = "" if omitted else thinking
    return {**block, "thinking": shown, "signature": block.get("signature") or sign(thinking, shown)}


class Replies:
    """Remembers replies; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: set[str] = set()
        self._thoughts: dict[str, list[list[str]]] = {}  # by tool_use id
        self._paused: list[list[str]] = []

    def remember(self, content: list[Block], stop_reason: str | None) -> None:
        """Keep the reply."""
        with self._lock:
            self._blocks.update(_keys(content))
            for block in content:
                if block.get("type") == "tool_use":
                    self._thoughts.setdefault(str(block.get("id")), []).append(_thoughts(content))
            if stop_reason == "pause_turn":
                self._paused.append(_spoken(content))

    def has(self, block: Block) -> bool:
        """Tell if exactly this block was in a reply."""
        with self._lock:
            return _key(block) in self._blocks

    def has_its_thoughts(self, content: list[Block]) -> bool:
        """Tell if a turn with known calls still has the thinking blocks it had beside them."""
        found = _thoughts(content)
        ids = [str(block.get("id")) for block in content if block.get("type") == "tool_use"]
        with self._lock:
            known = [self._thoughts[each] for each in ids if each in self._thoughts]
        return all(any(_contains(found, thoughts) for thoughts in each) for each in known)

    def was_paused(self, content: list[Block]) -> bool:
        """Tell if the content ends with a reply that stopped with `pause_turn`."""
        spoken = _spoken(content)
        with self._lock:
            return any(spoken[-len(each) :] == each for each in self._paused)


def _thoughts(content: list[Block]) -> list[str]:
    return _keys(block for block in content if block.get("type") in THINKING)


def _contains(whole: list[str], part: list[str]) -> bool:
    # A turn that was paused and went on may come back as one message.
    return any(whole[n : n + len(part)] == part for n in range(len(whole) - len(part) + 1))


def _spoken(content: list[Block]) -> list[str]:
    # Empty text may be left out of what is sent back; indeed it must be.
    return _keys(b for b in content if b.get("type") != "text" or str(b.get("text", "")).strip())


def _keys(content: Iterable[Block]) -> list[str]:
    return [_key(block) for block in content]


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
