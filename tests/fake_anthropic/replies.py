"""Earlier replies: signatures of thinking, and a memory to compare with messages sent back."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterable
from typing import Any

_KEY = b"agentruns.testing.FakeAnthropic"
_SALT_BYTES = 8
THINKING = ("thinking", "redacted_thinking")

Block = dict[str, Any]


def sign(thinking: str, shown: str) -> str:
    """Return the signature of a thinking block; every server gives the same, so none has to remember it."""
    salt = hashlib.sha256(thinking.encode("utf-8", "surrogatepass")).digest()[:_SALT_BYTES]
    return base64.b64encode(salt + _mac(salt, shown)).decode()


def _mac(salt: bytes, shown: str) -> bytes:
    return hmac.digest(_KEY, salt + shown.encode("utf-8", "surrogatepass"), "sha256")


def _is_signed(block: Block) -> bool:
    try:
        raw = base64.b64decode(block["signature"], validate=True)
    except ValueError:
        return False
    salt, mac = raw[:_SALT_BYTES], raw[_SALT_BYTES:]
    return hmac.compare_digest(mac, _mac(salt, block["thinking"]))


def signed(content: list[Block], *, omitted: bool) -> list[Block]:
    """Return the content with every thinking block signed; `omitted`: without its text, as on request."""
    return [_signed(block, omitted) if block.get("type") == "thinking" else block for block in content]


def _signed(block: Block, omitted: bool) -> Block:
    thinking = block.get("thinking", "")
    shown = "" if omitted else thinking
    return {**block, "thinking": shown, "signature": block.get("signature") or sign(thinking, shown)}


class Replies:
    """Remembers replies; safe for threads. A server that starts again knows those its script spells out."""

    def __init__(self, contents: Iterable[list[Block]] = ()) -> None:
        self._lock = threading.Lock()
        self._blocks: set[str] = set()
        self._thoughts: dict[str, list[list[str]]] = {}  # by tool_use id
        self._paused: list[list[str]] = []
        for content in contents:
            self.remember(signed(content, omitted=False), None)

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

    def is_genuine(self, block: Block) -> bool:
        """Tell if a thinking block is as it was given."""
        if self.has(block):
            return True
        return block["type"] == "thinking" and _is_signed(block)

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
