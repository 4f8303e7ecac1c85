"""The fake Messages API: what is answered to which request."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.fake_anthropic.conversation import Replies, check_conversation, signed
from tests.fake_anthropic.fake import Fake
from tests.fake_anthropic.faults import Fault, Refused
from tests.fake_anthropic.http import Answer, encode_json, pieces, plain, streamed
from tests.fake_anthropic.rules import VERSION, check_breakpoints, check_request
from tests.fake_anthropic.tokens import PromptCache, count_content, count_request

if TYPE_CHECKING:
    from anthropic import Anthropic

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 402: "billing_error", 403: "permission_error",
    404: "not_found_error", 408: "timeout_error", 409: "conflict_error", 413: "request_too_large",
    422: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 504: "timeout_error",
    529: "overloaded_error",
}  # fmt: skip
_BROKEN = b'event: content_block_delta\ndata: {"type": "content_block_delta", "ind\n\n'

Event = dict[str, Any]


class FakeAnthropic(Fake):
    """A Messages API; only its requests for messages are counted, and meet faults.

    In raw content a tool_use whose `input` is text streams that text: JSON cut short by max_tokens.
    """

    def __init__(self, script: Any = (), *, api_key: str = "sk-ant-fake-key", **options: Any) -> None:
        super().__init__(script, api_key=api_key, **options)
        self.cache = PromptCache()
        self._replies = Replies()

    def environment(self) -> dict[str, str]:
        """Name the variables with which another process asks this fake."""
        return {"ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.api_key}

    def client(self, **options: Any) -> Anthropic:
        """Make a client of the real SDK, without retries unless asked for."""
        import anthropic

        client: Anthropic = self.make_client(anthropic, "Anthropic", **{"max_retries": 0, **options})
        return client

    def is_counted(self, method: str, route: str) -> bool:
        return (method, route) == ("POST", MESSAGES)

    def refusal(self, fault: Fault) -> Refused:
        if isinstance(fault.kind, int):
            status, type = fault.kind, TYPES.get(fault.kind, "api_error")
            if type == "api_error" and status < 500:
                type = "invalid_request_error"
        else:
            type = fault.type
            status = next((status for status, each in TYPES.items() if each == type), 500)
        text = fault.message or ("Overloaded" if type == "overloaded_error" else "Something is wrong")
        return Refused(text, status, type=type, code=fault.error_code, headers=fault.headers)

    def error_body(self, refused: Refused, request_id: str) -> dict[str, Any]:
        error: dict[str, Any] = {"type": refused.type or TYPES[refused.status], "message": refused.message}
        if refused.code:
            error["details"] = {"error_code": refused.code}
        return {"type": "error", "error": error, "request_id": request_id}

    def answer(
        self, route: str, headers: dict[str, str], body: Any, fault: Fault | None, named: dict[str, str]
    ) -> Answer:
        if route not in (MESSAGES, COUNT_TOKENS):
            raise Refused("Not found", 404)
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if key != self.api_key:
            raise Refused("invalid x-api-key", 401)
        if headers.get("anthropic-version") != VERSION:
            raise Refused(f'anthropic-version: "{headers.get("anthropic-version")}" is not a valid version')
        check_request(body, counting=route == COUNT_TOKENS)
        check_conversation(body, self._replies)
        check_breakpoints(body)
        self.check_content(body, "messages")
        if route == COUNT_TOKENS:
            return plain(200, {"input_tokens": count_request(body)}, None, named)
        if (tokens := count_request(body)) > self.window:
            raise Refused(f"prompt is too long: {tokens} tokens > {self.window} maximum")
        message = self._message(body)
        if body.get("stream"):
            return self._streamed(self.bend(list(_events(message))), fault, named)
        if fault and fault.kind == "error":
            raise self.refusal(fault)
        # Without streaming a call whose JSON was cut short has no input.
        content = [{**b, "input": {}} if isinstance(b.get("input"), str) else b for b in message["content"]]
        return plain(200, {**message, "content": content}, fault, named)

    def _message(self, body: Any) -> dict[str, Any]:
        replied = sum(message["role"] == "assistant" for message in body["messages"])
        content, stop_reason, given = self.turn(body, replied)
        content = signed(content, omitted=(body.get("thinking") or {}).get("display") == "omitted")
        self._replies.remember(content)
        refusal = {"type": "refusal", "category": None, "explanation": None}
        used = {**self.cache.usage(body), "output_tokens": count_content(content), "service_tier": "standard"}
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "stop_details": refusal if stop_reason == "refusal" else None,
            "usage": {**used, **given},
        }

    def _streamed(self, events: list[Event], fault: Fault | None, named: dict[str, str]) -> Answer:
        # Whatever breaks off a stream takes its last event.
        places = [place for place, event in enumerate(events) if event["type"] != "ping"]
        after = 3 if fault is None or fault.after is None else fault.after
        error = b""
        if fault and fault.kind == "error":
            error = _encoded(self.error_body(self.refusal(fault), named[self.request_id_header]))
        cut = places[min(after, len(places) - 1)]
        return streamed([*map(_encoded, events)], cut, fault, named, error=error, corrupt=_BROKEN)


def _encoded(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + encode_json(event) + b"\n\n"


def _events(message: dict[str, Any]) -> Iterator[Event]:
    """Yield the events of a message in the order of the API, one ping among them."""
    usage = message["usage"]
    begun = {**usage, "output_tokens": min(1, usage["output_tokens"])}
    opening = {**message, "content": [], "stop_reason": None, "stop_details": None, "usage": begun}
    yield {"type": "message_start", "message": opening}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        start, deltas = _parts(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    said = {name: message[name] for name in ("stop_reason", "stop_sequence", "stop_details")}
    totals = {name: value for name, value in usage.items() if name.endswith("_tokens")}
    yield {"type": "message_delta", "delta": said, "usage": totals}
    yield {"type": "message_stop"}


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Split a block into what it starts as and the deltas that complete it; an unknown one comes whole."""
    match block["type"]:
        case "text":
            cited = [{"type": "citations_delta", "citation": each} for each in block.get("citations") or []]
            empty = {"text": "", **({"citations": []} if cited else {})}
            return {**block, **empty}, [*cited, *_deltas("text_delta", "text", block["text"])]
        case "thinking":
            signature = [{"type": "signature_delta", "signature": block["signature"]}]
            deltas = _deltas("thinking_delta", "thinking", block["thinking"])
            return {**block, "thinking": "", "signature": ""}, [*deltas, *signature]
        case "tool_use" | "server_tool_use" | "mcp_tool_use":
            first = {"type": "input_json_delta", "partial_json": ""}
            given = block["input"]  # text: JSON as far as it was written
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False) if given else ""
            return {**block, "input": {}}, [first, *_deltas("input_json_delta", "partial_json", text)]
        case _:
            return block, []


def _deltas(kind: str, field: str, text: str) -> list[dict[str, Any]]:
    return [{"type": kind, field: piece} for piece in pieces(text)]
