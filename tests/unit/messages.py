"""Messages and their blocks, as requests of the Messages API have them."""

from __future__ import annotations

from typing import Any

HELLO: dict[str, Any] = {"role": "user", "content": "hi"}


def text(value: str = "hi", **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def use(id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "look", "input": {}, **more}


def result(id: str = "t1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": "ok", **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}
