"""The answer of an MCP server as a tool's result: text, blocks or JSON."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentruns.agents.content import IMAGES, PDF, Document, Image, Text
from agentruns.exceptions import ContentError
from agentruns.tools.card import one_line
from agentruns.tools.mcp.client import McpError
from agentruns.utils import json as canonical

if TYPE_CHECKING:
    from mcp.types import CallToolResult

LONGEST_ERROR = 10_000  # characters of an error's text


def result_of(answer: CallToolResult) -> Any:
    """Return what a server answered; raises McpError if it says that its tool failed.

    Structured content stands for the text that repeats it, and comes after any other content.
    """
    blocks = [_block(each) for each in answer.content]
    if answer.is_error:
        texts = [block.text for block in blocks if isinstance(block, Text)]
        raise McpError("\n".join(texts)[:LONGEST_ERROR] or "The server gives no reason.")
    structured = answer.structured_content
    if structured is not None:
        blocks = [block for block in blocks if not _repeats(block, structured)]
        if not blocks:
            return structured
        blocks.append(Text(canonical.dumps(structured)))
    if all(isinstance(block, Text) for block in blocks) and len(blocks) < 2:
        return blocks[0].text if blocks else ""
    return blocks


def _repeats(block: Any, structured: Any) -> bool:
    if not isinstance(block, Text):
        return False
    with suppress(ValueError, RecursionError):
        if json.loads(block.text) == structured:
            return True
    return bool(structured == {"result": block.text})  # as the SDK's servers wrap a text


def _block(item: Any) -> Any:
    """Return one item of the content as a block; a text says what cannot be one, and why."""
    resource = getattr(item, "resource", None)
    if item.type == "text":
        return Text(item.text)
    if item.type == "resource_link":
        return Text(f"[resource {one_line(item.name)}: {one_line(str(item.uri))}]")
    if resource is not None and hasattr(resource, "text"):
        return Text(resource.text)
    data, media_type = (
        (item.data, item.mime_type) if resource is None else (resource.blob, resource.mime_type)
    )
    name = one_line(str(resource.uri)) if resource is not None else ""
    media_type = (media_type or "").partition(";")[0].strip().lower()
    try:
        raw = base64.b64decode(data, validate=True)
        if media_type in IMAGES:
            return Image(data=raw, media_type=media_type, name=name)
        if media_type == PDF:
            return Document(data=raw, media_type=media_type, name=name)
        why = "no type of file that is kept"
    except (ValueError, ContentError) as error:
        why = str(error)
    return Text(f"[{item.type} {name} {one_line(media_type)}, {len(data)} characters, left out: {why}]")
