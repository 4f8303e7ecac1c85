"""Characters that hide, reorder or strike out others: one rule for every page, mail, terminal and answer."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from django.utils.translation import get_language_bidi

_CANDIDATES = re.compile(r"[^\n\t\x20-\x7e]+")
# Printable by their category, yet drawn as nothing: what Unicode calls default-ignorable, blanks, fillers,
# and what stands for an object.
_BLANK = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufffc\U00016fe4\U0001d159\U00013441\U00013442"
    + "".join(map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
# Combining classes: what is drawn over the character before, which reads as another or as struck out, and
# what joins letters of its own script.
_OVERLAY, _JOINER = 1, 9
MANY = 9  # from here on repetitions of a hidden character are counted instead of written
_EMOJI_STYLE = "\ufe0f"
# The scripts written from right to left, and the digits of Arabic.
_RTL = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
# What stands between them reorders nothing outside. No text of others can end it: both are shown as hidden.
FIRST_STRONG, END = "\u2068", "\u2069"


def turns(text: str) -> bool:
    """Tell whether a text can reorder what stands beside it: it is written the other way."""
    return get_language_bidi() or (not text.isascii() and _RTL.search(text) is not None)


def isolated(text: str) -> str:
    """Set a text, its hidden characters shown already, apart where no element can: in mails, attributes."""
    return f"{FIRST_STRONG}{text}{END}" if turns(text) else text


def hides(character: str, before: str = "") -> bool:
    """Tell whether a character is not drawn as itself where it stands after `before`."""
    if character == _EMOJI_STYLE and before and unicodedata.category(before) == "So":
        return False  # what makes a symbol an emoji, as models write it
    if not character.isprintable() or character in _BLANK:
        return True
    drawn = unicodedata.combining(character)
    return drawn == _OVERLAY or (drawn == _JOINER and _script(character) != _script(before))


def _script(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0] if character else ""


def pieces(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield stretches of ordinary text, each with the hidden character that ends it and how often it comes.

    The last one ends with "". Line breaks and tabs are ordinary.
    """
    start = place = 0
    for match in _CANDIDATES.finditer(text):
        place = max(place, match.start())
        while place < match.end():
            character = text[place]
            if not hides(character, text[place - 1] if place else ""):
                place += 1
                continue
            end = place + 1
            while end < match.end() and text[end] == character:
                end += 1
            yield text[start:place], character, end - place
            start = place = end
    yield text[start:], "", 0


def escaped(text: str) -> str:
    r"""Return a text with hidden characters as escapes: `\u202e`, one that is repeated with its count."""
    if text.isascii() and text.isprintable():
        return text
    found: list[str] = []
    for shown, hidden, count in pieces(text):
        mark = hidden.encode("unicode_escape").decode()
        found += (shown, mark * count if count < MANY else f"{mark}({count} times)")
    return "".join(found)
