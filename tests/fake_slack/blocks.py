"""The limits of Block Kit, as https://docs.slack.dev/reference/block-kit gives them."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """Slack's code for what is wrong, and where."""


def check_blocks(blocks: Any) -> None:
    """Raise Refused for blocks that Slack would refuse, or would read mentions or markup in."""
    _require(isinstance(blocks, list) and 0 < len(blocks) <= 50, "1 to 50 blocks")
    names = [block["block_id"] for block in blocks if "block_id" in block]
    _require(len(names) == len({*names}), "unique block_id")
    for block in blocks:
        kind = block.get("type")
        _require(kind in _BLOCKS, f"type {kind}")
        _BLOCKS[kind](block)


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise Refused(f"invalid_blocks: {what}")


def _fields(given: Any, required: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    _require(isinstance(given, dict), f"an object with {required}")
    _require(required <= {*given} <= required | optional | {"type", "block_id"}, f"{sorted(given)}")


def _plain(text: Any, most: int) -> None:
    _fields(text, {"text"}, {"emoji"})
    _require(text.get("type") == "plain_text", "plain_text")
    _require(0 < len(text["text"]) <= most, f"1 to {most} characters")


def _header(block: Any) -> None:
    _fields(block, {"text"})
    _plain(block["text"], 150)


def _rich_text(block: Any) -> None:
    _fields(block, {"elements"})
    for part in block["elements"]:
        _fields(part, {"elements"})
        _require(part["type"] in ("rich_text_section", "rich_text_quote"), part["type"])
        for element in part["elements"]:
            _fields(element, {"text"}, {"style"})  # a mention or a link would be an element of its own
            _require(element["type"] == "text" and 0 < len(element["text"]) <= 3000, "1 to 3000 characters")


def _input(block: Any) -> None:
    _fields(block, {"label", "element"}, {"optional", "hint"})
    _plain(block["label"], 2000)
    element = block["element"]
    _fields(element, {"action_id"}, {"max_length", "multiline"})
    _require(element["type"] == "plain_text_input", element["type"])
    _require(0 < element.get("max_length", 3000) <= 3000, "max_length of 3000")


def _actions(block: Any) -> None:
    _fields(block, {"elements"})
    _require(0 < len(block["elements"]) <= 25, "1 to 25 elements")
    names = [element["action_id"] for element in block["elements"]]
    _require(len(names) == len({*names}), "unique action_id")
    for button in block["elements"]:
        _fields(button, {"action_id", "text"}, {"value", "url", "style"})
        _require(button["type"] == "button" and len(button["action_id"]) <= 255, "a button")
        _require(button.get("style", "primary") in ("primary", "danger"), "style")
        _plain(button["text"], 75)
        _require(len(button.get("value", "")) <= 2000, "a value of 2000 characters")
        _require(len(button.get("url", "")) <= 3000, "a URL of 3000 characters")


_BLOCKS: dict[Any, Any] = {"header": _header, "rich_text": _rich_text, "input": _input, "actions": _actions}
