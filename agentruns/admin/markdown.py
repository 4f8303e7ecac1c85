"""A model's markdown as safe HTML: no HTML of its own, no pictures, links as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape, unescape
from secrets import token_hex

import nh3
from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt

from agentruns.admin.html import Body, body, marked_parts, plain
from agentruns.tools.card import MASK
from agentruns.utils.redaction import redact

TAGS = {
    "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
    "p", "pre", "s", "small", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip

_MARKDOWN = MarkdownIt("commonmark", {"html": False})
# Headings are strong lines: the page has its own.
_MARKDOWN.add_render_rule("heading_open", lambda *_given: "<p><strong>")
_MARKDOWN.add_render_rule("heading_close", lambda *_given: "</strong></p>\n")
# A model's text has no links: a click could send secrets that the model has read to another site. It has no
# entities, because their characters would be neither masked nor marked.
_MARKDOWN.enable(["table", "strikethrough"]).disable(["image", "link", "autolink", "reference", "entity"])


def markdown(
    label: str, text: object, limit: int | None = None, *, hide: Callable[[str], str] = redact
) -> Body:
    """Render a model's markdown as HTML for a page. `label` and `limit` work as in `html.body`.

    Render plain text if rendering would join fragments into a value that `hide` or AGENTRUNS_REDACT hides.
    """
    parts, left_out = marked_parts(redact(str(text)).replace("\r\n", "\n"), limit)
    nonce = token_hex(8)
    kept: list[str] = [escape(MASK)]  # parts that markdown must leave alone: marks and masks
    source = ""
    for part in parts:
        if isinstance(part, SafeString):
            kept.append(part)
            source += f"{nonce}x{len(kept) - 1}x"
        else:
            source += part.replace(MASK, f"{nonce}x0x")

    html = nh3.clean(_MARKDOWN.render(source), tags=TAGS, attributes={})
    read = unescape(nh3.clean(html, tags=set()))
    if redact(hide(read)) != read:
        read = re.sub(rf"{nonce}x(\d+)x", lambda match: MASK if match[1] == "0" else " ", read)
        return body(label, hide(read).strip(), limit)
    for number, part in enumerate(kept):
        html = html.replace(f"{nonce}x{number}x", part)
    return Body(plain(label), mark_safe(html), left_out, "markdown")  # noqa: S308 - sanitised above


def unmarked(text: str, *, hide: Callable[[str], str]) -> str:
    """Remove the markdown from a masked and redacted text.

    Returns the text unchanged if this would join fragments into a value that `hide` or AGENTRUNS_REDACT
    hides.
    """
    nonce = token_hex(8)
    html = _MARKDOWN.render(text.replace(MASK, nonce))
    read = unescape(nh3.clean(html, tags=set())).replace(nonce, MASK)
    return read if redact(hide(read)) == read else text
