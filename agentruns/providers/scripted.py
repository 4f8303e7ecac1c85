"""ScriptedModel: a model that follows a script, for tests and demos without a network."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from agentruns.providers.base import ModelReply, ModelRequest, ProviderError, send_text

Turn = dict[str, Any] | ModelReply | Callable[[ModelRequest], Any]

_SPOKEN = frozenset({"text", "tools", "stop_reason", "usage"})
_RAW = frozenset({"content", "stop_reason", "usage"})
_TOOL = frozenset({"name", "input", "id"})


class ScriptedModel:
    """A model that gives the n-th turn as the n-th reply of a run, so a new process can continue the run.

    A turn is `{"text": ...}` and/or `{"tools": [{"name", "input", "id"?}]}`, or raw blocks as `{"content":
    [...], "stop_reason": ...}`; `usage` is optional. In Python a turn may also be a ModelReply, or a function
    of the ModelRequest that returns a turn. Raises ValueError for any other turn. `pace` is the pause in
    seconds before each word of a text.
    """

    def __init__(self, turns: Iterable[Turn], *, pace: float = 0.0) -> None:
        self.identity = f"{type(self).__module__}.{type(self).__qualname__}"
        self.turns = list(turns)
        self.pace = pace
        for number, turn in enumerate(self.turns):
            if not callable(turn):
                _check(turn, number)

    @classmethod
    def from_file(cls, path: str | Path) -> ScriptedModel:
        """Build a model from a JSON list of turns, or an object with `turns`; ValueError for another file."""
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        turns = value.get("turns") if isinstance(value, dict) else value
        if not isinstance(turns, list):
            raise ValueError(f"{path}: expected a list of turns, or an object with a list under 'turns'.")
        try:
            return cls(turns)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        return f"<ScriptedModel of {len(self.turns)} turns>"

    def propose(self, request: ModelRequest) -> ModelReply:
        """Build the reply of turn `request.step`, counted from 0; raises ProviderError after the last."""
        number = request.step
        if number >= len(self.turns):
            text = f"The script has {len(self.turns)} turns and was asked for number {number + 1}."
            raise ProviderError(text, type="script_exhausted")
        turn: Any = self.turns[number]
        if callable(turn):
            turn = turn(request)
            _check(turn, number)
        if isinstance(turn, ModelReply):
            reply = turn
        else:
            turn = copy.deepcopy(turn)
            content: list[dict[str, Any]] = turn.get("content", [])
            if "content" not in turn:
                # Two runs of one session follow the same script, but ids must be unique in a session.
                digest = hashlib.sha256(request.run_id.encode()).hexdigest()[:8]
                prefix = f"toolu_{digest}_" if request.run_id else "toolu_"
                if turn.get("text") is not None:
                    content.append({"type": "text", "text": turn["text"]})
                for position, each in enumerate(turn.get("tools", [])):
                    call_id = each.get("id", f"{prefix}{number}_{position}")
                    call = {"id": call_id, "name": each["name"], "input": each.get("input", {})}
                    content.append({"type": "tool_use", **call})
            uses_tools = any(block.get("type") == "tool_use" for block in content)
            stop_reason = turn.get("stop_reason", "tool_use" if uses_tools else "end_turn")
            reply = ModelReply(content, stop_reason, turn.get("usage") or {}, model="scripted")
        if self.pace:
            said = " ".join(block["text"] for block in reply.content if block["type"] == "text")
            for word in re.findall(r"\S+\s*", said):
                time.sleep(self.pace)
                send_text(self, request, word)
        return reply


def _check(turn: Any, number: int) -> None:
    if isinstance(turn, ModelReply):
        return
    where = f"Turn {number + 1}"
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is a {type(turn).__name__}, not an object.")
    known = _RAW if "content" in turn else _SPOKEN
    if turn.keys() - known or not turn.keys() & {"text", "tools", "content"}:
        raise ValueError(
            f"{where} has {', '.join(sorted(turn)) or 'nothing'}: it needs text and/or tools, or content "
            "alone, and beside them only stop_reason and usage."
        )
    if "text" in turn and (not isinstance(turn["text"], str) or not turn["text"].strip()):
        raise ValueError(f"{where}: text must be a string that is not empty.")
    blocks = turn.get("content", turn.get("tools", []))
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise ValueError(f"{where}: tools and content are lists of objects.")
    for block in turn.get("tools", []):
        if block.keys() - _TOOL or not isinstance(block.get("name"), str):
            raise ValueError(f"{where}: a tool is an object with name, input and perhaps id, not {block!r}.")
