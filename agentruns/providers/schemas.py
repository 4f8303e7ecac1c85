"""Tools in the form that providers accept, and the way back for the names of a call's arguments.

A provider that refuses one schema refuses the whole request, and so every run of the agent. The gate checks a
call's arguments against the tool's own schema, whatever form of it was sent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentruns.providers.base import ModelReply, ModelRequest

Schema = dict[str, Any]
Names = Mapping[str, Mapping[str, str]]  # tool -> the tool's name of an argument -> the name that is sent

_UNFIT = re.compile(r"[^a-zA-Z0-9_.-]")  # in the name of a property
_LONGEST = 64  # characters of such a name
_CHOICES = ("anyOf", "oneOf", "allOf")  # which no provider accepts at the top of a schema


def acceptable(request: ModelRequest) -> tuple[ModelRequest, Names]:
    """Give each tool of a request a schema that providers accept; also find the arguments with other names.

    Earlier calls in the conversation get the other names, too.
    """
    tools, names = [], dict[str, dict[str, str]]()
    for tool in request.tools:
        schema = _merged(tool["input_schema"])
        properties, renamed = dict[str, Any](), dict[str, str]()
        for name, each in schema["properties"].items():
            sent = short = _UNFIT.sub("_", name)[:_LONGEST] or "_"
            number = 1
            while sent in properties or (sent != name and sent in schema["properties"]):
                number += 1
                sent = f"{short[: _LONGEST - 4]}_{number}"
            properties[sent] = each
            if sent != name:
                renamed[name] = sent
        schema = {**schema, "properties": properties}
        if renamed:
            names[tool["name"]] = renamed
            required = [renamed.get(name, name) for name in schema.get("required", [])]
            schema |= {"required": required} if required else {}
        tools.append({**tool, "input_schema": schema})
    messages = request.messages
    if names:
        messages = [{**message, "content": _renamed(message["content"], names)} for message in messages]
    return replace(request, tools=tools, messages=messages), names


def restored(reply: ModelReply, names: Names) -> ModelReply:
    """Give the arguments of a reply's calls the names that their tools know."""
    back = {tool: {sent: name for name, sent in renamed.items()} for tool, renamed in names.items()}
    return replace(reply, content=_renamed(reply.content, back)) if names else reply


def _renamed(content: Any, names: Names) -> Any:
    """Rename the arguments of the calls among a message's blocks."""
    if not isinstance(content, list):
        return content
    blocks = []
    for block in content:
        known = names.get(block.get("name", "")) if block["type"] == "tool_use" else None
        if known and isinstance(block["input"], dict):
            given = {known.get(key, key): each for key, each in block["input"].items()}
            blocks.append({**block, "input": given})
        else:
            blocks.append(block)
    return blocks


def _merged(schema: Schema) -> Schema:
    """Build the schema of one object from a schema that may offer a choice of several at its top.

    The object has the properties of all choices. It requires what every choice requires; of `allOf`, what any
    part requires.
    """
    merged = {name: each for name, each in schema.items() if name not in _CHOICES}
    properties = dict(schema.get("properties") or {})
    required = list(schema.get("required") or [])
    for choice in _CHOICES:
        parts = [_resolved(part, schema) for part in schema.get(choice) or []]
        for part in parts:
            properties = {**(part.get("properties") or {}), **properties}
        needed = [list(part.get("required") or []) for part in parts]
        for name in [name for names in needed for name in names]:
            everywhere = choice == "allOf" or all(name in names for names in needed)
            if everywhere and name not in required and name in properties:
                required.append(name)
    merged |= {"type": "object", "properties": properties}
    return merged | ({"required": required} if required else {})


def _resolved(part: Any, schema: Schema) -> Schema:
    """Find the definition behind a `$ref` of the schema itself, and merge its own choices."""
    part = part if isinstance(part, dict) else {}
    kind, _, name = str(part.get("$ref", "")).rpartition("/")
    is_named = kind in ("#/$defs", "#/definitions")
    found = (schema.get(kind.removeprefix("#/")) or {}).get(name) if is_named else part
    found = found if isinstance(found, dict) else {}
    inner = {name: each for name, each in found.items() if name != "$ref"}
    return _merged(inner) if inner.keys() & {*_CHOICES} else inner
