"""The cost of a request: tokens by a fixed rule, and a prompt cache that remembers prefixes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_CHARACTERS_PER_TOKEN = 4
_LOOKBACK = 20  # blocks before a breakpoint in which the API looks for an earlier entry
_TTLS = ("5m", "1h")


@dataclass(frozen=True, slots=True)
class Segment:
    """One tool, system block or content block: `text` is what is counted, `ttl` that of a breakpoint."""

    text: str
    ttl: str | None

    @property
    def tokens(self) -> int:
        """Tokens by the rule."""
        return count(self.text)


def count(text: str) -> int:
    """Count the tokens of a text: one for every four characters begun."""
    return -(-len(text) // _CHARACTERS_PER_TOKEN)


def count_content(content: list[dict[str, Any]]) -> int:
    """Count the tokens of a reply."""
    return sum(count(_text(block)) for block in content)


def count_request(body: dict[str, Any]) -> int:
    """Count the tokens of a request: those of its segments."""
    return sum(segment.tokens for segment in segments(body))


def segments(body: dict[str, Any]) -> list[Segment]:
    """Cut the request into segments, in the order in which it is cached: tools, system, messages."""
    found = [*_segments("tool", body.get("tools") or [])]
    found += _segments("system", _blocks(body.get("system") or []))
    # Another tool choice or thinking setting keeps what is cached of tools and system, but no message.
    settings = _text({name: body.get(name) for name in ("tool_choice", "thinking")})
    for number, message in enumerate(body["messages"]):
        prefix = f"{message['role']}{settings if number == 0 else ''}"
        found += _segments(prefix, _blocks(message["content"]))
    return found


def _blocks(value: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _segments(prefix: str, blocks: list[dict[str, Any]]) -> Iterator[Segment]:
    for block in blocks:
        ttls = [marker.get("ttl", "5m") for marker in markers(block)]
        yield Segment(f"{prefix}:{_text(_bare(block))}", ttls[-1] if ttls else None)


def markers(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Find the breakpoints of a block and of the blocks inside it."""
    inner = block.get("content")
    nested = [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []
    return [each["cache_control"] for each in (*nested, block) if each.get("cache_control")]


def _bare(value: Any) -> Any:
    # Moving a breakpoint must not change what it is the breakpoint of.
    if isinstance(value, dict):
        return {name: _bare(each) for name, each in value.items() if name != "cache_control"}
    return [_bare(each) for each in value] if isinstance(value, list) else value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


class PromptCache:
    """Remembers every prefix up to a breakpoint; the longest one found again is read, not written."""

    def __init__(self) -> None:
        self._entries: set[str] = set()
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget everything, as after a long wait."""
        with self._lock:
            self._entries.clear()

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        """Count the input side of `usage`, and remember the prefixes of this request."""
        found = segments(body)
        prefixes = list(_prefixes(body["model"], found))
        breakpoints = [n for n, segment in enumerate(found) if segment.ttl is not None]
        with self._lock:
            read = self._read(prefixes, breakpoints)
            written = self._write(prefixes, breakpoints, found, read)
        created = {ttl: written.get(ttl, 0) for ttl in _TTLS}
        return {
            "input_tokens": sum(segment.tokens for segment in found) - read - sum(created.values()),
            "cache_creation_input_tokens": sum(created.values()),
            "cache_read_input_tokens": read,
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": tokens for ttl, tokens in created.items()},
        }

    def _read(self, prefixes: list[tuple[str, int]], breakpoints: list[int]) -> int:
        for position in range(max(breakpoints, default=-1), -1, -1):
            if not any(place - _LOOKBACK < position <= place for place in breakpoints):
                continue
            key, tokens = prefixes[position]
            if key in self._entries:
                return tokens
        return 0

    def _write(
        self, prefixes: list[tuple[str, int]], breakpoints: list[int], found: list[Segment], read: int
    ) -> dict[str, int]:
        done, written = read, dict[str, int]()
        for position in breakpoints:
            (key, tokens), ttl = prefixes[position], found[position].ttl or "5m"
            if tokens > done:
                written[ttl] = written.get(ttl, 0) + tokens - done
                done = tokens
                self._entries.add(key)
        return written


def _prefixes(model: str, found: list[Segment]) -> Iterator[tuple[str, int]]:
    digest, tokens = hashlib.sha256(model.encode()), 0
    for segment in found:
        text = segment.text.encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8, "big") + text)
        tokens += segment.tokens
        yield digest.hexdigest(), tokens
