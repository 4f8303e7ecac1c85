"""Blocks that cross from one provider to another: what each can read of a conversation."""

from __future__ import annotations

import json
from typing import Any

from agentruns.providers.base import ModelReply, ProviderError, check_reply

Block = dict[str, Any]
Messages = list[Block]

# A part of a reply that only its provider understands: {"type": ITEM, "from": identity, "item": {...}}.
ITEM = "provider_item"
THINKING = ("thinking", "redacted_thinking")
TEXT_EXTRAS = ("phase", "annotations")  # of a text from OpenAI, which takes them back
FOREIGN = (
    "The conversation holds a block that this model cannot be sent: {kind}. Continue with the model that "
    "wrote it, or in a new session."
)


def foreign(kind: str) -> ProviderError:
    """Return the error for a block that cannot go on with another provider."""
    return ProviderError(FOREIGN.format(kind=kind), disposition="pause", type="foreign_block")


def is_reasoning(block: Block) -> bool:
    """Return whether a block is reasoning, which another model does without."""
    return block["type"] in THINKING or (block["type"] == ITEM and block["item"].get("type") == "reasoning")


def blocks_of(message: Block) -> list[Block]:
    """Return the content of a message as blocks."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def for_claude(messages: Messages) -> Messages:
    """Return a conversation as Claude takes it: without what other providers added to their replies."""
    found: Messages = []
    for message in messages:
        content = message["content"]
        if message["role"] == "assistant" and not isinstance(content, str):
            content = [_for_claude(block) for block in content if block["type"] != ITEM or _keep(block)]
        if content:
            found.append({**message, "content": content})
    return found


def _for_claude(block: Block) -> Block:
    if block["type"] != "text" or not any(name in block for name in TEXT_EXTRAS):
        return block
    return {name: value for name, value in block.items() if name not in TEXT_EXTRAS}


def _keep(block: Block) -> bool:
    if not is_reasoning(block):
        raise foreign(str(block["item"].get("type")))
    return False


def results_of(message: Block) -> tuple[list[Block], list[Block]]:
    """Return a user message's results and its other blocks."""
    blocks = blocks_of(message)
    results = [block for block in blocks if block["type"] == "tool_result"]
    return results, [block for block in blocks if block["type"] != "tool_result"]


def result_parts(result: Block) -> list[Block]:
    """Return the blocks of a result; the first text says if it is an error, for which OpenAI has no flag."""
    content = result.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [{"type": "text", "text": "The call failed:"}, *parts] if result.get("is_error") else parts


def text_of_document(block: Block) -> str | None:
    """Return a text document as text with its title, or None for another one."""
    source = block["source"]
    if source["type"] != "text":
        return None
    return f"{block['title']}:\n{source['data']}" if block.get("title") else str(source["data"])


def url_of(block: Block) -> str:
    """Return the address of a file's content: its own, or one that holds the data."""
    source = block["source"]
    if source["type"] == "base64":
        return f"data:{source['media_type']};base64,{source['data']}"
    if source["type"] != "url":
        raise foreign(f"{block['type']} whose source is {source['type']}")
    return str(source["url"])


def file_name(block: Block) -> str:
    """Return the name of a PDF: by its ending the provider knows what it is."""
    title = str(block.get("title") or "document")
    return title if title.lower().endswith(".pdf") else f"{title}.pdf"


def arguments_of(block: Block) -> str:
    """Return the input of a call as the JSON text that OpenAI has."""
    return json.dumps(block["input"], ensure_ascii=False)


def call_block(call_id: Any, name: Any, arguments: Any) -> Block:
    """Return a call as a block; arguments that are no JSON stay a text, which the gate refuses."""
    given: Any = arguments
    if isinstance(arguments, str):
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            given = arguments
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def usage_of(raw: Any) -> dict[str, Any]:
    """Return OpenAI's usage by the kinds that prices have: what was cached is not counted as input too."""
    if not isinstance(raw, dict):
        return {}
    details = raw.get("input_tokens_details") or raw.get("prompt_tokens_details") or {}
    read, written = details.get("cached_tokens") or 0, details.get("cache_write_tokens") or 0
    sent = raw.get("input_tokens") or raw.get("prompt_tokens") or 0
    more = raw.get("output_tokens_details") or raw.get("completion_tokens_details") or {}
    return {
        "input_tokens": max(0, sent - read - written),
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": written,
        "output_tokens": raw.get("output_tokens") or raw.get("completion_tokens") or 0,
        "reasoning_tokens": more.get("reasoning_tokens") or 0,  # of the output
    }


def reply(content: list[Block], stop: str | None, raw: dict[str, Any], provider: str) -> ModelReply:
    """Return the checked reply to a request; its model is named with the provider, as prices are."""
    if stop in ("end_turn", "tool_use"):  # some servers say "stop" of a reply with calls
        stop = "tool_use" if any(block["type"] == "tool_use" for block in content) else "end_turn"
    model = f"{provider}:{raw['model']}" if raw.get("model") else ""
    return check_reply(ModelReply(content, stop, usage_of(raw.get("usage")), model=model))


def strict(schema: Any) -> tuple[Any, bool]:
    """Return a JSON Schema as OpenAI enforces it, and whether it can: else it is sent as it is.

    Every property is required and no other allowed; a default would be refused. A pydantic model reads what
    fits the stricter schema.
    """
    try:
        if "$ref" in schema:  # of a model that holds itself; the outermost schema has to be an object
            schema = {**schema["$defs"][schema["$ref"].rpartition("/")[2]], "$defs": schema["$defs"]}
        return _strict(schema), True
    except ValueError:
        return schema, False


def _strict(schema: Any) -> Any:
    if not isinstance(schema, dict):
        raise ValueError("true and false as schemas")
    found = {name: value for name, value in schema.items() if name not in ("default", "discriminator")}
    if "oneOf" in found:
        found["anyOf"] = found.pop("oneOf")
    for name in ("properties", "$defs"):
        if name in found:
            found[name] = {key: _strict(value) for key, value in found[name].items()}
    if "items" in found:
        found["items"] = _strict(found["items"])
    if "anyOf" in found:
        found["anyOf"] = [_strict(each) for each in found["anyOf"]]
    if found.get("type") == "object":
        if "properties" not in found or found.get("additionalProperties"):
            raise ValueError("an object with any names")
        found |= {"required": list(found["properties"]), "additionalProperties": False}
    if {"allOf", "prefixItems", "not", "patternProperties"} & found.keys():
        raise ValueError("a keyword that strict schemas have not")
    if "$ref" in found:  # beside which nothing may stand
        found = {"$ref": found["$ref"]}
    return found
