"""Answers on the wire: in one piece or as a stream of events, intact or spoilt by a fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.fake_anthropic.faults import Fault
from tests.fake_anthropic.stream import Event, encode, encode_json

_DEFAULT_AFTER = 3
_BROKEN = b'event: content_block_delta\ndata: {"type": "content_block_delta", "ind\n\n'
_PING = encode({"type": "ping"})


@dataclass(frozen=True, slots=True)
class Answer:
    """Bytes to send. `length`: what content-length says, None for a chunked answer. `pause`: seconds before
    each chunk. `clean`: whether it ends as HTTP wants; else the connection is closed."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    length: int | None = None
    pause: float = 0
    clean: bool = True


DROPPED = Answer(0, clean=False)


def plain(status: int, body: Any, fault: Fault | None, headers: Mapping[str, str]) -> Answer:
    """Return an answer in one piece."""
    data = encode_json(body)
    length, clean, pause = len(data), True, 0.0
    match fault.kind if fault else None:
        case "drop":
            data, clean = data[: length // 2], False
        case "truncate":
            data = data[: length // 2]
            length = len(data)
        case "corrupt":
            data = data[: length // 2] + b",,}"
            length = len(data)
        case "empty":
            data, length = b"", 0
        case "slow" if fault:
            pause = fault.delay
    return Answer(status, {"content-type": "application/json", **headers}, [data], length, pause, clean)


def streamed(events: list[Event], fault: Fault | None, headers: Mapping[str, str], request_id: str) -> Answer:
    """Return an answer in events."""
    given = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **headers}
    chunks = [encode(event) for event in events]
    if fault is None:
        return Answer(200, given, chunks)
    cut = _cut(events, _DEFAULT_AFTER if fault.after is None else fault.after)
    pause = 0.0
    match fault.kind:
        case "drop" | "truncate":
            chunks = chunks[:cut]
        case "error":
            chunks = [*chunks[:cut], encode({**fault.error().body(request_id)})]
        case "corrupt":
            chunks = [*chunks[:cut], _BROKEN, *chunks[cut:]]
        case "empty":
            chunks = []
        case "slow":
            chunks = [_PING + chunk for chunk in chunks]
            pause = fault.delay
    return Answer(200, given, chunks, None, pause, fault.kind != "drop")


def _cut(events: list[Event], after: int) -> int:
    """Return where `after` events have been sent; whatever breaks off a stream takes its last event."""
    places = [place for place, event in enumerate(events) if event["type"] != "ping"]
    return places[min(after, len(places) - 1)]
