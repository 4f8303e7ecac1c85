"""The texts of a card: quotes of people and tools, shortened, and the changes in a call's preview."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from agentruns.admin.approvals.around import SHOWN
from agentruns.admin.html import as_text, bare, body, named, plain, pretty, spoken, visible
from agentruns.tools.card import MASK
from agentruns.utils.redaction import redact

LINES = 100  # of a preview
LONGEST = 2_000  # characters of one value of a preview
QUOTED = 200  # characters of a quote; the rest is folded
LINE = 100  # characters of a quoted argument or result
_PARTS = ("before", "after", "links", "warnings")


@dataclass(frozen=True, slots=True)
class Quote:
    """A text of a person or a tool. `short` is its beginning; `whole` is "" if `short` is the full text."""

    label: str
    short: SafeString
    whole: SafeString | str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """One value of a preview, before and after the call; all texts are ready for a page."""

    label: str
    before: SafeString
    after: SafeString
    differs: bool


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview, ready for a page; `links` are pairs of a text and a URL that is safe to follow.

    `note` has the parts that are neither changes, links nor warnings. `left_out` counts changes beyond LINES.
    """

    changes: list[Change] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    note: SafeString | str = ""
    left_out: int = 0
    warnings: list[SafeString] = field(default_factory=list)

    @property
    def is_short(self) -> bool:
        """Check whether the preview is short enough to stand before the quotes of people."""
        size = sum(len(change.before) + len(change.after) for change in self.changes)
        return not self.note and len(self.changes) <= SHOWN and size <= QUOTED


def quote(label: str, text: object, limit: int = QUOTED) -> Quote:
    """Redact a text and build its quote, on one line of at most `limit` characters."""
    whole = redact(str(text)).strip()  # before line ends go: redaction may need them
    short = body(label, " ".join(whole.split()), limit)
    return Quote(short.label, short.inline, body("", whole).text if short.left_out else "")


def brief(sentence: str, given: dict[str, Any]) -> list[Quote]:
    """Quote each argument that is masked or that the sentence does not contain, on one line."""
    quotes = []
    for name, value in given.items():
        label, words = named(name, value)
        texts = (as_text(value), words)
        forms = {form for text in texts for form in (text, text.replace(",", "")) if text}
        is_named = any(re.search(rf"(?<!\w){re.escape(form)}(?!\w)", sentence) for form in forms)
        if value == MASK or not is_named:
            quotes.append(quote(label, words, LINE))
    return quotes


def unit_in(sentence: str, amount: str) -> str:
    """Find the currency beside an amount in a sentence, such as "EUR" or "€"; "" without one."""
    forms = "|".join({re.escape(amount), re.escape(amount.replace(",", ""))})
    unit = r"([A-Z]{3}\b|[€$£¥])"
    match = re.search(rf"(?<![\w.,])(?:{forms})\s?{unit}|{unit}\s?(?:{forms})(?![\w.,]*\d)", sentence)
    return (match[1] or match[2]) if match else ""


def preview(stored: Any) -> Preview | None:
    """Prepare a stored preview for a page; None if `stored` is empty or no dict."""
    if not isinstance(stored, dict) or not stored:
        return None
    before, after = stored.get("before"), stored.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        is_empty = before is None and after is None
        before, after = ({}, {}) if is_empty else ({"": before}, {"": after})
    changes, names = list[Change](), list({**before, **after})
    for name in names[:LINES]:
        sides, cells = (before.get(name), after.get(name)), []
        labels = {named(name, value)[0] for value in sides if value is not None}
        is_one = len(labels) == 1  # with two labels only one side is an amount of cents
        for value in sides:
            text = "" if value is None else named(name, value)[1] if is_one else spoken(value)
            cells.append(visible(text, LONGEST))
        label = plain(labels.pop() if is_one else name)
        changes.append(Change(label, cells[0], cells[1], sides[0] != sides[1]))
    given, warned = stored.get("links"), stored.get("warnings")
    links = [link for link in map(_link, given if isinstance(given, list) else ()) if link is not None]
    warnings = [text for text in (warned if isinstance(warned, list) else [warned]) if text not in (None, "")]
    texts = [quote("", as_text(text), LONGEST).short for text in warnings[:LINES]]
    rest = {name: value for name, value in stored.items() if name not in _PARTS}
    note = body("", pretty(rest), LONGEST).text if rest else ""
    return Preview(changes, links[:LINES], note, len(names) - len(changes), texts)


def _link(link: Any) -> tuple[str, str] | None:
    """Read a link's text and URL; None unless the URL is an http or https URL or a path of this site."""
    if isinstance(link, dict):
        text, url = link.get("label"), link.get("url")
    elif isinstance(link, list) and len(link) == 2:
        text, url = link
    else:
        text, url = "", link
    if not isinstance(url, str) or bare(url) != url or url.startswith("//"):
        return None
    try:
        scheme, site = urlsplit(url)[:2]
    except ValueError:
        return None
    is_safe = scheme in ("http", "https") if scheme or site else url.startswith("/")
    if not is_safe or any(character in url for character in "\\\n\t "):
        return None
    if not text:
        text = _("Open %(site)s") % {"site": site} if site else _("Open the page about it")
    return plain(text), url
