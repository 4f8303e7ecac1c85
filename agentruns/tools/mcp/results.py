"""The answer of an MCP server, converted to a tool's result: text, blocks or JSON."""

from __future__ import annotations

import base64
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from agentruns.content import IMAGES, PDF, Document, Image, Text, type_named
from agentruns.exceptions import ContentError
from agentruns.tools.card import one_line
from agentruns.tools.mcp.client import LONGEST_ERROR, McpError
from agentruns.utils import json as canonical

if TYPE_CHECKING:
    from mcp.types import CallToolResult


def result_of(answer: CallToolResult) -> Any:
    """Convert a server's answer to a tool's result; raises McpError if the answer reports a failed tool.

    Structured content replaces each text that repeats it. If other content is left, a text with the
    structured content follows that; otherwise the result is the structured content.
    """
    blocks, structured = [*map(_block, answer.content)], answer.structured_content
    if answer.is_error:
        texts = [block.text for block in blocks if isinstance(block, Text)]
        raise McpError("\n".join(texts)[: 2 * LONGEST_ERROR] or "The server gives no reason.")
    if structured is not None:
        for block in [block for block in blocks if isinstance(block, Text)]:
            repeats = structured == {"result": block.text}  # as the SDK's servers wrap a text
            with suppress(ValueError, RecursionError):
                repeats = repeats or json.loads(block.text) == structured
            if repeats:
                blocks.remove(block)
        if not blocks:
            return structured
        blocks.append(Text(canonical.dumps(structured)))
    if len(blocks) > 1 or not all(isinstance(block, Text) for block in blocks):
        return blocks
    return blocks[0].text if blocks else ""


def _block(item: Any) -> Any:
    """Convert an item of an answer to a block; a text with the reason replaces a file that cannot be kept."""
    resource = getattr(item, "resource", None)
    if item.type == "text" or hasattr(resource, "text"):
        return Text((resource or item).text)
    if item.type == "resource_link":
        return Text(f"[resource {one_line(item.name)}: {one_line(str(item.uri))}]")
    data = item.data if resource is None else resource.blob
    name = "" if resource is None else one_line(str(resource.uri))
    media_type = type_named((resource or item).mime_type or "")
    try:
        kind = Image if media_type in IMAGES else {PDF: Document}[media_type]
        return kind(data=base64.b64decode(data, validate=True), media_type=media_type, name=name)
    except KeyError:
        why = "no type of file that is kept"
    except (ValueError, ContentError) as error:
        why = str(error)
    return Text(f"[{item.type} {name} {one_line(media_type)}, {len(data)} characters, left out: {why}]")
