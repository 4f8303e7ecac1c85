"""Excerpts of long results: a request sends the beginning and the end, the length, and how to read on."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentruns.conf import settings
from agentruns.tools.base import Tool
from agentruns.utils.bounds import LEAST_SENT

READER = "read_result"
TOGETHER = 2  # bounds: so much is sent of the results of one reply
BLOCK = 32  # characters that a block of text in a request has around its text
LONGEST_ID = 100  # characters; a model cannot be trusted to repeat a longer one
JOINER = "\u200d"
CUT = "\n\n[{left} characters are left out here; the whole result has {whole} characters.{more}]\n\n"
MORE = " Read on: " + READER + '(result="{id}", offset={offset}).'

Block = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest number of characters that a request sends of a result, by tool; None for no bound.

    `readable` are the tools whose results the model may read on in by `read_result`.
    """

    default: int | None
    by_tool: Mapping[str, int] = field(default_factory=dict)
    readable: frozenset[str] = frozenset()

    @classmethod
    def of_tools(cls, tools: Mapping[str, Tool], offered: Collection[str]) -> Bounds:
        """Build the bounds of an agent's tools, for a run to which the tools in `offered` are sent.

        A result of a tool with sensitive values is not readable: pages would show parts of these.
        """
        by_tool = {name: tool.sent_max for name, tool in tools.items() if tool.sent_max is not None}
        plain = (name for name, tool in tools.items() if not (tool.sensitive or tool.sensitive_results))
        return cls(settings.RESULT_SENT_MAX, by_tool, frozenset(plain if READER in offered else ()))

    def at_most(self, most: int) -> Bounds:
        """Build the same bounds, none of them over `most`."""
        smaller = {name: min(each, most) for name, each in self.by_tool.items()}
        return replace(self, default=min(self.default or most, most), by_tool=smaller)

    def apply(self, messages: list[Block]) -> list[Block]:
        """Shorten the results in a conversation; the same rows always give the same excerpts.

        The results of one reply together get at most TOGETHER times the largest of their bounds.
        """
        tools: dict[str, str] = {}  # call -> its tool
        bounded = []
        for message in messages:
            blocks = message["content"] if isinstance(message["content"], list) else []
            tools |= {block["id"]: block["name"] for block in blocks if block.get("type") == "tool_use"}
            bounds: dict[int, int] = {}
            for place, block in enumerate(blocks):
                tool = tools.get(block.get("tool_use_id", ""), "")
                bound = self.by_tool.get(tool, self.default)
                if block.get("type") == "tool_result" and bound is not None:
                    bounds[place] = bound
            room = TOGETHER * max(bounds.values(), default=0)
            if sum(min(size_of(blocks[place]), bound) for place, bound in bounds.items()) > room:
                share = max(room // len(bounds), LEAST_SENT)
                bounds = {place: min(bound, share) for place, bound in bounds.items()}
            content = list(blocks)
            for place, bound in bounds.items():
                is_readable = tools.get(blocks[place]["tool_use_id"]) in self.readable
                content[place] = excerpt(blocks[place], bound, is_readable=is_readable)
            bounded.append({**message, "content": content} if bounds else message)
        return bounded


UNBOUNDED = Bounds(None)


def excerpt(result: Block, most: int, *, is_readable: bool = False) -> Block:
    """Shorten a `tool_result` block to `most` characters with its note; files in it stay, after the text."""
    if size_of(result) <= most:
        return result
    content, text = result["content"], text_of(result)
    if len(text) > most:
        id, whole = result["tool_use_id"], len(text)

        def note(left: int, offset: int) -> str:
            more = MORE.format(id=id, offset=offset) if is_readable and len(id) <= LONGEST_ID else ""
            return CUT.format(left=left, whole=whole, more=more)

        room = max(most - len(note(whole, whole)), 0)
        end = boundary(text, room * 3 // 4, -1)
        start = boundary(text, whole - (room - room * 3 // 4), 1)
        text = (text[:end] + note(start - end, end) + text[start:])[:most]
    if isinstance(content, str):
        return {**result, "content": text}
    files = [block for block in content if block.get("type") != "text"]
    return {**result, "content": [{"type": "text", "text": text}, *files]}


def size_of(result: Block) -> int:
    """Count the characters of the texts in a `tool_result` block, with what is around each in a list."""
    content = result["content"]
    if isinstance(content, str):
        return len(content)
    return sum(len(block["text"]) + BLOCK for block in content if block.get("type") == "text")


def text_of(result: Block) -> str:
    """Join the texts in a `tool_result` block by line ends."""
    content = result["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return "\n".join(block["text"] for block in blocks if block.get("type") == "text")


def boundary(text: str, place: int, step: int) -> int:
    """Move a cut by `step` until no letter is parted from its accents, and no emoji from its parts."""
    moved = place
    while 0 < moved < len(text) and abs(moved - place) < BLOCK:
        parts = unicodedata.category(text[moved]) in ("Mn", "Mc", "Me", "Sk")
        if not parts and JOINER not in text[moved - 1 : moved + 1]:
            return moved
        moved += step
    return place if 0 < moved < len(text) else moved
