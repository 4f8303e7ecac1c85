"""How a reader sees which texts of a page stand apart: those that may turn the line around them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from typing import Any

FIRST_STRONG, END = "\u2068", "\u2069"
# Elements whose text is set apart from what stands around them: by what they are, or as blocks.
APART = {"bdi", "title", "option", "textarea", "button", "input"}
BLOCKS = {
    "article", "caption", "dd", "details", "div", "dt", "fieldset", "figure", "footer", "form", "h1", "h2",
    "h3", "h4", "h5", "h6", "header", "html", "label", "legend", "li", "main", "nav", "ol", "p", "section",
    "summary", "table", "tbody", "td", "th", "thead", "tr", "ul", "body",
}  # fmt: skip
WHOLE = {"pre", "textarea"}  # show a text as it is, whatever it holds
VOID = {"br", "hr", "img", "input", "link", "meta", "col", "source", "rect"}
UNREAD = {"script", "style"}
READ = ("title", "aria-label", "alt", "placeholder", "label")  # attributes that a person reads


def turns(text: str) -> bool:
    """Tell whether a text holds a letter or a digit of a script written from right to left."""
    return any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text)


def contexts(text: str) -> Iterator[str]:
    """Split a text into the stretches that are ordered by themselves, without those inside of them."""
    open_: list[str] = [""]
    for character in text:
        if character == FIRST_STRONG:
            open_.append("")
        elif character == END and len(open_) > 1:
            yield open_.pop()
            open_[-1] += "\ufffc"
        else:
            open_[-1] += character
    yield from open_


class Lines(HTMLParser):
    """The stretches of a page, each ordered by itself."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self._texts: list[str] = [""]
        self.feed(html)
        self.close()
        for text in self._texts:
            self._end(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in READ:
                self.found += contexts(value or "")
        if tag == "br":
            self._texts[-1] += "\n"
        if tag in VOID:
            return
        is_apart = tag in APART | BLOCKS | WHOLE | UNREAD or any(
            name == "dir" and value == "auto" for name, value in attrs
        )
        is_whole = tag in WHOLE | UNREAD or dict(attrs).get("class") == "ar-words"
        if is_apart:
            self._texts.append("")
        self._open.append((tag, is_apart))
        self._skip = is_whole

    def handle_endtag(self, tag: str) -> None:
        while self._open and any(name == tag for name, _apart in self._open):
            name, is_apart = self._open.pop()
            if is_apart:
                text = self._texts.pop()
                self._texts[-1] += "\n" if name in BLOCKS | WHOLE else "\ufffc"
                if name not in WHOLE | UNREAD:
                    self._end(text)
            if name == tag:
                break

    def handle_data(self, data: str) -> None:
        self._texts[-1] += data

    def _end(self, text: str) -> None:
        for line in text.split("\n"):
            self.found += contexts(line)


def swapped(found: Iterable[str], given: Iterable[str]) -> list[str]:
    """Return the stretches in which a text that turns the line stands beside words that are not its own.

    `given` are the texts that people, models and tools gave: each may stand whole, or its beginning.
    """
    known = [" ".join(re.sub("[\u2066-\u2069]", "", text).split()) for text in given if text]
    bad = []
    for each in found:
        text = re.sub(r"\[?U\+206[6-9]\]?", "", " ".join(each.split())).strip(" …“”\ufffc")
        if turns(text) and not any(text in whole for whole in known):
            bad.append(text)
    return bad


def strings(value: Any) -> Iterator[str]:
    """Find all texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings(each)
