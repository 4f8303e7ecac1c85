"""A script in place of an agent's model, and the provider's rules for the messages that it is sent."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from agentruns.agents import content
from agentruns.providers.attachments import DEFAULT
from agentruns.providers.base import ModelReply, ModelRequest, model_identity
from agentruns.providers.scripted import ScriptedModel, Turn

if TYPE_CHECKING:
    from agentruns.agents.agent import Agent

_MAX_MESSAGES = 100_000
_ID = re.compile(r"[a-zA-Z0-9_-]+")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ILLEGAL = re.compile("[\x00\ud800-\udfff]")

playing: list[tuple[Agent, Script]] = []


class Script(ScriptedModel):
    """A ScriptedModel that keeps its `requests` and refuses what a provider would refuse."""

    def __init__(self, turns: Iterable[Turn], identity: str) -> None:
        super().__init__(turns)
        self.identity = identity
        self.requests: list[ModelRequest] = []

    def propose(self, request: ModelRequest) -> ModelReply:
        """Return the next turn; raises InvalidMessages."""
        check_messages(request.messages)
        self.requests.append(request)
        return super().propose(request)


@contextmanager
def scripted_model(agent: Agent | str, turns: Iterable[Turn]) -> Iterator[Script]:
    """Replace an agent's model by a script of `turns`, as those of `ScriptedModel`, for a block.

    The agent's definition stays the same, so runs that were started with the real model go on, and the
    other way round.
    """
    from agentruns.agents.agent import get_agent

    found = get_agent(agent)
    script = Script(turns, model_identity(found.model))
    entry = (found, script)
    with patch.object(found, "model", script):
        playing.append(entry)
        try:
            yield script
        finally:
            playing.remove(entry)


class InvalidMessages(ValueError):
    """Messages that the provider would answer with 400; the text says where and why."""


def check_messages(messages: Any) -> None:
    """Raise InvalidMessages on anything the provider would refuse.

    `messages`: `[{"role", "content": str or [blocks]}]`. Consecutive messages of one role count as one,
    as they do for the provider.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidMessages("messages: a list of at least one message is required")
    if len(messages) > _MAX_MESSAGES:
        raise InvalidMessages(f"messages: more than {_MAX_MESSAGES}")
    turns: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = []
    for number, message in enumerate(messages):
        role, blocks = _message(message, f"messages.{number}")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    if turns[0][0] != "user":
        raise InvalidMessages("messages.0: the first message must be the user's")
    seen: set[str] = set()
    waiting: list[str] = []
    for role, blocks in turns:
        if role == "assistant":
            waiting = _assistant(blocks, seen)
        else:
            _user(blocks, waiting)
            waiting = []
    if waiting:
        raise InvalidMessages(f"tool_use {', '.join(waiting)} at the end has no tool_result after it")


def _message(message: Any, where: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise InvalidMessages(f"{where}: a message is an object with role and content")
    extra = message.keys() - {"role", "content"}
    if extra:
        raise InvalidMessages(f"{where}: unknown fields {', '.join(sorted(map(str, extra)))}")
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant"):
        raise InvalidMessages(f"{where}: role must be user or assistant, not {role!r}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise InvalidMessages(f"{where}: content must not be empty")
    blocks = []
    for position, block in enumerate(content):
        at = f"{where}.content.{position}"
        _block(block, role, at)
        blocks.append((at, block))
    return role, blocks


def _block(block: Any, role: str, where: str) -> None:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise InvalidMessages(f"{where}: a block is an object with a type")
    _json(block, where)
    kind = block["type"]
    if kind == "text":
        _text(block, where)
    elif kind == "tool_use":
        if role != "assistant":
            raise InvalidMessages(f"{where}: tool_use belongs in an assistant message")
        _tool_use(block, where)
    elif kind == "tool_result":
        if role != "user":
            raise InvalidMessages(f"{where}: tool_result belongs in a user message")
        _tool_result(block, where)
    elif kind in ("image", "document"):
        if role != "user":
            raise InvalidMessages(f"{where}: {kind} belongs in a user message")
        _file(block, where)


def _file(block: dict[str, Any], where: str) -> None:
    source = block.get("source")
    if not isinstance(source, dict) or not isinstance(source.get("type"), str):
        raise InvalidMessages(f"{where}: {block['type']} needs a source")
    if source["type"] not in ("base64", "text"):
        return  # an address, or a file that the provider has
    media_type, data = source.get("media_type"), source.get("data")
    if not isinstance(data, str) or not data:
        raise InvalidMessages(f"{where}: the data of a source is a string")
    if source["type"] == "text":
        if block["type"] != "document" or media_type != content.PLAIN:
            raise InvalidMessages(f"{where}: a text is the source of a document, as {content.PLAIN}")
        return
    if media_type not in (content.IMAGES if block["type"] == "image" else (content.PDF,)):
        raise InvalidMessages(f"{where}: {block['type']} of media type {media_type!r}")
    try:
        found = content.type_of(base64.b64decode(data, validate=True))
    except ValueError:
        raise InvalidMessages(f"{where}: the data is no base64") from None
    if found != media_type:
        raise InvalidMessages(f"{where}: the data is {found or 'of no known type'}, not {media_type}")
    if block["type"] == "image" and len(data) > DEFAULT.image:
        raise InvalidMessages(f"{where}: an image of {len(data)} bytes; {DEFAULT.image} are allowed")


def _text(block: dict[str, Any], where: str) -> None:
    if not isinstance(block.get("text"), str) or not block["text"].strip():
        raise InvalidMessages(f"{where}: text must contain more than white space")


def _tool_use(block: dict[str, Any], where: str) -> None:
    if not isinstance(block.get("id"), str) or not _ID.fullmatch(block["id"]):
        raise InvalidMessages(f"{where}: tool_use needs an id of letters, digits, _ and -")
    if not isinstance(block.get("name"), str) or not _NAME.fullmatch(block["name"]):
        raise InvalidMessages(f"{where}: tool_use needs a name of at most 64 letters, digits, _ and -")
    if not isinstance(block.get("input"), dict):
        raise InvalidMessages(f"{where}: the input of a tool_use is an object")


def _tool_result(block: dict[str, Any], where: str) -> None:
    if not isinstance(block.get("tool_use_id"), str):
        raise InvalidMessages(f"{where}: tool_result needs a tool_use_id")
    if not isinstance(block.get("is_error", False), bool):
        raise InvalidMessages(f"{where}: is_error must be true or false")
    content = block.get("content", "")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidMessages(f"{where}: the content of a tool_result is a string or a list of blocks")
    for position, inner in enumerate(content):
        at = f"{where}.content.{position}"
        if not isinstance(inner, dict) or not isinstance(inner.get("type"), str):
            raise InvalidMessages(f"{at}: a block is an object with a type")
        if inner["type"] == "text":
            _text(inner, at)
        elif inner["type"] in ("image", "document"):
            _file(inner, at)
            if block.get("is_error"):
                raise InvalidMessages(f"{at}: an error may hold text only")
        elif inner["type"] not in ("search_result", "tool_reference", "browser_state"):
            raise InvalidMessages(f"{at}: a result holds no {inner['type']}")


def _assistant(blocks: list[tuple[str, dict[str, Any]]], seen: set[str]) -> list[str]:
    """Check one assistant turn; return the ids of its calls."""
    calls: list[str] = []
    for where, block in blocks:
        if block["type"] != "tool_use":
            if calls:
                raise InvalidMessages(f"{where}: nothing but tool_use may follow a tool_use")
            continue
        if block["id"] in seen:
            raise InvalidMessages(f"{where}: tool_use id {block['id']} is not unique")
        seen.add(block["id"])
        calls.append(block["id"])
    return calls


def _user(blocks: list[tuple[str, dict[str, Any]]], waiting: list[str]) -> None:
    """Check that a user turn begins with exactly one result for each call of the turn before."""
    missing = dict.fromkeys(waiting)
    others = False
    for where, block in blocks:
        if block["type"] != "tool_result":
            if missing:
                raise InvalidMessages(
                    f"{where}: tool_use {', '.join(missing)} has no tool_result before this block"
                )
            others = True
            continue
        used = block["tool_use_id"]
        if used not in waiting:
            raise InvalidMessages(f"{where}: no tool_use {used} in the message right before")
        if used not in missing:
            raise InvalidMessages(f"{where}: a second tool_result for {used}")
        if others:
            raise InvalidMessages(f"{where}: tool_result after another block")
        del missing[used]
    if missing:
        raise InvalidMessages(f"tool_use {', '.join(missing)} has no tool_result in the message after it")


def _json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidMessages(f"{where}: the key {key!r} is not a string")
            _json(key, where)
            _json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _json(item, f"{where}.{position}")
    elif isinstance(value, str):
        if _ILLEGAL.search(value):
            raise InvalidMessages(f"{where}: text with NUL or a lone surrogate")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidMessages(f"{where}: {value} is not JSON")
    elif value is not None and not isinstance(value, int):
        raise InvalidMessages(f"{where}: {type(value).__name__} is not JSON")
