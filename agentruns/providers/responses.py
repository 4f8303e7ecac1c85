"""OpenAI's Responses API: requests and replies as data, without the network."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from agentruns.providers import blocks
from agentruns.providers.base import ModelReply, ModelRequest
from agentruns.providers.blocks import ITEM, TEXT_EXTRAS, Block
from agentruns.providers.failures import answered

ENCRYPTED = "reasoning.encrypted_content"
_ITEMS = ("response.output_item.added", "response.output_item.done")
_ARGUMENTS = ("response.function_call_arguments.delta", "response.function_call_arguments.done")
_STOPS = {"max_output_tokens": "max_tokens", "max_messages": "max_tokens"}


def body(request: ModelRequest, params: dict[str, Any], identity: str) -> dict[str, Any]:
    """Build the JSON of a request with the whole conversation, because the provider stores nothing."""
    found = {"store": False, **params, "include": [*params.get("include", []), ENCRYPTED]}
    if "max_tokens" in found:
        found["max_output_tokens"] = found.pop("max_tokens")
    if request.system:
        found["instructions"] = request.system
    # Strict unless told otherwise, and then arguments with defaults would be refused.
    tools = [{"type": "function", **each, "strict": False} for each in blocks.functions(request)]
    if tools := [*tools, *params.get("tools", [])]:
        found["tools"] = tools
    if (form := blocks.answer_form(request)) is not None:
        found["text"] = {**params.get("text", {}), "format": {"type": "json_schema", **form}}
    found["input"] = []

    def is_own(block: Block) -> bool:
        return block["type"] == ITEM and bool(block["from"].partition(":")[0] == identity.partition(":")[0])

    for message in request.messages:
        if message["role"] == "assistant":
            said: list[Block] = []
            for block in blocks.readable(blocks.blocks_of(message), is_own):
                if block["type"] == "text":
                    phase = {"phase": block["phase"]} if block.get("phase") else {}
                    said.append({"role": "assistant", "content": block["text"], **phase})
                elif block["type"] == "tool_use":
                    call = {"call_id": block["id"], "name": block["name"]}
                    said.append({"type": "function_call", **call, "arguments": json.dumps(block["input"])})
                else:
                    own = block.get("from") == identity and "encrypted_content" in block["item"]
                    # Of the reasoning, what this model can read.
                    said += [block["item"]] if own or not blocks.is_private(block) else []
            while said and said[-1].get("type") == "reasoning":  # refused without what it led to
                said.pop()
            found["input"] += said
            continue
        results, rest = blocks.results_of(message)
        for result in results:
            parts = [_part(block, identity) for block in blocks.result_parts(result)]
            is_text = all(part["type"] == "input_text" for part in parts)
            output = "\n".join(part["text"] for part in parts) if is_text else parts
            about = {"call_id": result["tool_use_id"], "output": output}
            found["input"].append({"type": "function_call_output", **about})
        parts = [_part(block, identity) for block in rest]
        found["input"] += [{"role": "user", "content": parts}] if parts else []
    return found


def without_reasoning(sent: dict[str, Any], *, include: bool) -> dict[str, Any]:
    """Copy a request without earlier reasoning; request encrypted reasoning only if `include`."""
    kept = [item for item in sent["input"] if item.get("type") != "reasoning"]
    asked = [each for each in sent["include"] if include or each != ENCRYPTED]
    return {**sent, "input": kept, "include": asked}


def _part(block: Block, identity: str) -> Block:
    kind, content, name = blocks.part(block, identity)
    if kind == "text":
        return {"type": "input_text", "text": content}
    if kind == "image":
        return {"type": "input_image", "image_url": content, "detail": "auto"}
    is_data = content.startswith("data:")
    file = {"filename": name, "file_data": content} if is_data else {"file_url": content}
    return {"type": "input_file", **file}


class Collected:
    """A reply that is built from the events of its stream; `tools` are the tools of the request."""

    def __init__(self, tools: Iterable[Any] = ()) -> None:
        self.raw: dict[str, Any] = {}
        self._tools = tools
        self._items: dict[int, Block] = {}
        self._begun: set[Any] = set()  # items as (kind of event, place, id, type)
        self._written: list[Block] = []  # the events with arguments

    def add(self, event: dict[str, Any]) -> str:
        """Add an event; return the piece of text in it, or "". Raises ProviderError for an error event."""
        kind, place = event.get("type", ""), event.get("output_index")
        if kind == "error":
            raise answered(event)
        if kind in _ITEMS:
            self._begun.add((kind, place, event["item"].get("call_id"), event["item"].get("type")))
        if kind == "response.output_item.done":
            self._items[len(self._items) if place is None else place] = event["item"]
        if kind in _ARGUMENTS and (event.get("delta") or event.get("arguments")):
            self._written.append(event)
        if isinstance(event.get("response"), dict):
            self.raw = event["response"]
        return str(event["delta"]) if kind == "response.output_text.delta" else ""

    def whole(self) -> dict[str, Any]:
        """Build the response from its events.

        Each item comes from its own event, or from the last event if that lists more items. Raises
        ProviderError if the events of a call hold different arguments. Also raises it if a completed response
        may have lost a call or mixed up arguments. Passes broken arguments of a single call, because the gate
        judges them.
        """
        listed = self.raw.get("output") or []
        items = self._items if len(listed) <= len(self._items) else dict(enumerate(listed))
        found = {place: items[place] for place in sorted(items)}
        calls = [place for place in found if found[place].get("type") == "function_call"]
        owned = [(self._owner(event, found), event) for event in self._written]
        for place in calls:
            same = [item for item in listed if item.get("call_id") == found[place].get("call_id")]
            own = [event for owner, event in owned if owner == place]
            pieces = "".join(event.get("delta") or "" for event in own)
            said = (*(each.get("arguments") for each in (found[place], *same, *own)), pieces)
            texts = [text for text in said if not blocks.is_nothing(text)]
            wholes = [each for each in map(blocks.whole_object, texts) if each is not None]
            if any(each != wholes[0] for each in wholes):
                raise blocks.unreadable()
            found[place] = {**found[place], "arguments": next(iter(texts), None)}
        if self.raw.get("status") == "completed":  # no call of another reply runs
            begun = [each[0] for each in self._begun if each[-1] == "function_call"]
            ends = {item.get("call_id") for item in listed if item.get("type") == "function_call"}
            lost = any(begun.count(kind) > len(calls) for kind in _ITEMS)
            lost |= not {owner for owner, _ in owned} <= {*calls}
            lost |= not ends <= {found[place].get("call_id") for place in calls}
            told = [(found[place].get("name"), found[place]["arguments"]) for place in calls]
            is_sure = all(event.get("output_index", owner) == owner for owner, event in owned)
            blocks.check_pieces(told + [("", "")] * lost, self._tools, sure=is_sure)
        return {**self.raw, "output": [*found.values()] or self.raw.get("output")}

    def _owner(self, event: Block, found: dict[int, Block]) -> Any:
        """Find the index in `found` of the item that an event's arguments are for; None if not certain."""
        place, item_id = event.get("output_index"), event.get("item_id")
        same = [at for at, item in found.items() if item_id and item.get("id") == item_id]
        if len(same) == 1:
            return same[0]
        named = {each[2] for each in self._begun if each[1] in (None, place)}
        return place if place in found and named <= {found[place].get("call_id")} else None


def reply(raw: dict[str, Any], identity: str) -> ModelReply:
    """Convert a response to a reply; raises ProviderError if the response failed or cannot be used."""
    if raw.get("status") == "failed" or raw.get("error"):
        raise answered(raw.get("error") or {})
    content: list[Block] = []
    reason = str((raw.get("incomplete_details") or {}).get("reason") or "incomplete")
    stops = {"completed": "end_turn", "incomplete": _STOPS.get(reason, reason)}
    stop = stops.get(str(raw.get("status")))
    for item in raw.get("output") or []:
        if item["type"] == "function_call":
            content.append(blocks.call_block(item.get("call_id"), item.get("name"), item.get("arguments")))
        elif item["type"] == "message":
            for part in item["content"]:
                stop = "refusal" if part["type"] == "refusal" else stop
                extras = {**item, **part}
                kept = {name: extras[name] for name in TEXT_EXTRAS if extras.get(name)}
                content.append({"type": "text", "text": part.get("text", part.get("refusal", "")), **kept})
        else:
            content.append({"type": ITEM, "from": identity, "item": item})
    return blocks.reply(content, stop, raw, identity.partition(":")[0])
