"""A script in place of an agent's model, and a check of messages against the rules of Anthropic's API."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from agentruns import content
from agentruns.providers.attachments import DEFAULT
from agentruns.providers.base import ModelReply, ModelRequest
from agentruns.providers.names import model_identity
from agentruns.providers.scripted import ScriptedModel, Turn

if TYPE_CHECKING:
    from agentruns.agents.agent import Agent

_MAX_MESSAGES = 100_000
_ID = re.compile(r"[a-zA-Z0-9_-]+")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ILLEGAL = re.compile("[\x00\ud800-\udfff]")

playing: list[tuple[Agent, Script]] = []


class Script(ScriptedModel):
    """A ScriptedModel that keeps its `requests`, and refuses messages that `check_messages` refuses."""

    def __init__(self, turns: Iterable[Turn], identity: str) -> None:
        super().__init__(turns)
        self.identity = identity
        self.requests: list[ModelRequest] = []

    def propose(self, request: ModelRequest) -> ModelReply:
        """Check and keep the request, and reply with the turn of its step.

        Raises InvalidMessages, and ProviderError after the last turn.
        """
        check_messages(request.messages)
        self.requests.append(request)
        return super().propose(request)


@contextmanager
def scripted_model(agent: Agent | str, turns: Iterable[Turn]) -> Iterator[Script]:
    """Replace an agent's model, but not its fallback, during the block by a script of `turns`.

    Turns are as for `ScriptedModel`. The agent's definition stays the same: a run that was started with the
    real model can continue with the script, and a run of the script with the real model.
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
    """Raised for messages that Anthropic's API would answer with 400; the text says where and why."""


def check_messages(messages: Any) -> None:
    """Raise InvalidMessages if Anthropic's API would refuse these messages.

    `messages` has the form `[{"role", "content": str or [blocks]}]`. Consecutive messages of one role count
    as one message, as they do for the API.
    """
    is_list = isinstance(messages, list) and messages
    _require(is_list, "messages", "a list of at least one message is required")
    _require(len(messages) <= _MAX_MESSAGES, "messages", f"more than {_MAX_MESSAGES}")
    turns: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = []
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        is_message = isinstance(message, dict) and {"role", "content"} <= message.keys()
        _require(is_message, where, "a message is an object with role and content")
        extra = message.keys() - {"role", "content"}
        _require(not extra, where, f"unknown fields {', '.join(sorted(map(str, extra)))}")
        role, content = message["role"], message["content"]
        _require(role in ("user", "assistant"), where, f"role must be user or assistant, not {role!r}")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        _require(isinstance(content, list) and content, where, "content must not be empty")
        blocks = [(f"{where}.content.{position}", block) for position, block in enumerate(content)]
        for at, block in blocks:
            kind = _typed(block, at)
            _json(block, at)
            if kind == "text":
                _text(block, at)
            elif kind == "tool_use":
                _require(role == "assistant", at, "tool_use belongs in an assistant message")
                for part, form, rule in (("id", _ID, "an id of"), ("name", _NAME, "a name of at most 64")):
                    given = block.get(part)
                    is_right = isinstance(given, str) and form.fullmatch(given)
                    _require(is_right, at, f"tool_use needs {rule} letters, digits, _ and -")
                _require(isinstance(block.get("input"), dict), at, "the input of a tool_use is an object")
            elif kind in ("tool_result", "image", "document"):
                _require(role == "user", at, f"{kind} belongs in a user message")
                (_tool_result if kind == "tool_result" else _file)(block, at)
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    _require(turns[0][0] == "user", "messages.0", "the first message must be the user's")
    seen: set[str] = set()
    waiting: list[str] = []
    for role, blocks in turns:
        if role == "user":
            _user(blocks, waiting)
        waiting = []
        for where, block in blocks if role == "assistant" else ():
            if block["type"] != "tool_use":
                _require(not waiting, where, "nothing but tool_use may follow a tool_use")
                continue
            _require(block["id"] not in seen, where, f"tool_use id {block['id']} is not unique")
            seen.add(block["id"])
            waiting.append(block["id"])
    if waiting:
        raise InvalidMessages(f"tool_use {', '.join(waiting)} at the end has no tool_result after it")


def _require(holds: object, where: str, rule: str) -> None:
    if not holds:
        raise InvalidMessages(f"{where}: {rule}")


def _typed(block: Any, where: str) -> str:
    """Read the type of a block; raises InvalidMessages if the block has none."""
    is_block = isinstance(block, dict) and isinstance(block.get("type"), str)
    _require(is_block, where, "a block is an object with a type")
    return str(block["type"])


def _file(block: dict[str, Any], where: str) -> None:
    kind, source = block["type"], block.get("source")
    has_source = isinstance(source, dict) and isinstance(source.get("type"), str)
    _require(has_source, where, f"{kind} needs a source")
    source = block["source"]
    if source["type"] not in ("base64", "text"):
        return  # a URL, or a file that was uploaded to the provider
    media_type, data = source.get("media_type"), source.get("data")
    _require(isinstance(data, str) and data, where, "the data of a source is a string")
    if source["type"] == "text":
        is_text = kind == "document" and media_type == content.PLAIN
        _require(is_text, where, f"a text is the source of a document, as {content.PLAIN}")
        return
    taken = content.IMAGES if kind == "image" else (content.PDF,)
    _require(media_type in taken, where, f"{kind} of media type {media_type!r}")
    try:
        found = content.type_of(base64.b64decode(data, validate=True))
    except ValueError:
        raise InvalidMessages(f"{where}: the data is no base64") from None
    _require(found == media_type, where, f"the data is {found or 'of no known type'}, not {media_type}")
    fits = kind != "image" or len(data) <= DEFAULT.image
    _require(fits, where, f"an image of {len(data)} bytes; {DEFAULT.image} are allowed")


def _text(block: dict[str, Any], where: str) -> None:
    text = block.get("text")
    _require(isinstance(text, str) and text.strip(), where, "text must contain more than white space")


def _tool_result(block: dict[str, Any], where: str) -> None:
    _require(isinstance(block.get("tool_use_id"), str), where, "tool_result needs a tool_use_id")
    _require(isinstance(block.get("is_error", False), bool), where, "is_error must be true or false")
    content = block.get("content", "")
    if isinstance(content, str):
        return
    _require(isinstance(content, list), where, "the content of a tool_result is a string or a list of blocks")
    for position, inner in enumerate(content):
        at = f"{where}.content.{position}"
        if (kind := _typed(inner, at)) == "text":
            _text(inner, at)
        elif kind in ("image", "document"):
            _file(inner, at)
            _require(not block.get("is_error"), at, "an error may hold text only")
        else:
            is_held = kind in ("search_result", "tool_reference", "browser_state")
            _require(is_held, at, f"a result holds no {kind}")


def _user(blocks: list[tuple[str, dict[str, Any]]], waiting: list[str]) -> None:
    """Require that a user turn begins with one result for each call in `waiting`, and has no other result.

    `waiting` are the ids of the calls in the turn before. Raises InvalidMessages.
    """
    missing, others = dict.fromkeys(waiting), False
    for where, block in blocks:
        if block["type"] != "tool_result":
            named = ", ".join(missing)
            _require(not missing, where, f"tool_use {named} has no tool_result before this block")
            others = True
            continue
        used = block["tool_use_id"]
        _require(used in waiting, where, f"no tool_use {used} in the message right before")
        _require(used in missing, where, f"a second tool_result for {used}")
        _require(not others, where, "tool_result after another block")
        del missing[used]
    if missing:
        raise InvalidMessages(f"tool_use {', '.join(missing)} has no tool_result in the message after it")


def _json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _require(isinstance(key, str), where, f"the key {key!r} is not a string")
            _json(key, where)
            _json(item, f"{where}.{key}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _json(item, f"{where}.{position}")
    elif isinstance(value, str):
        _require(not _ILLEGAL.search(value), where, "text with NUL or a lone surrogate")
    elif isinstance(value, float):
        _require(math.isfinite(value), where, f"{value} is not JSON")
    else:
        _require(value is None or isinstance(value, int), where, f"{type(value).__name__} is not JSON")
