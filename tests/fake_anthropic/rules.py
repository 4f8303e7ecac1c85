"""Rules for what the package puts into a request, apart from its conversation, in the API's own words."""

from __future__ import annotations

import re
from collections.abc import Collection
from io import BytesIO
from typing import Any

import pypdf
from PIL import Image

from tests.fake_anthropic.faults import Refused
from tests.fake_anthropic.tokens import markers

SIDE, PAGES = 8_000, 100  # the latter in a context of less than a million tokens
VERSION = "2026-10-21"  # of the API: without sampling parameters

_COUNTED = frozenset({
    "cache_control", "output_config", "speed", "system", "thinking", "tool_choice", "tools",
})  # fmt: skip
_CREATED = _COUNTED | {
    "container", "diagnostics", "inference_geo", "metadata", "service_tier", "stop_sequences", "stream",
}  # fmt: skip
_TOOL = frozenset({
    "type", "description", "cache_control", "strict", "input_examples", "defer_loading",
    "allowed_callers", "eager_input_streaming",
})  # fmt: skip
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PROPERTY = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MAX_BREAKPOINTS = 4
_JSON_NAMES = {str: "string", int: "integer", dict: "dictionary", list: "list"}


def check_request(body: Any, *, counting: bool) -> None:
    """Raise Refused for what is wrong with the fields of a request; its messages are checked elsewhere."""
    required = ["model", "messages"] if counting else ["model", "max_tokens", "messages"]
    fields(body, "", required, _COUNTED if counting else _CREATED)
    of(int, body.get("max_tokens", 1), "max_tokens")
    if not re.fullmatch(r"claude-[a-z0-9.@-]+", body["model"]):
        raise Refused(f"model: {body['model']}", 404)
    system = body.get("system", "-")
    for number, block in enumerate([{"type": "text", "text": system}] if isinstance(system, str) else system):
        where = f"system.{number}"
        tagged(block, where, ["text"])
        fields(block, where, ["type", "text"], ["cache_control", "citations"])
        if not block["text"].strip():
            raise Refused("system: text content blocks must contain non-whitespace text")
        cache_control(block.get("cache_control"), f"{where}.cache_control")
    _tools(body.get("tools", []))
    if form := (body.get("output_config") or {}).get("format"):
        tagged(form, "output_config.format", ["json_schema"])
        fields(form, "output_config.format", ["type", "schema"], [])
        _closed(form["schema"], "output_config.format.schema")


def check_breakpoints(body: dict[str, Any]) -> None:
    """Raise Refused for too many breakpoints, or long ones after short ones; the rest is well formed."""
    system = body.get("system")
    blocks = [*body.get("tools", []), *(system if isinstance(system, list) else [])]
    for message in body["messages"]:
        blocks += message["content"] if isinstance(message["content"], list) else []
    found = [marker for block in blocks for marker in markers(block)]
    if len(found) > _MAX_BREAKPOINTS:
        raise Refused(f"A maximum of 4 blocks with cache_control may be provided. Found {len(found)}.")
    ttls = [marker.get("ttl", "5m") for marker in found]
    if ttls != sorted(ttls):  # "1h" before "5m"
        raise Refused("cache_control: a ttl='1h' block must not come after a ttl='5m' block.")


def _tools(tools: Any) -> None:
    of(list, tools, "tools")
    for number, tool in enumerate(tools):
        where = f"tools.{number}"
        if tool.get("type") in (None, "custom"):  # the provider's own are whatever it takes
            _custom_tool(tool, f"{where}.custom")
        cache_control(tool.get("cache_control"), f"{where}.cache_control")
    names = [tool["name"] for tool in tools if "name" in tool]
    if len(names) != len(set(names)):
        raise Refused("tools: Tool names must be unique.")


def _custom_tool(tool: dict[str, Any], where: str) -> None:
    fields(tool, where, ["name", "input_schema"], _TOOL)
    if not _TOOL_NAME.fullmatch(tool["name"]):
        raise Refused(f"{where}.name: String should match pattern '^{_TOOL_NAME.pattern}$'")
    of(str, tool.get("description", ""), f"{where}.description")
    schema, at = tool["input_schema"], f"{where}.input_schema"
    of(dict, schema, at)
    if schema.get("type") != "object":
        raise Refused(f"{at}.type: Input should be 'object'")
    if schema.keys() & {"oneOf", "allOf", "anyOf"}:
        raise Refused(f"{at}: input_schema does not support oneOf, allOf, or anyOf at the top level")
    for name in schema.get("properties") or {}:
        if not _PROPERTY.fullmatch(name):
            raise Refused(f"{at}.properties: Property keys should match pattern '^{_PROPERTY.pattern}$'")


def _closed(schema: Any, where: str) -> None:
    """Check that every object in a schema says that it has no other properties."""
    if isinstance(schema, list):
        for each in schema:
            _closed(each, where)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
        raise Refused(f"{where}: For 'object' type, 'additionalProperties' must be explicitly set to false")
    for name in ("properties", "$defs", "definitions"):
        _closed([*schema.get(name, {}).values()], where)
    for name in ("items", "anyOf", "allOf", "oneOf"):
        _closed(schema.get(name), where)


def fields(value: Any, where: str, required: Collection[str], optional: Collection[str]) -> None:
    """Refuse what is no object with the required fields and no others than these."""
    of(dict, value, where or "body")
    prefix = f"{where}." if where else ""
    for name in required:
        if name not in value:
            raise Refused(f"{prefix}{name}: Field required")
    for name in value:
        if name not in required and name not in optional:
            raise Refused(f"{prefix}{name}: Extra inputs are not permitted")


def of(kind: type, value: Any, where: str) -> None:
    """Refuse a value that is not of this JSON type."""
    if not isinstance(value, kind):
        raise Refused(f"{where}: Input should be a valid {_JSON_NAMES[kind]}")


def tagged(value: Any, where: str, tags: Collection[str]) -> str:
    """Find the `type` of an object, which has to be one of these."""
    of(dict, value, where)
    tag = value.get("type")
    if tag not in tags:
        raise Refused(
            f"{where}: Input tag '{tag}' found using 'type' does not match any of the expected tags: "
            f"{', '.join(sorted(tags))}"
        )
    return str(tag)


def cache_control(value: Any, where: str) -> None:
    """Check one breakpoint."""
    if value is not None:
        fields(value, where, ["type"], ["ttl"])
        tagged(value, where, ["ephemeral"])
        if value.get("ttl", "5m") not in ("5m", "1h"):
            raise Refused(f"{where}.ttl: Input should be '1h' or '5m'")


def picture(data: bytes, where: str) -> Image.Image:
    """Decode a picture; of an animation the first frame is seen."""
    try:
        found = Image.open(BytesIO(data), formats=["JPEG", "PNG", "GIF", "WEBP"])
    except Exception:
        raise Refused("Could not process image") from None
    if max(found.size) > SIDE:
        text = f"At least one of the image dimensions exceed max allowed size: {SIDE} pixels"
        raise Refused(f"{where}.image.source.base64.data: {text}")
    try:
        found.load()
    except Exception:
        raise Refused("Could not process image") from None
    return found


def pages_of(data: bytes, where: str) -> int:
    """Count the pages of a PDF, which may not be encrypted."""
    where = f"{where}.pdf.source.base64.data"
    try:
        # The trailer itself, because a library may open a PDF that is only locked against changes.
        found = pypdf.PdfReader(BytesIO(data), strict=False)
        pages = 0 if found.is_encrypted else len(found.pages)
    except Exception:
        raise Refused(f"{where}: The PDF specified was not valid.") from None
    if found.is_encrypted:
        raise Refused(f"{where}: The PDF specified is password protected.")
    if not pages or not data.startswith(b"%PDF-") or b"%%EOF" not in data[-1024:]:
        raise Refused(f"{where}: The PDF specified was not valid.")
    return pages
