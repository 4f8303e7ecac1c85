"""A model's markdown as safe HTML: no HTML of its own, no pictures, links that say where to."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import nh3
from django.utils.safestring import SafeString, mark_safe
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

from agentruns.admin.html import Body, marked_parts, plain
from agentruns.tools.card import MASK
from agentruns.utils.redaction import redact

TAGS = {
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
    "p", "pre", "s", "small", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
SCHEMES = {"http", "https", "mailto"}


class _Renderer(RendererHTML):
    """Writes the host of each link behind it, and headings as strong lines: the page has its own."""

    def link_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """Return the end of a link, and where it leads."""
        opened = next(one for one in reversed(tokens[:index]) if one.type == "link_open")
        host = _host(str(opened.attrGet("href")))
        return f"</a> <small>({escape(host)})</small>" if host else "</a>"

    def heading_open(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """Return the beginning of a heading."""
        return "<p><strong>"

    def heading_close(self, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
        """Return the end of a heading."""
        return "</strong></p>\n"


_MARKDOWN = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer)
# What is written as an entity would be neither masked nor marked: it is looked at before.
_MARKDOWN.enable(["table", "strikethrough"]).disable(["image", "entity"])


def _host(url: str) -> str:
    """Return the host or address that a link leads to; "" for one that is not to be followed."""
    try:
        parts = urlsplit(url)
        is_mail = parts.scheme == "mailto" and not parts.query  # which may name others, and the words
        place = parts.path if is_mail else parts.hostname or ""
    except ValueError:
        return ""
    return place if parts.scheme in SCHEMES else ""


def markdown(label: str, text: object, limit: int | None = None) -> Body:
    """Return a text of a model for a page, as `html.body` does, with its markdown rendered."""
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

    def attribute(tag: str, name: str, value: str) -> str | None:
        return value if name == "rel" or (_host(value) and nonce not in value) else None

    html = nh3.clean(
        _MARKDOWN.render(source),
        tags=TAGS,
        attributes={"a": {"href"}},
        attribute_filter=attribute,
        url_schemes=SCHEMES,
        link_rel="noopener nofollow",
    )
    for number, one in enumerate(kept):
        html = html.replace(f"{nonce}x{number}x", one)
    return Body(plain(label), mark_safe(html), left_out, "markdown")  # noqa: S308 - sanitised above
