"""A model's markdown as safe HTML: no HTML of its own, no pictures, links as they are written."""

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
# Nothing that a model wrote can be pressed: a click could carry away what it has read. And what is written
# as an entity would be neither masked nor marked: it is looked at before.
_MARKDOWN.enable(["table", "strikethrough"]).disable(["image", "link", "autolink", "reference", "entity"])


def markdown(
    label: str, text: object, limit: int | None = None, *, hide: Callable[[str], str] = redact
) -> Body:
    """Return a text of a model for a page, as `html.body` does, with its markdown rendered.

    Without its markdown where that put a value together which `hide` keeps off the page.
    """
    parts, left_out = marked_parts(redact(str(text)).replace("\r\n", "\n"), limit)
    nonce = token_hex(8)
    kept: list[str] = [escape(MASK)]  # what markdown must leave alone: marks, and what is masked
    source = ""
    for part in parts:
        if isinstance(part, SafeString):
            kept.append(part)
            source += f"{nonce}x{len(kept) - 1}x"
        else:
            source += part.replace(MASK, f"{nonce}x0x")

    html = nh3.clean(_MARKDOWN.render(source), tags=TAGS, attributes={})
    read = _read(html)
    if redact(hide(read)) != read:
        read = re.sub(rf"{nonce}x(\d+)x", lambda found: MASK if found[1] == "0" else " ", read)
        return body(label, hide(read).strip(), limit)
    for number, one in enumerate(kept):
        html = html.replace(f"{nonce}x{number}x", one)
    return Body(plain(label), mark_safe(html), left_out, "markdown")  # noqa: S308 - sanitised above


def unmarked(text: str, *, hide: Callable[[str], str]) -> str:
    """Return a text that is hidden and redacted already without its markdown, where `markdown` takes it."""
    nonce = token_hex(8)
    read = _read(_MARKDOWN.render(text.replace(MASK, nonce))).replace(nonce, MASK)
    return read if redact(hide(read)) == read else text


def _read(html: str) -> str:
    return unescape(nh3.clean(html, tags=set()))
