"""Characters that hide, reorder or strike out others. Pages, mails, terminals and answers share this rule."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from django.utils.translation import get_language_bidi

_CANDIDATE = re.compile(r"[^\n\t\x20-\x7e]")
# Printable by their category, yet invisible: default-ignorable characters of Unicode, blanks, fillers, and
# the placeholder of an object.
_BLANK = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\ufffc\U00016fe4\U0001d159\U00013441\U00013442"
    + "".join(map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
# Combining classes: marks drawn over the character before, which then reads as another or as struck out, and
# joiners of letters in their own script.
_OVERLAY, _JOINER = 1, 9
MANY = 9  # from here on repetitions of a hidden character are counted instead of written
_EMOJI_STYLE = "\ufe0f"
# The scripts written from right to left, and the digits of Arabic.
_RTL = re.compile("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\U00010800-\U00010fff\U0001e800-\U0001efff]")
# A text between these two reorders nothing outside. It cannot contain END: hidden characters are escaped.
FIRST_STRONG, END = "\u2068", "\u2069"


def turns(text: str) -> bool:
    """Check whether a text can reorder the text beside it, because it has right-to-left characters.

    Also true for every text if the active language is written from right to left.
    """
    return get_language_bidi() or (not text.isascii() and _RTL.search(text) is not None)


def isolated(text: str) -> str:
    """Put direction marks around an escaped text of a mail or attribute, if `turns` is true for the text."""
    return f"{FIRST_STRONG}{text}{END}" if turns(text) else text


def hides(character: str, before: str = "") -> bool:
    """Check whether a character is invisible, an overlay on `before`, or a joiner of another script.

    False for the invisible character that turns a symbol before it into an emoji.
    """
    if character == _EMOJI_STYLE and before and unicodedata.category(before) == "So":
        return False  # what makes a symbol an emoji, as models write it
    if not character.isprintable() or character in _BLANK:
        return True
    drawn = unicodedata.combining(character)
    return drawn == _OVERLAY or (drawn == _JOINER and _script(character) != _script(before))


def _script(character: str) -> str:
    return unicodedata.name(character, "").partition(" ")[0] if character else ""


def pieces(text: str) -> Iterator[tuple[str, str, int]]:
    """Split a text at its hidden characters.

    Yields tuples: the ordinary text before a hidden character, the hidden character, and the number of its
    repetitions. The last tuple is the remaining text, "" and 0. Line breaks and tabs are ordinary.
    """
    start = 0
    for match in _CANDIDATE.finditer(text):
        place, character = match.start(), match[0]
        if place < start or not hides(character, text[place - 1 : place]):
            continue
        end = place + 1
        while text[end : end + 1] == character:
            end += 1
        yield text[start:place], character, end - place
        start = end
    yield text[start:], "", 0


def escaped(text: str) -> str:
    r"""Replace the hidden characters of a text by escapes such as `\u202e`.

    If MANY or more equal ones follow each other, writes the escape once, with their count.
    """
    if text.isascii() and text.isprintable():
        return text
    found: list[str] = []
    for shown, hidden, count in pieces(text):
        mark = hidden.encode("unicode_escape").decode()
        found += (shown, mark * count if count < MANY else f"{mark}({count} times)")
    return "".join(found)
