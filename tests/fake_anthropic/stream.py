"""A message as the events of a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

_SIZES = (1, 7, 3, 11, 2, 17)  # odd on purpose: deltas end in the middle of words and of JSON

Event = dict[str, Any]


def encode(event: Event) -> bytes:
    """Return one event as it goes over the wire."""
    return f"event: {event['type']}\ndata: ".encode() + encode_json(event) + b"\n\n"


def encode_json(value: Any) -> bytes:
    """Return JSON in UTF-8; what UTF-8 cannot hold is escaped."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def events(message: dict[str, Any]) -> Iterator[Event]:
    """Yield the events of a message in the order of the API, one ping among them."""
    usage = message["usage"]
    opening = {
        **message,
        "content": [],
        "stop_reason": None,
        "stop_details": None,
        "usage": {**usage, "output_tokens": min(1, usage["output_tokens"])},
    }
    yield {"type": "message_start", "message": opening}
    if not message["content"]:
        yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        start, deltas = _parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        if index == 0:
            yield {"type": "ping"}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    said = {name: message[name] for name in ("stop_reason", "stop_sequence", "stop_details")}
    totals = {name: value for name, value in usage.items() if name.endswith("_tokens")}
    yield {"type": "message_delta", "delta": said, "usage": totals}
    yield {"type": "message_stop"}


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what a block starts as, and the deltas that complete it; an unknown one comes whole."""
    match block["type"]:
        case "text":
            cited = [{"type": "citations_delta", "citation": each} for each in block.get("citations") or []]
            empty = {"text": "", **({"citations": []} if cited else {})}
            return {**block, **empty}, [*cited, *_deltas("text_delta", "text", block["text"])]
        case "thinking":
            signed = [{"type": "signature_delta", "signature": block["signature"]}]
            deltas = _deltas("thinking_delta", "thinking", block["thinking"])
            return {**block, "thinking": "", "signature": ""}, [*deltas, *signed]
        case "tool_use" | "server_tool_use" | "mcp_tool_use":
            first = {"type": "input_json_delta", "partial_json": ""}
            given = block["input"]  # text: JSON as far as it was written
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False) if given else ""
            return {**block, "input": {}}, [first, *_deltas("input_json_delta", "partial_json", text)]
        case _:
            return block, []


def _deltas(kind: str, field: str, text: str) -> list[dict[str, Any]]:
    sizes, start, deltas = itertools.cycle(_SIZES), 0, list[dict[str, Any]]()
    while start < len(text):
        size = next(sizes)
        deltas.append({"type": kind, field: text[start : start + size]})
        start += size
    return deltas
