"""Omissions: the form in which requests get the rows before a `left_out` row. The journal keeps the rows."""

from __future__ import annotations

from typing import Any

from agentruns.content import placeholder
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.providers.blocks import GONE, is_private
from agentruns.utils import json as canonical

BOUND = 2000  # characters of each result once the provider has refused the conversation


def home_of(row: Row) -> str:
    """Find the id of the run that wrote a row, also if a fork copied the row."""
    return str(row.payload.get(events.COPIED, {}).get("run", row.run_id))


def without(row: Row, omission: events.LeftOut, home: str) -> Row:
    """Copy a row of the conversation without the part that `omission` leaves out; else return `row` itself.

    `home` is the run that wrote the `left_out` row. A reply keeps its calls without their arguments,
    because each result needs its call.
    """
    if "bound" in omission:
        return _shorter(row, omission["bound"], is_old=home_of(row) != home)
    first, place = omission.get("seq", 0), omission.get("block")
    if not first <= row.seq <= omission.get("until", first):
        return row
    content, note = row.payload["content"], {"type": "text", "text": GONE}
    if row.kind == events.ASSISTANT:
        calls = [{**block, "input": {}} for block in content if block.get("type") == "tool_use"]
        is_cut = row.payload.get("stop_reason") == "pause_turn"  # after which no text of a reply may come
        return _with(row, calls if is_cut else [note, *calls])
    if place is not None and isinstance(content, list):
        return _with(row, [*content[:place], note, *content[place + 1 :]], keeps_files=True)
    return _with(row, GONE if row.kind == events.TOOL_RESULT else [note])


def has_block(row: Row, place: int | None) -> bool:
    """Check whether a part of a row can be left out: all of it, or a block of what a user or a tool gave."""
    content = row.payload["content"] if row.kind != events.ASSISTANT else ()
    return place is None or (isinstance(content, list) and 0 <= place < len(content))


def _shorter(row: Row, bound: int, *, is_old: bool) -> Row:
    """Mark a long result as bounded, describe files, and leave out reasoning of earlier runs."""
    payload, content = row.payload, row.payload["content"]
    if row.kind == events.ASSISTANT:
        is_old = is_old or "fallback" in payload
        kept = [block for block in content if not (is_old and is_private(block))]
        return row if kept == content else _with(row, kept)
    if isinstance(content, list) and isinstance(payload.get("stored"), list):
        is_text = row.kind == events.TOOL_RESULT  # whose long texts stay stored until they are cut
        blocks = [each if is_text and each["type"] == "text" else described(each) for each in content]
        row = row if blocks == content else _with(row, blocks, keeps_files=True)
    stored = payload.get("stored") or []
    texts = [each for each in (stored if isinstance(stored, list) else [stored]) if each["form"] != "bytes"]
    is_long = bool(texts) or len(canonical.dumps(content)) > bound
    if row.kind != events.TOOL_RESULT or not is_long or "bounded" in payload:
        return row
    return row._replace(payload={**row.payload, "bounded": bound})


def described(block: dict[str, Any]) -> dict[str, Any]:
    """Replace a block's file by a text that describes the file; keep a text block's own preview."""
    if block.get("type") == "text" or "sha256" not in block:
        return {name: value for name, value in block.items() if name not in ("sha256", "size")}
    return {"type": "text", "text": placeholder(block, block["sha256"])}


def _with(row: Row, content: Any, *, keeps_files: bool = False) -> Row:
    gone = () if keeps_files else ("stored", "about")
    payload = {name: each for name, each in row.payload.items() if name not in gone}
    return row._replace(payload={**payload, "content": content})
