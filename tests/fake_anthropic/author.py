"""Writes the message that answers a request: the script's turn, signed, counted and remembered."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from agentruns.providers.base import ModelRequest, ProviderError
from agentruns.providers.scripted import ScriptedModel, Turn
from tests.fake_anthropic.errors import Refused
from tests.fake_anthropic.replies import Replies, signed
from tests.fake_anthropic.tokens import PromptCache, count_content

Body = dict[str, Any]
Script = Iterable[Turn] | Callable[[Body], Any]


class Author:
    """Answers the n-th request of a conversation with the n-th turn, whoever asked the ones before."""

    def __init__(self, script: Script, cache: PromptCache) -> None:
        self._cache = cache
        self._script = script if callable(script) else ScriptedModel(script)
        self.replies = Replies()

    def message(self, body: Body) -> dict[str, Any]:
        """Return the Message; raises Refused when the script has none."""
        content, stop_reason, given = self._turn(body)
        content = signed(content, omitted=(body.get("thinking") or {}).get("display") == "omitted")
        self.replies.remember(content, stop_reason)
        refusal = {"type": "refusal", "category": None, "explanation": None}
        return {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "stop_details": refusal if stop_reason == "refusal" else None,
            "usage": {
                **self._cache.usage(body),
                "output_tokens": count_content(content),
                "service_tier": "standard",
                **given,
            },
        }

    def _turn(self, body: Body) -> tuple[list[Body], str | None, Body]:
        depth = sum(message["role"] == "assistant" for message in body["messages"])
        script, step = self._script, depth
        if not isinstance(script, ScriptedModel):
            tell = script
            script, step = ScriptedModel([lambda request: tell(body)]), 0
        try:
            reply = script.propose(_request(body, step))
            content, usage = json.loads(json.dumps([reply.content, reply.usage]))
            _check(content)
        except ProviderError as error:
            raise Refused(f"script exhausted: {error}") from None
        except Exception as error:  # a mistake in a test: say so, and do not let it be retried
            raise Refused(f"The script failed: {type(error).__name__}: {error}") from error
        return content, reply.stop_reason, usage


def _check(content: list[Body]) -> None:
    # What the stream takes apart has to be there; whatever else is wrong may be wrong on purpose.
    for position, block in enumerate(content):
        for name in _PARTS.get(block["type"], ()):
            if name not in block:
                raise ValueError(f"block {position} is a {block['type']} without {name}")


def whole(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as it is without streaming: a call whose JSON was cut short has no input."""
    content = [{**b, "input": {}} if isinstance(b.get("input"), str) else b for b in message["content"]]
    return {**message, "content": content}


def _request(body: Body, step: int) -> ModelRequest:
    system = body.get("system") or ""
    return ModelRequest(
        model=body["model"],
        system=system if isinstance(system, str) else "\n".join(block["text"] for block in system),
        messages=body["messages"],
        tools=body.get("tools") or [],
        params={name: value for name, value in body.items() if name not in _NOT_PARAMS},
        run_id=secrets.token_hex(8),  # ids of calls come from it: every generation has new ones
        step=step,
    )


_PARTS = {
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("name", "input"),
    "server_tool_use": ("name", "input"),
}
_NOT_PARAMS = frozenset({"model", "system", "messages", "tools", "stream"})
