"""The Chat Completions API: what it refuses, and its answers whole and in chunks."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from tests.fake_openai import rules
from tests.fake_openai.rules import require

Message = dict[str, Any]

_PARAMETERS = frozenset({
    "messages", "model", "max_completion_tokens", "max_tokens", "metadata", "parallel_tool_calls",
    "reasoning_effort", "response_format", "seed", "service_tier", "stop", "store", "stream",
    "stream_options", "temperature", "tool_choice", "tools", "top_p", "user",
})  # fmt: skip
_ROLES = ("assistant", "developer", "system", "tool", "user")
_OPENAIS = re.compile(r"gpt-|o\d")
_NO_TOOLS_HERE = re.compile(r"gpt-(5\.[4-9]|[6-9])")


def check(body: Any, has_files: bool) -> None:
    """Raise Refused for a request that the API would not take; `has_files`: the server takes PDFs."""
    for name in rules.of(dict, body, "body"):
        require(name in _PARAMETERS, f"Unrecognized request argument supplied: {name}")
    for name in ("model", "messages"):
        require(name in body, f"Missing required parameter: '{name}'.", "missing_required_parameter")
    model = body["model"]
    for limit, is_taken in (
        ("max_tokens", not rules.REASONING.match(model)),
        ("max_completion_tokens", _OPENAIS.match(model)),
    ):
        require(limit not in body or is_taken, f"Unsupported parameter: '{limit}'.", "unsupported_parameter")
    is_right = "stream_options" not in body or body.get("stream")
    require(is_right, "The 'stream_options' parameter is only allowed when 'stream' is enabled.")
    if "tools" in body:
        is_taken = not _NO_TOOLS_HERE.match(model) or body.get("reasoning_effort") == "none"
        require(is_taken, f"Function tools are not supported for {model} here: use /v1/responses.")
        for number, tool in enumerate(rules.filled(body["tools"], "tools")):
            where = f"tools[{number}]"
            rules.known(tool, where, (), ("type", "function"))
            rules.known(tool["function"], where, ("description", "strict"), ("name", "parameters"))
            rules.function(tool["function"], where, is_strict=tool["function"].get("strict") is True)
    if (format := body.get("response_format")) is not None:
        rules.one_of(format.get("type"), "response_format.type", ("text", "json_object", "json_schema"))
        rules.form(format["json_schema"], "response_format.json_schema")
    waiting: list[str] = []
    roles = [each.get("role") for each in body["messages"]]
    twice = [one for one, next_one in itertools.pairwise(roles) if one == next_one != "tool"]
    require(not (twice and "qwen" in model), "Conversation roles must alternate user/assistant/user/...")
    turn = max((n for n, each in enumerate(body["messages"]) if each.get("role") == "user"), default=0)
    for number, message in enumerate(rules.filled(body["messages"], "messages")):
        where = f"messages[{number}]"
        role = rules.one_of(rules.of(dict, message, where).get("role"), f"{where}.role", _ROLES)
        if role == "tool":
            rules.known(message, where, ("role",), ("content", "tool_call_id"))
            is_asked = message["tool_call_id"] in waiting
            require(is_asked, f"{where}: a tool message must be a response to preceding 'tool_calls'.")
            waiting.remove(message["tool_call_id"])
            _content(message["content"], where, ("text",), has_files)
            continue
        _require_answers(waiting)
        if role == "assistant":
            waiting = _assistant(message, where, model)
            if waiting and number > turn:
                _open_turn(message, model)
        else:
            rules.known(message, where, ("role", "name"), ("content",))
            kinds = ("text", "image_url", "file") if role == "user" else ("text",)
            _content(message["content"], where, kinds, has_files)
    _require_answers(waiting)


def _require_answers(waiting: list[str]) -> None:
    require(not waiting, f"'tool_calls' without response messages: {', '.join(waiting)}")


def _open_turn(message: Message, model: str) -> None:
    """Refuse a reply with calls in the open turn that lacks what its server wants back there."""
    google = message["tool_calls"][0].get("extra_content", {}).get("google", {})
    is_signed = "gemini-3" not in model or google.get("thought_signature")
    require(is_signed, "Function call is missing a thought_signature in functionCall parts.")
    has_thought = "deepseek" not in model or "reasoning_content" in message
    require(has_thought, "The `reasoning_content` in the thinking mode must be passed back to the API.")


def _assistant(message: Message, where: str, model: str) -> list[str]:
    own = () if _OPENAIS.match(model) else ("reasoning", "reasoning_content", "reasoning_details")
    rules.known(message, where, ("role", "content", "refusal", "tool_calls", *own))
    if message.get("content") is not None:
        _content(message["content"], where, ("text",), False)
    else:
        require(message.get("tool_calls"), f"Invalid '{where}.content': expected a string, got null.")
    ids: list[str] = []
    at = f"{where}.tool_calls"
    for call in rules.filled(message["tool_calls"], at) if "tool_calls" in message else ():
        more = () if _OPENAIS.match(model) else ("extra_content",)
        rules.known(call, at, more, ("id", "type", "function"))
        rules.known(call["function"], at, (), ("name", "arguments"))
        rules.named(call["function"]["name"], f"{at}.name")
        json.loads(rules.of(str, call["function"]["arguments"], f"{at}.arguments"))
        is_own = rules.of(str, call["id"], f"{at}.id") and call["id"] not in ids
        require(is_own, f"Invalid '{at}.id': {call['id']!r}.")
        ids.append(call["id"])
    return ids


def _content(content: Any, where: str, kinds: tuple[str, ...], has_files: bool) -> None:
    if isinstance(content, str):
        return
    for number, part in enumerate(rules.filled(content, f"{where}.content")):
        at = f"{where}.content[{number}]"
        kind = rules.one_of(rules.of(dict, part, at).get("type"), f"{at}.type", kinds)
        rules.known(part, at, (), ("type", kind))
        if kind == "text":
            rules.of(str, part["text"], at)
        elif kind == "image_url":
            rules.known(part["image_url"], at, ("detail",), ("url",))
            rules.image(part["image_url"]["url"], at)
        else:
            require(has_files, f"Unknown part type: file ('{at}')")
            rules.known(part["file"], at, (), ("filename", "file_data"))
            rules.file(part["file"]["filename"], part["file"]["file_data"], at)


def replies(body: Message) -> int:
    """Count the replies in a request."""
    return sum(message.get("role") == "assistant" for message in body["messages"])


def answer(
    body: Message, content: list[Message], stop: str | None, usage: Message, encrypted: set[str]
) -> Message:
    """Build the completion; `content`: blocks as scripts have them."""
    message: Message = {"role": "assistant", "content": None, "refusal": None}
    calls = []
    for block in content:
        if block["type"] == "tool_use":
            given = block["input"]
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            function = {"name": block["name"], "arguments": arguments}
            more = {name: block[name] for name in ("extra_content",) if name in block}
            calls.append({"id": block["id"], "type": "function", "function": function, **more})
        elif block["type"] == "text":
            message["content"] = (message["content"] or "") + block["text"]
        elif block["type"] == "refusal":
            message["refusal"] = block["refusal"]
        else:  # what only some servers have: "reasoning" beside the content
            message |= {name: value for name, value in block.items() if name != "type"}
    if calls:
        message["tool_calls"] = calls
    reasons = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length", "refusal": "stop"}
    finish = reasons.get(stop or "", stop)
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": 1790000000,
        "model": f"{body['model']}-2026-03-05" if _OPENAIS.match(body["model"]) else body["model"],
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
        "usage": usage,
    }


def events(completion: Message, cut: Any, body: Message) -> Iterator[Message]:
    """Yield the chunks of a completion in the order of the API."""
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    shared = {name: completion[name] for name in ("id", "created", "model")}
    (choice,) = completion["choices"]
    message = choice["message"]

    def chunk(delta: Message, finish: str | None = None) -> Message:
        one = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        nothing = {"usage": None} if with_usage else {}
        return {**shared, "object": "chat.completion.chunk", "choices": [one], **nothing}

    yield chunk({"role": "assistant", "content": "", "refusal": None})
    for name in ("reasoning", "reasoning_content", "content", "refusal"):
        for piece in cut(message.get(name) or ""):
            yield chunk({name: piece})
    for detail in message.get("reasoning_details") or []:
        for piece in cut(detail["text"]):
            yield chunk({"reasoning_details": [{**detail, "text": piece}]})
    for index, call in enumerate(message.get("tool_calls", [])):
        function = {**call["function"], "arguments": ""}
        yield chunk({"tool_calls": [{"index": index, **call, "function": function}]})
        for piece in cut(call["function"]["arguments"]):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    if choice["finish_reason"] is not None:
        yield chunk({}, choice["finish_reason"])
    if with_usage:
        yield {**shared, "object": "chat.completion.chunk", "choices": [], "usage": completion["usage"]}


def usage(sent: int, cached: int, written: int) -> Message:
    """Build the usage of a completion."""
    return {
        "prompt_tokens": sent,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens": written,
        "completion_tokens_details": {"reasoning_tokens": written // 2},
        "total_tokens": sent + written,
    }
