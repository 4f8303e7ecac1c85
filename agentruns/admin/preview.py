"""What a call would change, by its tool's `preview`: before, after, links to what it touches. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from agentruns.admin.text import body, plain, pretty, visible
from agentruns.tools.card import MASK

MOST = 100  # lines; a preview is to be looked at
LONGEST = 2_000  # characters of a value


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the comparison, fit for a page."""

    label: str
    before: SafeString
    after: SafeString
    differs: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview fit for a page; `links` are pairs of a text and a URL that is safe to follow."""

    changes: list[Change] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    note: SafeString | str = ""
    left_out: int = 0


def preview(shown: Any, hidden: Collection[str] = ()) -> Preview | None:
    """Return a journaled preview for the card, values named as in `hidden` masked; None without one."""
    if not isinstance(shown, dict) or not shown:
        return None
    shown = _masked(shown, hidden) if hidden else shown
    before, after = shown.get("before"), shown.get("after")
    links = [link for link in map(_link, _listed(shown.get("links"))) if link is not None]
    rest = {name: value for name, value in shown.items() if name not in ("before", "after", "links")}
    changes = _changes(before, after)
    names = len({**before, **after}) if isinstance(before, dict) and isinstance(after, dict) else 0
    note = body("", pretty(rest), LONGEST).text if rest else ""
    return Preview(changes, links[:MOST], note, max(0, names - len(changes)))


def _changes(before: Any, after: Any) -> list[Change]:
    if before is None and after is None:
        return []
    if not isinstance(before, dict) or not isinstance(after, dict):
        before, after = {"": before}, {"": after}
    return [
        Change(plain(name), _shown(before, name), _shown(after, name), before.get(name) != after.get(name))
        for name in list({**before, **after})[:MOST]
    ]


def _masked(value: Any, hidden: Collection[str]) -> Any:
    if isinstance(value, dict):
        return {name: MASK if name in hidden else _masked(each, hidden) for name, each in value.items()}
    return [_masked(each, hidden) for each in value] if isinstance(value, list) else value


def _shown(values: dict[str, Any], name: str) -> SafeString:
    value = values.get(name)
    if value is None:
        return visible("")
    shown = body("", value if isinstance(value, str) else pretty(value), LONGEST)
    more = _("and %(count)d characters more") % {"count": shown.left_out}
    return format_html("{} … ({})", shown.text, more) if shown.left_out else shown.text


def _listed(links: Any) -> list[Any]:
    return links if isinstance(links, list) else []


def _link(link: Any) -> tuple[str, str] | None:
    """Return a link's text and URL: one of this site or of the web, never a script."""
    if isinstance(link, dict):
        text, url = link.get("label"), link.get("url")
    elif isinstance(link, list) and len(link) == 2:
        text, url = link
    else:
        text, url = link, link
    if not isinstance(url, str) or not _is_safe(url):
        return None
    return plain(text or url), url


def _is_safe(url: str) -> bool:
    if plain(url) != url or any(character in url for character in "\\\n\t ") or url.startswith("//"):
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") if parts.scheme or parts.netloc else url.startswith("/")
