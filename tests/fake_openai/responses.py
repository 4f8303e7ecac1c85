"""The Responses API: what it refuses, and its answers whole and as events."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from typing import Any

from tests.fake_openai import rules
from tests.fake_openai.rules import Refused

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


def check(body: Any, encrypted: set[str]) -> None:
    """Raise Refused for a request that the API would not take; `encrypted`: reasoning it has given."""
    for name in rules.of(dict, body, "body"):
        if name not in _PARAMETERS:
            raise Refused(f"Unknown parameter: '{name}'.", code="unknown_parameter")
    for name in ("model", "input"):
        if name not in body:
            raise Refused(f"Missing required parameter: '{name}'.", code="missing_required_parameter")
    rules.limit(body, "max_output_tokens")
    for each in body.get("include", []):
        rules.one_of(each, "include", _INCLUDES)
    if ENCRYPTED in body.get("include", []) and not rules.REASONING.match(body["model"]):
        raise Refused("Encrypted content is not supported with this model.")
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
    if not rules.of(list, items, "input"):
        raise Refused("Missing required parameter: 'input'.", code="missing_required_parameter")
    open_calls: list[str] = []
    calls: set[str] = set()
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = rules.of(dict, item, where).get("type", "message")
        rules.one_of(
            kind,
            f"{where}.type",
            ("message", "function_call", "function_call_output", "reasoning", "web_search_call"),
        )
        if "id" in item and kind in ("message", "function_call") and body.get("store") is False:
            raise Refused(
                f"Item with id '{item['id']}' not found. Items are not persisted when `store` is set to "
                "false. Try again with `store` set to true, or remove this item from your input.",
                404,
            )
        if kind == "function_call_output":
            rules.known(item, where, ("type",), ("call_id", "output"))
            if item["call_id"] not in open_calls:
                raise Refused(f"No tool call found for function call output with call_id {item['call_id']}.")
            open_calls.remove(item["call_id"])
            _content(item["output"], f"{where}.output", _PARTS)
            continue
        if open_calls and not (kind != "message" and items[number - 1].get("type") == "function_call"):
            raise Refused(f"No tool output found for function call {open_calls[0]}.")
        if kind == "message":
            _message(item, where)
        elif kind == "function_call":
            rules.known(item, where, ("type", "status"), ("call_id", "name", "arguments"))
            rules.named(item["name"], f"{where}.name")
            if not isinstance(item["call_id"], str) or not 0 < len(item["call_id"]) <= 64:
                raise Refused(f"Invalid '{where}.call_id': string of 1 to 64 characters expected.")
            if item["call_id"] in calls:
                raise Refused(f"Duplicate function call with call_id {item['call_id']}.")
            json.loads(rules.of(str, item["arguments"], f"{where}.arguments"))
            open_calls.append(item["call_id"])
            calls.add(item["call_id"])
        elif kind == "reasoning":
            _reasoning(items, number, encrypted)
    if open_calls:
        raise Refused(f"No tool output found for function call {open_calls[0]}.")


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
    if not rules.of(list, content, where):
        raise Refused(f"Invalid '{where}': empty array.", code="empty_array")
    for number, part in enumerate(content):
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
    where = f"input[{number}]"
    rules.known(item, where, ("type", "status", "content"), ("id", "summary", "encrypted_content"))
    if item["encrypted_content"] not in encrypted:
        raise Refused(
            f"The encrypted content {str(item['encrypted_content'])[:4]}... could not be verified.",
            code="invalid_encrypted_content",
        )
    following = items[number + 1] if number + 1 < len(items) else {}
    kind = following.get("type", "message")
    if kind not in ("function_call", "reasoning", "web_search_call") and following.get("role") != "assistant":
        raise Refused(
            f"Item '{item['id']}' of type 'reasoning' was provided without its required following item."
        )


def replies(body: Item) -> int:
    """Return how many replies are in a request: each ends where the user speaks, or results are."""
    items = body["input"] if isinstance(body["input"], list) else []
    own = [item.get("role") == "assistant" or item.get("type") in _OWN for item in items]
    return sum(is_own and not before for is_own, before in zip(own, [False, *own], strict=False))


_OWN = ("function_call", "reasoning", "web_search_call")


def answer(body: Item, content: list[Item], stop: str | None, usage: Item, encrypted: set[str]) -> Item:
    """Return the response; `content`: blocks as scripts have them, or items of OpenAI's own."""
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


def events(response: Item, cut: Any) -> Iterator[Item]:
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
    """Return the usage of a response."""
    details = {"cached_tokens": cached, "cache_write_tokens": 0}
    return {
        "input_tokens": sent,
        "input_tokens_details": details,
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": written // 2},
        "total_tokens": sent + written,
    }


def broken(error: Item, number: int) -> Item:
    """Return the event of an error in the middle of a stream."""
    said = {name: error[name] for name in ("code", "message", "param")}
    return {"type": "error", **said, "sequence_number": number}
