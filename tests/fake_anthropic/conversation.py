"""Rules for the messages of a request: shape, pairing, and unaltered thinking."""

from __future__ import annotations

import itertools
from typing import Any

from agentruns.testing.script import InvalidMessages, check_messages
from tests.fake_anthropic import shape
from tests.fake_anthropic.errors import Refused
from tests.fake_anthropic.files import OPTIONAL, check_file
from tests.fake_anthropic.replies import THINKING, Replies

_TEXT = ("type", "text")
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "thinking": (("type", "thinking", "signature"), ()),
    "redacted_thinking": (("type", "data"), ()),
    "tool_use": (("type", "id", "name", "input"), ("cache_control", "caller", "toolset_name")),
    "tool_result": (("type", "tool_use_id"), ("content", "is_error", "cache_control", "toolset_name")),
}
_USER = frozenset({"text", "image", "document", "search_result", "tool_result", "container_upload"})
_ASSISTANT = frozenset({
    "text", "thinking", "redacted_thinking", "tool_use", "server_tool_use", "container_upload",
    "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
})  # fmt: skip
_IN_RESULT = _USER - {"tool_result", "container_upload"} | {"tool_reference", "browser_state"}
_MUST_BEGIN = (
    "When `thinking` is enabled, a final `assistant` message must start with a thinking block (preceeding "
    "the lastmost set of `tool_use` and `tool_result` blocks). We recommend you include thinking blocks "
    "from previous turns. To avoid this requirement, disable `thinking`."
)

Block = dict[str, Any]
Turn = tuple[str, list[tuple[str, Block]]]


def check_conversation(body: dict[str, Any], replies: Replies) -> None:
    """Raise Refused for what is wrong with the messages."""
    messages = body["messages"]
    if not messages:
        raise Refused("messages: at least one message is required")
    turns: list[Turn] = []
    for number, message in enumerate(messages):
        role, blocks = _message(message, number, replies)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, list(blocks)))
    if turns[0][0] != "user":
        raise Refused('messages: first message must use the "user" role')
    _pairing(turns)
    try:
        check_messages(messages)
    except InvalidMessages as error:
        raise Refused(str(error)) from None
    kind = (body.get("thinking") or {}).get("type")
    if kind != "disabled":
        _thinking(turns, replies, enabled=kind == "enabled")
    _last(turns[-1], replies)


def _message(message: Any, number: int, replies: Replies) -> Turn:
    where = f"messages.{number}"
    shape.fields(message, where, ["role", "content"], [])
    role, content = message["role"], message["content"]
    shape.one_of(role, f"{where}.role", ["user", "assistant"])
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    shape.of(list, content, f"{where}.content")
    if not content:
        raise Refused(
            f"{where}: all messages must have non-empty content except for the optional final assistant "
            "message"
        )
    blocks = [(f"{where}.content.{position}", block) for position, block in enumerate(content)]
    for at, block in blocks:
        _block(block, role, at, replies)
    return role, blocks


def _block(block: Any, role: str, where: str, replies: Replies) -> None:
    if isinstance(block, dict) and role == "assistant" and _was_given(block, replies):
        _common(block, where)  # what the API gave it takes back, also what it alone knows
        return
    if isinstance(block, dict) and block.get("type") in ("tool_use", "tool_result"):
        own = "assistant" if block["type"] == "tool_use" else "user"
        if role != own:
            raise Refused(f"{where}: `{block['type']}` blocks can only be in `{own}` messages")
    kind = shape.tagged(block, where, _USER if role == "user" else _ASSISTANT)
    if kind == "text":
        cited = ("citations",) if role == "assistant" else ()
        shape.fields(block, f"{where}.text", _TEXT, ("cache_control", *cited))
    elif kind in _FIELDS:
        shape.fields(block, f"{where}.{kind}", *_FIELDS[kind])
    if kind == "thinking":
        shape.of(str, block["thinking"], f"{where}.thinking.thinking")
        shape.of(str, block["signature"], f"{where}.thinking.signature")
    if kind in OPTIONAL:
        check_file(block, where)
    if kind == "tool_result" and isinstance(block.get("content"), list):
        for position, inner in enumerate(block["content"]):
            at = f"{where}.tool_result.content.{position}"
            inner_kind = shape.tagged(inner, at, _IN_RESULT)
            if inner_kind == "text":
                shape.fields(inner, f"{at}.text", _TEXT, ("cache_control", "citations"))
            elif inner_kind in OPTIONAL:
                check_file(inner, at)
            if block.get("is_error") and inner_kind != "text":
                raise Refused(f"{at}: all content must be type `text` if `is_error` is true")
            _common(inner, at)
    _common(block, where)


def _common(block: Block, where: str) -> None:
    for kind, field in (("tool_use", "id"), ("tool_result", "tool_use_id")):
        if block["type"] == kind:
            shape.of(str, block.get(field), f"{where}.{kind}.{field}")
    if block["type"] == "text":
        shape.text(block.get("text"), f"{where}.text.text", "messages")
    shape.cache_control(block.get("cache_control"), f"{where}.cache_control")


def _was_given(block: Block, replies: Replies) -> bool:
    if block.get("type") in THINKING:
        return replies.has(block)
    return replies.has({name: value for name, value in block.items() if name != "cache_control"})


def _pairing(turns: list[Turn]) -> None:
    """Refuse what the API has words for; check_messages finds the rest."""
    seen: set[str] = set()
    before: Turn = ("assistant", [])
    for turn in turns:
        role, blocks = turn
        if role == "assistant":
            for where, block in blocks:
                if block["type"] == "tool_use":
                    if block["id"] in seen:
                        raise Refused(f"{where}: `tool_use` ids must be unique")
                    seen.add(block["id"])
        else:
            _results(before, blocks)
        before = turn
    if before[0] == "assistant":
        _results(before, [])


def _results(before: Turn, blocks: list[tuple[str, Block]]) -> None:
    asked = [block["id"] for _, block in before[1] if block["type"] == "tool_use"]
    first = itertools.takewhile(lambda pair: pair[1]["type"] == "tool_result", blocks)
    answered = [block["tool_use_id"] for _, block in first]
    missing = [each for each in asked if each not in answered]
    if missing:
        message = before[1][-1][0].partition(".content")[0]
        raise Refused(
            f"{message}: `tool_use` ids were found without `tool_result` blocks immediately after: "
            f"{', '.join(missing)}. Each `tool_use` block must have a corresponding `tool_result` block in "
            "the next message."
        )
    for where, block in blocks:
        if block["type"] == "tool_result" and block["tool_use_id"] not in asked:
            raise Refused(
                f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {block['tool_use_id']}. "
                "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
            )
        if answered.count(block.get("tool_use_id")) > 1:
            raise Refused(
                f"{where}: each tool_use must have a single result. Found multiple `tool_result` blocks "
                f"with id: {block['tool_use_id']}"
            )


def _thinking(turns: list[Turn], replies: Replies, *, enabled: bool) -> None:
    latest = max((n for n, (role, _) in enumerate(turns) if role == "assistant"), default=-1)
    for number, (_, blocks) in enumerate(turns):
        for where, block in blocks:
            if block["type"] not in THINKING or replies.has(block):
                continue
            if number == latest:
                raise _modified(where)
            if block["type"] == "thinking":
                raise Refused(f"{where}: Invalid `signature` in `thinking` block")
            raise Refused(f"{where}: Invalid `data` in `redacted_thinking` block")
    for role, blocks in _tool_loop(turns):
        if role != "assistant":
            continue
        where, first = blocks[0]
        if enabled and first["type"] not in THINKING:
            kind = first["type"]
            raise Refused(
                f"{where}.type: Expected `thinking` or `redacted_thinking`, but found `{kind}`. {_MUST_BEGIN}"
            )
        if not replies.has_its_thoughts([block for _, block in blocks]):
            raise _modified(where)


def _modified(where: str) -> Refused:
    return Refused(
        f"{where}: `thinking` or `redacted_thinking` blocks in the latest assistant message cannot be "
        "modified. These blocks must remain as they were in the original response."
    )


def _tool_loop(turns: list[Turn]) -> list[Turn]:
    """Return the turns since the user last spoke: to the API they are one turn of the assistant's."""
    loop: list[Turn] = []
    for role, blocks in reversed(turns):
        if role == "user" and not any(block["type"] == "tool_result" for _, block in blocks):
            break
        loop.append((role, blocks))
    return loop if loop and loop[0][0] == "user" else []


def _last(turn: Turn, replies: Replies) -> None:
    role, blocks = turn
    if role != "user" and not replies.was_paused([block for _, block in blocks]):
        raise Refused(
            "This model does not support assistant message prefill. The conversation must end with a user "
            "message."
        )
