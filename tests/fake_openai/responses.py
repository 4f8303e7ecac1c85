"""The Responses API: what it refuses, and its answers whole and as events."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from typing import Any

from tests.fake_openai import rules
from tests.fake_openai.rules import require

Item = dict[str, Any]

_PARAMETERS = frozenset({
    "input", "model", "include", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "parallel_tool_calls", "prompt_cache_key", "reasoning", "service_tier", "store", "stream", "temperature",
    "text", "tool_choice", "tools", "top_p", "truncation", "user",
})  # fmt: skip
_INCLUDES = {"reasoning.encrypted_content", "web_search_call.action.sources"}
_PARTS = {
    "input_text": (("type", "text"), ()),
    "input_image": (("type", "image_url"), ("detail",)),
    "input_file": (("type",), ("filename", "file_data", "file_url")),
}
ENCRYPTED = "reasoning.encrypted_content"
_OWN = ("function_call", "reasoning", "web_search_call")


def check(body: Any, encrypted: set[str]) -> None:
    """Raise Refused for a request that the API would not take; `encrypted`: reasoning it has given."""
    for name in rules.of(dict, body, "body"):
        require(name in _PARAMETERS, f"Unknown parameter: '{name}'.", "unknown_parameter")
    for name in ("model", "input"):
        require(name in body, f"Missing required parameter: '{name}'.", "missing_required_parameter")
    limit = body.get("max_output_tokens", 16)
    is_right = isinstance(limit, int) and limit >= 16
    require(is_right, "Invalid 'max_output_tokens': below minimum value.", "integer_below_min_value")
    for each in body.get("include", []):
        rules.one_of(each, "include", _INCLUDES)
    reasons = rules.REASONING.match(body["model"]) or ENCRYPTED not in body.get("include", [])
    require(reasons, "Encrypted content is not supported with this model.")
    for number, tool in enumerate(rules.of(list, body.get("tools", []), "tools")):
        where = f"tools[{number}]"
        if rules.one_of(tool.get("type"), f"{where}.type", ("function", "web_search")) == "function":
            rules.known(tool, where, ("description", "strict", "type"), ("name", "parameters"))
            rules.function(tool, where, is_strict=tool.get("strict", True) is not False)
    format = rules.known(body.get("text", {}), "text", ("format", "verbosity")).get("format")
    if format and rules.one_of(format.get("type"), "text.format.type", ("text", "json_schema")) != "text":
        rules.form(format, "text.format")
    _input(body, encrypted)


def _input(body: Item, encrypted: set[str]) -> None:
    items = body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    open_calls: list[str] = []
    calls: set[str] = set()
    for number, item in enumerate(rules.filled(items, "input")):
        where = f"input[{number}]"
        kind = rules.of(dict, item, where).get("type", "message")
        rules.one_of(kind, f"{where}.type", ("message", "function_call_output", *_OWN))
        is_stored = kind in ("message", "function_call") and "id" in item and body.get("store") is False
        require(not is_stored, f"Items are not persisted, nor is '{item.get('id')}'.", status=404)
        if kind == "function_call_output":
            rules.known(item, where, ("type",), ("call_id", "output"))
            require(item["call_id"] in open_calls, f"No tool call found for call_id {item['call_id']}.")
            open_calls.remove(item["call_id"])
            _content(item["output"], f"{where}.output", _PARTS)
            continue
        goes_on = kind != "message" and items[number - 1].get("type") == "function_call"
        require(not open_calls or goes_on, f"No tool output found for function calls {open_calls}.")
        if kind == "message":
            _message(item, where)
        elif kind == "function_call":
            rules.known(item, where, ("type", "status"), ("call_id", "name", "arguments"))
            rules.named(item["name"], f"{where}.name")
            is_id = isinstance(item["call_id"], str) and 0 < len(item["call_id"]) <= 64
            require(
                is_id and item["call_id"] not in calls, f"Invalid '{where}.call_id': {item['call_id']!r}."
            )
            json.loads(rules.of(str, item["arguments"], f"{where}.arguments"))
            open_calls.append(item["call_id"])
            calls.add(item["call_id"])
        elif kind == "reasoning":
            _reasoning(items, number, encrypted)
    require(not open_calls, f"No tool output found for function calls {open_calls}.")


def _message(item: Item, where: str) -> None:
    rules.known(item, where, ("type", "phase", "status"), ("role", "content"))
    role = rules.one_of(item["role"], f"{where}.role", ("assistant", "system", "developer", "user"))
    if "phase" in item:
        rules.one_of(item["phase"], f"{where}.phase", ("commentary", "final_answer"))
    answered = {"output_text": (("type", "text"), ("annotations",)), "refusal": (("type", "refusal"), ())}
    _content(item["content"], f"{where}.content", answered if role == "assistant" else _PARTS)


def _content(content: Any, where: str, parts: Any) -> None:
    if isinstance(content, str):
        return
    for number, part in enumerate(rules.filled(content, where)):
        at = f"{where}[{number}]"
        kind = rules.one_of(rules.of(dict, part, at).get("type"), f"{at}.type", parts)
        required, optional = parts[kind]
        rules.known(part, at, optional, required)
        if kind == "input_image":
            rules.image(part["image_url"], f"{at}.image_url")
        elif kind == "input_file" and "file_url" not in part:
            rules.file(part.get("filename"), part.get("file_data"), at)
        elif "text" in part:
            rules.of(str, part["text"], f"{at}.text")


def _reasoning(items: list[Item], number: int, encrypted: set[str]) -> None:
    item = items[number]
    required = ("id", "summary", "encrypted_content")
    rules.known(item, f"input[{number}]", ("type", "status", "content"), required)
    is_known = item["encrypted_content"] in encrypted
    require(is_known, "The encrypted content could not be verified.", "invalid_encrypted_content")
    following = items[number + 1] if number + 1 < len(items) else {}
    is_followed = following.get("type", "message") in _OWN or following.get("role") == "assistant"
    require(is_followed, f"'{item['id']}' of type 'reasoning' was provided without its following item.")


def replies(body: Item) -> int:
    """Count the replies in a request: each ends where the user speaks, or results are."""
    items = body["input"] if isinstance(body["input"], list) else []
    own = [item.get("role") == "assistant" or item.get("type") in _OWN for item in items]
    return sum(is_own and not before for is_own, before in zip(own, [False, *own], strict=False))


def answer(body: Item, content: list[Item], stop: str | None, usage: Item, encrypted: set[str]) -> Item:
    """Build the response; `content`: blocks as scripts have them, or items of OpenAI's own."""
    output = [_item(block, body, encrypted) for block in content]
    reason = {"max_tokens": "max_output_tokens", "content_filter": "content_filter"}.get(stop or "")
    status = "incomplete" if reason else "in_progress" if stop is None else "completed"
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": 1790000000,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "model": f"{body['model']}-2026-03-05",
        "output": output,
        "parallel_tool_calls": True,
        "store": body.get("store", True),
        "usage": usage,
    }


def _item(block: Item, body: Item, encrypted: set[str]) -> Item:
    made = secrets.token_hex(8)
    if block["type"] in ("text", "refusal"):
        part = {"type": "output_text", "text": block.get("text"), "annotations": block.get("annotations", [])}
        if block["type"] == "refusal":
            part = {"type": "refusal", "refusal": block["refusal"]}
        item = {"type": "message", "id": f"msg_{made}", "status": "completed", "role": "assistant"}
        phase = {"phase": block["phase"]} if "phase" in block else {}
        return {**item, "content": [part], **phase}
    if block["type"] == "tool_use":
        given = block["input"]
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        call = {"call_id": block["id"], "name": block["name"], "arguments": arguments}
        return {"type": "function_call", "id": f"fc_{made}", "status": "completed", **call}
    if block["type"] == "reasoning":
        item = {"type": "reasoning", "id": f"rs_{made}", "summary": [], **block}
        if ENCRYPTED in body.get("include", []):
            item["encrypted_content"] = f"gAAA{secrets.token_hex(16)}"
            encrypted.add(item["encrypted_content"])
        return item
    return block


def events(response: Item, cut: Any, body: Item) -> Iterator[Item]:
    """Yield the events of a response in the order of the API."""
    numbers = itertools.count()
    opening = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}

    def event(kind: str, **members: Any) -> Item:
        return {"type": kind, **members, "sequence_number": next(numbers)}

    yield event("response.created", response=opening)
    yield event("response.in_progress", response=opening)
    for index, item in enumerate(response["output"]):
        at = {"output_index": index}
        begun = {**item, "status": "in_progress"}
        if "content" in item:
            begun["content"] = []
        if "arguments" in item:
            begun["arguments"] = ""
        if "encrypted_content" in item:
            begun["encrypted_content"] = "gAAA-not-yet-whole"
        yield event("response.output_item.added", item=begun, **at)
        if item["type"] == "message":
            for place, part in enumerate(item["content"]):
                name = "refusal" if part["type"] == "refusal" else "text"
                kind = "response.refusal" if name == "refusal" else "response.output_text"
                where = {**at, "item_id": item["id"], "content_index": place}
                yield event("response.content_part.added", part={**part, name: ""}, **where)
                for piece in cut(part[name]):
                    extra = {} if name == "refusal" else {"logprobs": []}
                    yield event(f"{kind}.delta", delta=piece, **extra, **where)
                yield event(f"{kind}.done", **{name: part[name]}, **where)
                yield event("response.content_part.done", part=part, **where)
        elif item["type"] == "function_call":
            where = {**at, "item_id": item["id"]}
            for piece in cut(item["arguments"]):
                yield event("response.function_call_arguments.delta", delta=piece, **where)
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield event("response.function_call_arguments.done", **done, **where)
        yield event("response.output_item.done", item=item, **at)
    if response["status"] != "in_progress":
        yield event(f"response.{response['status']}", response=response)


def usage(sent: int, cached: int, written: int) -> Item:
    """Build the usage of a response."""
    return {
        "input_tokens": sent,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": written // 2},
        "total_tokens": sent + written,
    }
