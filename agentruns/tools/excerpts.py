"""Excerpts of long results: a request sends the beginning and the end, the length, and how to read on."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from agentruns.conf import settings
from agentruns.tools.base import Tool
from agentruns.utils.bounds import LEAST_SENT

READER = "read_result"
TOGETHER = 2  # bounds: so much is sent of the results of one reply
BLOCK = 32  # characters of a request around a text in a list
LONGEST_ID = 100  # characters that a model can be trusted to repeat
CUT = "\n\n[{left} characters are left out here; the whole result has {whole} characters.{more}]\n\n"
MORE = f' Read on: {READER}(result="{{id}}", offset={{offset}}).'
PARTS, JOINER = ("Mn", "Mc", "Me", "Sk"), "\u200d"  # what follows a letter or joins two emoji
_CUT = re.compile(
    r"\n\n\[\d+ characters are left out here; the whole result has (\d{1,18}) characters\.(.*)]\n\n"
)

Block = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest number of characters that a request sends of a result, by tool; None for no bound.

    `readable` are the tools whose results the model may read on in by `read_result`.
    """

    default: int | None
    by_tool: Mapping[str, int] = field(default_factory=dict)
    readable: Collection[str] = ()

    @classmethod
    def of_tools(cls, tools: Mapping[str, Tool], offered: Collection[str]) -> Bounds:
        """Build the bounds of an agent's tools; `offered` are the names of the tools that a request has.

        Results of tools with sensitive values are not readable, because pages could show parts of these.
        """
        by_tool = {name: tool.sent_max for name, tool in tools.items() if tool.sent_max is not None}
        hidden = {READER, *(name for name, tool in tools.items() if tool.sensitive or tool.sensitive_results)}
        return cls(settings.RESULT_SENT_MAX, by_tool, {*tools} - hidden if READER in offered else ())

    def at_most(self, most: int) -> Bounds:
        """Build the same bounds, none of them over `most`."""
        by_tool = {name: min(each, most) for name, each in self.by_tool.items()}
        return replace(self, default=min(self.default or most, most), by_tool=by_tool)

    def apply(self, messages: list[Block], most: int | None = None) -> list[Block]:
        """Shorten the results in a conversation; equal messages always get equal excerpts.

        The results of one reply together get at most TOGETHER times the largest of their bounds. Does not
        measure each result if it is known that no reply has results of more than `most` characters together.
        """
        every = [each for each in (self.default, *self.by_tool.values()) if each is not None]
        if most is not None and all(most <= each for each in every):
            return messages
        shorter = list(messages)
        for number, group in groupby(results_in(messages), itemgetter(0)):
            content = list(messages[number]["content"])
            bounds = [(place, tool, self.by_tool.get(tool, self.default)) for _, place, tool in group]
            bounded = [(place, tool, bound) for place, tool, bound in bounds if bound is not None]
            share = room = TOGETHER * max((bound for *_, bound in bounded), default=0)
            if sum(min(size_of(content[place]), bound) for place, _, bound in bounded) > room:
                share = max(room // len(bounded), LEAST_SENT)
            for place, tool, bound in bounded:
                content[place] = excerpt(content[place], min(bound, share), tool in self.readable)
            shorter[number] = {**messages[number], "content": content}
        return shorter


UNBOUNDED = Bounds(None)


def results_in(messages: list[Block]) -> Iterator[tuple[int, int, str]]:
    """Yield the place of each result in a conversation, as (message, block in it), and its tool."""
    tools: dict[str, str] = {}
    for number, message in enumerate(messages):
        for place, block in enumerate(message["content"] if isinstance(message["content"], list) else ()):
            if block.get("type") == "tool_use":
                tools[block["id"]] = block["name"]
            elif block.get("type") == "tool_result":
                yield number, place, tools.get(block["tool_use_id"], "")


def excerpt(result: Block, most: int, is_readable: bool = False) -> Block:
    """Shorten a `tool_result` block to `most` characters with its note; files in it stay, after the text."""
    if size_of(result) <= most:
        return result
    text = "\n".join(texts_of(result))
    if len(text) > most:
        before, after, whole = text, text, len(text)
        if (cut := _CUT.search(text)) and int(cut[1]) > whole:  # an excerpt that is to be still shorter
            before, after, whole = text[: cut.start()], text[cut.end() :], int(cut[1])
            is_readable = bool(cut[2])
        id = result["tool_use_id"]
        more = MORE if is_readable and len(id) <= LONGEST_ID else ""
        room = max(most - len(CUT + more + id) - 3 * len(str(whole)), 0)
        end = boundary(before, min(room * 3 // 4, len(before)), -1)
        start = boundary(after, max(len(after) - room // 4, 0), 1)
        note = CUT.format(
            left=whole - end - len(after) + start, whole=whole, more=more.format(id=id, offset=end)
        )
        text = (before[:end] + note + after[start:])[:most]
    if isinstance(result["content"], str):
        return {**result, "content": text}
    files = [block for block in result["content"] if block.get("type") != "text"]
    return {**result, "content": [{"type": "text", "text": text}, *files]}


def texts_of(result: Block) -> list[str]:
    """List the texts in a `tool_result` block."""
    content = result["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [block["text"] for block in blocks if block.get("type") == "text"]


def size_of(result: Block) -> int:
    """Count the characters of the texts in a `tool_result` block, with what is around each in a list."""
    return sum(len(text) + BLOCK for text in texts_of(result)) - BLOCK


def boundary(text: str, place: int, step: int) -> int:
    """Move a cut by `step` until no letter is parted from its accents, and no emoji from its parts."""
    for moved in range(place, place + step * BLOCK, step):
        if not 0 < moved < len(text):
            return moved
        if unicodedata.category(text[moved]) not in PARTS and JOINER not in text[moved - 1 : moved + 1]:
            return moved
    return place
