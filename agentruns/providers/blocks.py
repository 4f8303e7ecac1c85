"""Blocks that move from one provider to another, and forms that both of OpenAI's APIs share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import pairwise
from typing import Any

from agentruns.providers.attachments import limits_of
from agentruns.providers.base import ModelReply, ModelRequest, ProviderError, check_reply, token_count

Block = dict[str, Any]
Messages = list[Block]

# A part of a reply that only its provider understands: {"type": ITEM, "from": identity, "item": {...}}.
ITEM = "provider_item"
EXTRAS = "call_extras"  # an item with the members of a call that only its server understands
THINKING = ("thinking", "redacted_thinking")
TEXT_EXTRAS = ("phase", "annotations")  # of a text from OpenAI, which takes them back
GONE = "[Left out of this conversation: the provider refused it.]"
FOREIGN = (
    "The conversation holds a block that this model cannot be sent: {kind}. Continue with the model that "
    "wrote it, or in a new session."
)
ELSEWHERE = "[Here another provider's model used a tool of its provider: {kind}.]"
UNREADABLE = (
    "The reply cannot be read: its stream does not tell for certain which arguments belong to which call. "
    "The model is asked again."
)


def foreign(block: Block) -> ProviderError:
    """Build the ProviderError for a block that this model does not accept."""
    kind = block["item"].get("type") if block["type"] == ITEM else block["type"]
    return ProviderError(FOREIGN.format(kind=kind), disposition="pause", type="foreign_block")


def is_private(block: Block) -> bool:
    """Check whether a block is reasoning or a call's extras, which are left out for another model."""
    is_item = block["type"] == ITEM and block["item"].get("type") in ("reasoning", EXTRAS)
    return is_item or block["type"] in THINKING


def readable(content: list[Block], is_own: Callable[[Block], bool]) -> list[Block]:
    """Replace uses of other providers' own tools, which this provider refuses, by texts before the rest.

    `is_own` tells whether this provider reads a block that is no text, call, reasoning or extras. The texts
    keep the model from repeating what a tool did.
    """
    kept, notes = [], []
    for block in content:
        if block["type"] in ("text", "tool_use") or is_private(block) or is_own(block):
            kept.append(block)
        elif not block["type"].endswith("_tool_result"):
            kind = block["item"].get("type") if block["type"] == ITEM else block.get("name", block["type"])
            notes.append({"type": "text", "text": ELSEWHERE.format(kind=kind)})
    return [*notes, *kept]


def blocks_of(message: Block) -> list[Block]:
    """List the blocks of a message; a content that is a string becomes one text block."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def open_turn(messages: Messages) -> int:
    """Find the first message of the open turn, which follows the user's last message without results."""
    for place in range(len(messages) - 1, -1, -1):
        if messages[place]["role"] == "user" and not results_of(messages[place])[0]:
            return place + 1
    return 0


def for_claude(messages: Messages, thinking: Any = None) -> tuple[Messages, Any]:
    """Convert a conversation for Claude; also find the `thinking` parameter that fits its open turn.

    Left out are other providers' reasoning and extras, a server tool's call without its result, and thinking
    at the end of a reply, all of which Claude refuses; texts stand for other items of another provider. In a
    turn with replies without thinking, such as a fallback's or one that was left out, thinking is off.
    """
    converted: Messages = []
    results = {block.get("tool_use_id") for message in messages for block in blocks_of(message)}
    for place, message in enumerate(messages):
        content = message["content"]
        if message["role"] == "assistant" and not isinstance(content, str):
            content = readable(content, lambda block: block["type"] != ITEM)
            kept = [block for block in content if block["type"] != ITEM]
            following = [each["role"] for each in messages[place + 1 : place + 2]]
            if following:  # not a paused turn, which goes on as it is
                kept = [b for b in kept if b["type"] != "server_tool_use" or b.get("id") in results]
            while following == ["user"] and kept and kept[-1]["type"] in THINKING:
                kept.pop()
            content = [
                {key: each for key, each in b.items() if b["type"] != "text" or key not in TEXT_EXTRAS}
                for b in kept
            ]
        converted += [{**message, "content": content}] if content else []
    turn = converted[(start := open_turn(converted)) :]
    firsts = {
        blocks_of(message)[0]["type"]
        for before, message in pairwise([{"role": "user"}, *turn])
        if message["role"] == "assistant" and before["role"] == "user"
    }
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    # Thinking is refused in a turn that has lost some of it. A reply that was left out begins with GONE; a
    # user who types that text loses nothing.
    has_lost = any(blocks_of(each)[0].get("text") == GONE for each in turn if each["role"] == "assistant")
    if kind == "disabled" or (kind and has_lost) or (kind == "enabled" and not firsts <= {*THINKING}):
        thinking = {"type": "disabled"}
        for place, message in enumerate(turn, start):
            kept = [block for block in blocks_of(message) if block["type"] not in THINKING]
            converted[place] = {**message, "content": kept}
        converted = [message for message in converted if message["content"]]
    return converted, thinking


def results_of(message: Block) -> tuple[list[Block], list[Block]]:
    """Split the blocks of a user message into tool results and other blocks."""
    blocks = blocks_of(message)
    results = [block for block in blocks if block["type"] == "tool_result"]
    return results, [block for block in blocks if block["type"] != "tool_result"]


def result_parts(result: Block) -> list[Block]:
    """List the blocks of a result; a text before them marks a failed call, because OpenAI has no flag."""
    parts = blocks_of({"content": result.get("content") or ""})
    return [{"type": "text", "text": "The call failed:"}, *parts] if result.get("is_error") else parts


def part(block: Block, identity: str) -> tuple[str, str, str]:
    """Convert a block to a tuple: its kind, its text or the URL of its file, and the file's name.

    The name of a file ends with .pdf, because providers recognize a PDF by that. Raises ProviderError for a
    file that the model refuses, and for another kind of block.
    """
    kind, source, title = block["type"], block.get("source", {}), str(block.get("title") or "")
    if kind == "text":
        return kind, block["text"], ""
    if kind == "document" and source["type"] == "text":
        return "text", f"{title}:\n{source['data']}" if title else source["data"], ""
    name = title if title.lower().endswith(".pdf") else f"{title or 'document'}.pdf"
    is_file, types = kind in ("document", "image"), limits_of(identity).types
    if is_file and source["type"] == "base64" and source["media_type"] in types:
        return kind, f"data:{source['media_type']};base64,{source['data']}", name
    if is_file and source["type"] == "url":
        return kind, source["url"], name
    raise foreign(block)


def functions(request: ModelRequest) -> list[dict[str, Any]]:
    """Convert the tools of a request to functions in OpenAI's form."""
    return [
        {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
        for tool in request.tools
    ]


def answer_form(request: ModelRequest) -> dict[str, Any] | None:
    """Build OpenAI's form of structured output, strict if the schema allows that; None without a schema."""
    schema = request.output_schema
    if schema is None:
        return None
    if "$ref" in schema:  # of a recursive model; the outermost schema must be an object
        schema = {**schema["$defs"][schema["$ref"].rpartition("/")[2]], "$defs": schema["$defs"]}
    try:
        return {"name": "answer", "schema": _strict(schema), "strict": True}
    except ValueError:
        return {"name": "answer", "schema": schema, "strict": False}


def _strict(schema: Any) -> Any:
    """Convert a schema to require every property and to allow no other; raises ValueError if impossible.

    Defaults, which OpenAI refuses, are removed. A value of the stricter schema also fits the pydantic model.
    """
    if "$ref" in schema:  # OpenAI allows no other keyword beside it
        return {"$ref": schema["$ref"]}
    found = {name: value for name, value in schema.items() if name not in ("default", "discriminator")}
    if "oneOf" in found:
        found["anyOf"] = found.pop("oneOf")
    for name in {"properties", "$defs"} & found.keys():
        found[name] = {key: _strict(value) for key, value in found[name].items()}
    if "items" in found:
        found["items"] = _strict(found["items"])
    if "anyOf" in found:
        found["anyOf"] = [_strict(each) for each in found["anyOf"]]
    is_open = found.get("type") == "object" and (
        "properties" not in found or found.get("additionalProperties")
    )
    is_typed = {"type", "anyOf", "enum", "const"} & found.keys()
    if is_open or not is_typed or {"allOf", "prefixItems", "not", "patternProperties"} & found.keys():
        raise ValueError("strict schemas have no such thing")
    if "properties" in found:
        found |= {"required": [*found["properties"]], "additionalProperties": False}
    return found


def call_block(call_id: Any, name: Any, arguments: Any) -> Block:
    """Build the block of a call. Arguments that are no JSON stay a text, which the gate refuses."""
    arguments = {} if is_nothing(arguments) else arguments
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def is_nothing(arguments: Any) -> bool:
    """Check whether a call has no arguments, in any form that servers use."""
    return arguments in (None, {}) or (isinstance(arguments, str) and arguments.strip() in ("", "null"))


def whole_object(arguments: Any) -> dict[str, Any] | None:
    """Parse the arguments of a call; None if they are no complete JSON object."""
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return arguments if isinstance(arguments, dict) else None


def check_pieces(calls: list[tuple[Any, Any]], tools: Iterable[Any], *, sure: bool = True) -> None:
    """Refuse a streamed reply in which arguments may belong to another call; raises ProviderError.

    `calls` are the name and the arguments of each call; empty arguments if none arrived. `sure` means that
    each piece of arguments named its call. Refuses a call without a name, and a call that lacks arguments
    beside a call with broken ones. Unless `sure`, refuses every call that lacks arguments or has broken ones.
    Other broken arguments pass, because the gate judges them.
    """
    without = [tool["name"] for tool in tools if tool["input_schema"].get("properties") == {}]
    empty = any(is_nothing(text) and name not in without for name, text in calls)
    said = [(name, whole_object(text)) for name, text in calls if not is_nothing(text)]
    broken = any(given is None or (given and name in without) for name, given in said)
    if (empty and broken) or (not sure and (empty or broken)) or not all(name for name, _ in calls):
        raise unreadable()


def unreadable() -> ProviderError:
    """Build the ProviderError for a stream whose arguments cannot be assigned to calls for certain."""
    return ProviderError(UNREADABLE, disposition="retry", type="incomplete_reply")


def usage_of(raw: Any) -> dict[str, Any]:
    """Convert OpenAI's usage to the counts that prices use. Cached tokens do not also count as input."""
    if not isinstance(raw, dict):
        return {}
    details = raw.get("input_tokens_details") or raw.get("prompt_tokens_details")
    more = raw.get("output_tokens_details") or raw.get("completion_tokens_details")
    read, written = token_count(details, "cached_tokens"), token_count(details, "cache_write_tokens")
    sent = token_count(raw, "input_tokens") or token_count(raw, "prompt_tokens")
    return {
        "input_tokens": max(0, sent - read - written),
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
        "output_tokens": token_count(raw, "output_tokens") or token_count(raw, "completion_tokens"),
        "reasoning_tokens": token_count(more, "reasoning_tokens"),  # of the output
    }


def reply(content: list[Block], stop: str | None, raw: dict[str, Any], provider: str) -> ModelReply:
    """Build and check a reply; name its model "provider:model". Raises ProviderError if it is unusable."""
    if stop in ("end_turn", "tool_use"):  # some servers say "stop" of a reply with calls
        stop = "tool_use" if any(block["type"] == "tool_use" for block in content) else "end_turn"
    model = f"{provider}:{raw['model']}" if raw.get("model") else ""
    return check_reply(ModelReply(content, stop, usage_of(raw.get("usage")), model=model))
