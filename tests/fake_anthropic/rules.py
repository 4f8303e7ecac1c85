"""Rules for a request, apart from its conversation."""

from __future__ import annotations

import re
from typing import Any

from tests.fake_anthropic import shape
from tests.fake_anthropic.errors import Refused
from tests.fake_anthropic.tokens import markers

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
_PROVIDED = re.compile(
    r"(bash|text_editor|memory|web_search|web_fetch|code_execution|tool_search_tool_(bm25|regex)"
    r"|(computer|browser)_toolset)_\d{8}"
)
_MINIMUM_BUDGET = 1024
_MOST_TOKENS = 128_000


def check_request(body: Any, *, counting: bool) -> None:
    """Raise Refused for what is wrong with the fields of a request; its messages are checked elsewhere."""
    required = ["model", "messages"] if counting else ["model", "max_tokens", "messages"]
    shape.fields(body, "", required, _COUNTED if counting else _CREATED)
    shape.of(str, body["model"], "model")
    shape.of(list, body["messages"], "messages")
    if not re.fullmatch(r"claude-[a-z0-9.@-]+", body["model"]):
        raise Refused(f"model: {body['model']}", 404)
    if not counting:
        _limits(body)
    _options(body)
    _system(body.get("system"))
    _thinking(body)
    _tools(body.get("tools"))
    _tool_choice(body)
    _output_config(body.get("output_config"))


def check_breakpoints(body: dict[str, Any]) -> None:
    """Raise Refused for too many breakpoints, or long ones after short ones; the rest is well formed."""
    system = body.get("system")
    blocks = [*(body.get("tools") or []), *(system if isinstance(system, list) else [])]
    for message in body["messages"]:
        blocks += message["content"] if isinstance(message["content"], list) else []
    found = [marker for block in blocks for marker in markers(block)]
    if body.get("cache_control"):
        found.append(body["cache_control"])
    if len(found) > shape.MAX_BREAKPOINTS:
        limit = shape.MAX_BREAKPOINTS
        raise Refused(f"A maximum of {limit} blocks with cache_control may be provided. Found {len(found)}.")
    ttls = [marker.get("ttl", "5m") for marker in found]
    if ttls != sorted(ttls):  # "1h" before "5m"
        raise Refused(
            "cache_control: a ttl='1h' cache_control block must not come after a ttl='5m' cache_control "
            "block. Note that blocks are processed in the following order: `tools`, `system`, `messages`."
        )


def _limits(body: dict[str, Any]) -> None:
    shape.integer(body["max_tokens"], "max_tokens", 1)
    if body["max_tokens"] > _MOST_TOKENS:
        raise Refused(
            f"max_tokens: {body['max_tokens']} > {_MOST_TOKENS}, which is the maximum allowed number of "
            f"output tokens for {body['model']}"
        )


def _options(body: dict[str, Any]) -> None:
    shape.of(bool, body.get("stream", False), "stream")
    shape.cache_control(body.get("cache_control"), "cache_control")
    stops = body.get("stop_sequences", [])
    shape.of(list, stops, "stop_sequences")
    for number, stop in enumerate(stops):
        shape.of(str, stop, f"stop_sequences.{number}")
        if not stop.strip():
            raise Refused("stop_sequences: each stop sequence must contain non-whitespace")
    shape.one_of(body.get("service_tier", "auto"), "service_tier", ["auto", "standard_only"])
    shape.one_of(body.get("speed") or "standard", "speed", ["standard", "fast"])
    metadata = shape.fields(body.get("metadata", {}), "metadata", [], ["user_id"])
    if metadata.get("user_id") is not None:
        shape.of(str, metadata["user_id"], "metadata.user_id")


def _system(system: Any) -> None:
    if system is None or isinstance(system, str):
        return
    shape.of(list, system, "system")
    for number, block in enumerate(system):
        where = f"system.{number}"
        shape.tagged(block, where, ["text"])
        shape.fields(block, where, ["type", "text"], ["cache_control", "citations"])
        shape.text(block["text"], f"{where}.text", "system")
        shape.cache_control(block.get("cache_control"), f"{where}.cache_control")


def _thinking(body: dict[str, Any]) -> None:
    thinking = body.get("thinking")
    if thinking is None:
        return
    kind = shape.tagged(thinking, "thinking", ["adaptive", "between_tools", "disabled", "enabled"])
    where = f"thinking.{kind}"
    required = ["type", "budget_tokens"] if kind == "enabled" else ["type"]
    optional = ["display"] if kind in ("enabled", "adaptive") else []
    shape.fields(thinking, where, required, optional)
    if thinking.get("display") is not None:
        shape.one_of(thinking["display"], f"{where}.display", ["summarized", "omitted"])
    if kind == "enabled":
        shape.integer(thinking["budget_tokens"], f"{where}.budget_tokens", _MINIMUM_BUDGET)
        if thinking["budget_tokens"] >= body.get("max_tokens", thinking["budget_tokens"] + 1):
            raise Refused("`max_tokens` must be greater than `thinking.budget_tokens`.")


def _tools(tools: Any) -> None:
    if tools is None:
        return
    shape.of(list, tools, "tools")
    for number, tool in enumerate(tools):
        where = f"tools.{number}"
        shape.of(dict, tool, where)
        shape.of(str, tool.get("name", ""), f"{where}.name")
        if tool.get("type") not in (None, "custom"):
            if not isinstance(tool["type"], str) or not _PROVIDED.fullmatch(tool["type"]):
                raise Refused(
                    f"{where}: Input tag '{tool['type']}' found using 'type' does not match any of the "
                    "expected tags"
                )
        else:
            _custom_tool(tool, f"{where}.custom")
        shape.cache_control(tool.get("cache_control"), f"{where}.cache_control")
    names = [tool["name"] for tool in tools if "name" in tool]
    if len(names) != len(set(names)):
        raise Refused("tools: Tool names must be unique.")


def _custom_tool(tool: dict[str, Any], where: str) -> None:
    shape.fields(tool, where, ["name", "input_schema"], _TOOL)
    if not _TOOL_NAME.fullmatch(tool["name"]):
        raise Refused(f"{where}.name: String should match pattern '^{_TOOL_NAME.pattern}$'")
    shape.of(str, tool.get("description", ""), f"{where}.description")
    shape.of(bool, tool.get("strict", False), f"{where}.strict")
    schema, at = tool["input_schema"], f"{where}.input_schema"
    shape.of(dict, schema, at)
    if "type" not in schema:
        raise Refused(f"{at}.type: Field required")
    if schema["type"] != "object":
        raise Refused(f"{at}.type: Input should be 'object'")
    if schema.keys() & {"oneOf", "allOf", "anyOf"}:
        raise Refused(f"{at}: input_schema does not support oneOf, allOf, or anyOf at the top level")
    properties = schema.get("properties") or {}
    shape.of(dict, properties, f"{at}.properties")
    for name in properties:
        if not _PROPERTY.fullmatch(name):
            raise Refused(f"{at}.properties: Property keys should match pattern '^{_PROPERTY.pattern}$'")
    shape.of(list, schema.get("required") or [], f"{at}.required")
    if tool.get("strict"):
        _closed(schema, f"{where}.input_schema")


def _tool_choice(body: dict[str, Any]) -> None:
    choice = body.get("tool_choice")
    if choice is None:
        return
    kind = shape.tagged(choice, "tool_choice", ["auto", "any", "tool", "none"])
    required = ["type", "name"] if kind == "tool" else ["type"]
    optional = [] if kind == "none" else ["disable_parallel_tool_use"]
    shape.fields(choice, f"tool_choice.{kind}", required, optional)
    shape.of(bool, choice.get("disable_parallel_tool_use", False), "tool_choice.disable_parallel_tool_use")
    tools = body.get("tools") or []
    if not tools and kind != "none":
        raise Refused("tool_choice: tool_choice may only be specified while providing `tools`.")
    if kind == "tool" and choice["name"] not in [tool.get("name") for tool in tools]:
        raise Refused(f"Tool '{choice['name']}' not found in provided tools")
    thinks = (body.get("thinking") or {}).get("type") in ("enabled", "adaptive")
    if thinks and kind in ("any", "tool"):
        raise Refused("Thinking may not be enabled when tool_choice forces tool use.")


def _output_config(config: Any) -> None:
    if config is None:
        return
    shape.fields(config, "output_config", [], ["effort", "format"])
    if config.get("effort") is not None:
        shape.one_of(config["effort"], "output_config.effort", ["low", "medium", "high", "xhigh", "max"])
    if config.get("format") is not None:
        shape.tagged(config["format"], "output_config.format", ["json_schema"])
        shape.fields(config["format"], "output_config.format", ["type", "schema"], [])
        shape.of(dict, config["format"]["schema"], "output_config.format.schema")
        _closed(config["format"]["schema"], "output_config.format.schema")


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
        if isinstance(schema.get(name), dict):
            _closed(list(schema[name].values()), where)
    for name in ("items", "anyOf", "allOf", "oneOf"):
        _closed(schema.get(name), where)
