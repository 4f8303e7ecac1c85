"""Replies of a model, given as they are."""

from __future__ import annotations

from typing import Any

from agentruns.providers.base import ModelReply
from agentruns.testing import check_messages


class Counting:
    """A model object that gives its replies as they are, and counts how often it is asked."""

    identity = "counting"

    def __init__(self, *replies: ModelReply) -> None:
        self.replies = replies
        self.asked = 0

    def propose(self, request: Any) -> ModelReply:
        self.asked += 1
        check_messages(request.messages)
        if request.step < len(self.replies):
            return self.replies[request.step]
        return ModelReply([{"type": "text", "text": "all done"}], "end_turn", {"output_tokens": 1})


def uses(*calls: tuple[str, Any], **options: Any) -> ModelReply:
    """Build a reply that makes calls."""
    blocks = [
        {"type": "tool_use", "id": f"t{n}", "name": name, "input": given}
        for n, (name, given) in enumerate(calls)
    ]
    return ModelReply(blocks, "tool_use", {"output_tokens": 10}, **options)


def nested(levels: int) -> Any:
    """Build a value of lists and objects inside one another."""
    deep: Any = "bottom"
    for level in range(levels):
        deep = [deep] if level % 2 else {"down": deep}
    return deep
