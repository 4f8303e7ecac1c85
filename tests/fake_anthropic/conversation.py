"""Rules for the messages of a request: shape and unaltered thinking. check_messages has the others."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterable
from typing import Any

from agentruns.testing.script import InvalidMessages, check_messages
from tests.fake_anthropic.faults import Refused
from tests.fake_anthropic.rules import PAGES, cache_control, fields, of, pages_of, picture, tagged

THINKING = ("thinking", "redacted_thinking")
_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("type", "text"), ("cache_control",)),
    "thinking": (("type", "thinking", "signature"), ()),
    "redacted_thinking": (("type", "data"), ()),
    "tool_use": (("type", "id", "name", "input"), ("cache_control", "caller", "toolset_name")),
    "tool_result": (("type", "tool_use_id"), ("content", "is_error", "cache_control", "toolset_name")),
    "image": (("type", "source"), ("cache_control",)),
    "document": (("type", "source"), ("cache_control", "citations", "context", "title")),
}
_USER = frozenset({"text", "image", "document", "search_result", "tool_result", "container_upload"})
_ASSISTANT = frozenset({
    "text", "thinking", "redacted_thinking", "tool_use", "server_tool_use", "container_upload",
    "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result",
    "bash_code_execution_tool_result", "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
})  # fmt: skip

Block = dict[str, Any]
Turn = tuple[str, list[tuple[str, Block]]]


def signed(content: list[Block], *, omitted: bool) -> list[Block]:
    """Sign every thinking block of a reply; `omitted`: without its text, as on request."""
    return [_signed(block, omitted) if block.get("type") == "thinking" else block for block in content]


def _signed(block: Block, omitted: bool) -> Block:
    shown = "" if omitted else block["thinking"]
    signature = hashlib.sha256(json.dumps([block["thinking"], shown]).encode()).hexdigest()
    return {"signature": signature, **block, "thinking": shown}


class Replies:
    """Earlier replies, to compare with messages sent back; safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: set[str] = set()
        self._thoughts: dict[str, list[list[str]]] = {}  # by tool_use id

    def remember(self, content: list[Block]) -> None:
        """Keep the reply."""
        with self._lock:
            self._blocks.update(_keys(content))
            for block in content:
                if block["type"] == "tool_use":
                    self._thoughts.setdefault(str(block.get("id")), []).append(_thoughts(content))

    def has(self, block: Block) -> bool:
        """Tell if exactly this block was in a reply; all but thinking may have a breakpoint."""
        marks = () if block["type"] in THINKING else ("cache_control",)
        with self._lock:
            return {*_keys([{name: block[name] for name in block if name not in marks}])} <= self._blocks

    def has_its_thoughts(self, content: list[Block]) -> bool:
        """Tell if a turn with known calls still has the thinking blocks it had beside them."""
        found = _thoughts(content)
        with self._lock:
            known = [self._thoughts.get(str(block.get("id")), [found]) for block in content]
        return all(any(_contains(found, thoughts) for thoughts in each) for each in known)


def _thoughts(content: list[Block]) -> list[str]:
    return _keys(block for block in content if block["type"] in THINKING)


def _contains(whole: list[str], part: list[str]) -> bool:
    # A turn that was paused and went on may come back as one message.
    return any(whole[n : n + len(part)] == part for n in range(len(whole) - len(part) + 1))


def _keys(content: Iterable[Block]) -> list[str]:
    return [json.dumps(block, sort_keys=True) for block in content]


def check_conversation(body: dict[str, Any], replies: Replies) -> None:
    """Raise Refused for what is wrong with the messages."""
    try:
        check_messages(body["messages"])
    except InvalidMessages as error:
        raise Refused(str(error)) from None
    turns: list[Turn] = []
    for number, message in enumerate(body["messages"]):
        role, content = message["role"], message["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        blocks = [(f"messages.{number}.content.{place}", block) for place, block in enumerate(content)]
        for where, block in blocks:
            if role == "user":
                _block(block, where, _USER)
            elif not replies.has(block):  # what the API gave it takes back, also what it alone knows
                _block(block, where, _ASSISTANT)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    for role, blocks in turns:
        if role == "assistant" and blocks[-1][1]["type"] in THINKING:
            raise Refused(f"{blocks[-1][0]}: The final block in an assistant message cannot be `thinking`.")
    _files(turns)
    kind = (body.get("thinking") or {}).get("type")
    thoughts = [where for _, turn in _tool_loop(turns) for where, block in turn if block["type"] in THINKING]
    if kind == "disabled" and thoughts:
        raise Refused(f"{thoughts[0]}: the turn may not contain `thinking` when thinking is disabled.")
    if kind != "disabled":  # some models think unless told not to
        _thinking(turns, replies, enabled=kind == "enabled")
    is_paused = any(block["type"] == "server_tool_use" for _, block in turns[-1][1])
    if turns[-1][0] != "user" and not is_paused:
        raise Refused("This model does not support assistant message prefill.")


def _block(block: Block, where: str, kinds: frozenset[str]) -> None:
    kind = tagged(block, where, kinds)
    if kind in _FIELDS:
        required, optional = _FIELDS[kind]
        cited = ("citations",) if kind == "text" and kinds is not _USER else ()
        fields(block, f"{where}.{kind}", required, [*optional, *cited])
    cache_control(block.get("cache_control"), f"{where}.cache_control")
    if "title" in block:
        of(str, block["title"], f"{where}.title")
        if not 1 <= len(block["title"]) <= 500:
            raise Refused(f"{where}.title: String should have between 1 and 500 characters")
    if kind == "tool_result" and isinstance(block.get("content"), list):
        for place, inner in enumerate(block["content"]):
            if inner["type"] in ("text", "image", "document"):
                _block(inner, f"{where}.content.{place}", _USER)


def _files(turns: list[Turn]) -> None:
    pages = 0
    for where, block in (each for _, blocks in turns for each in blocks):
        inner = block.get("content") if block["type"] == "tool_result" else None
        for each in inner if isinstance(inner, list) else [block]:
            source = each.get("source", {})
            if source.get("type") != "base64":
                continue
            data = base64.b64decode(source["data"])
            if each["type"] == "image":
                picture(data, where)
            else:
                pages += pages_of(data, where)
            if pages > PAGES:
                raise Refused(f"A maximum of {PAGES} PDF pages may be provided.")


def _thinking(turns: list[Turn], replies: Replies, *, enabled: bool) -> None:
    latest = max((n for n, (role, _) in enumerate(turns) if role == "assistant"), default=-1)
    for number, (_, blocks) in enumerate(turns):
        for where, block in blocks:
            if block["type"] in THINKING and not replies.has(block):
                raise _modified(where) if number == latest else Refused(f"{where}: Invalid `signature`")
    for role, blocks in _tool_loop(turns):
        if role == "assistant":
            where, first = blocks[0]
            if enabled and first["type"] not in THINKING:
                raise Refused(f"{where}.type: Expected `thinking`, but found `{first['type']}`.")
            if not replies.has_its_thoughts([block for _, block in blocks]):
                raise _modified(where)


def _modified(where: str) -> Refused:
    return Refused(f"{where}: `thinking` blocks in the latest assistant message cannot be modified.")


def _tool_loop(turns: list[Turn]) -> list[Turn]:
    """Find the turns since the user last spoke: to the API they are one turn of the assistant's."""
    loop: list[Turn] = []
    for role, blocks in reversed(turns):
        if role == "user" and not any(block["type"] == "tool_result" for _, block in blocks):
            break
        loop.append((role, blocks))
    return loop if loop and loop[0][0] == "user" else []
