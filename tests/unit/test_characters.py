"""Characters that hide, reorder or strike out others are shown for what they are, in linear time."""

from __future__ import annotations

from functools import partial

import pytest

from agentruns.admin.html import bare, plain, visible
from agentruns.management import base as terminal
from agentruns.tools.card import one_line
from agentruns.utils.characters import escaped, hides
from tests.cost import grows_at_most

HIDDEN = (
    "\u202e\u2066\u200b\u3164\u2800\u115f\u034f\ufe00\U000e0100\u0336\U000e0041\ue000\x1b\x85"
    "\ud800\u2028\u00ad"
    # No ink, no object, a filler, joiners without a letter of theirs, overlays by their class.
    "\U0001d159\ufffc\U00016fe4\u2d7f\u1039\U0001107f\U0001bc9e\u20eb"
)


@pytest.mark.parametrize("character", HIDDEN)
def test_a_hidden_character_is_shown_at_every_exit(character: str) -> None:
    assert hides(character)
    text = f"pay 1{character}00"
    for shown in (escaped(text), one_line(text), terminal.escaped(text), plain(text), str(visible(text))):
        assert character not in shown
        assert f"{ord(character):x}" in shown.lower()


@pytest.mark.parametrize(
    "text",
    ["Grüße, 24.90 €", "नमस्ते", "မန္တလေး", "ខ្មែរ", "ⵜ⵿ⵜ", "日本語", "한국어", "❤\ufe0f", "שלום", "a\nb\tc"],
)
def test_what_people_write_stays(text: str) -> None:
    assert escaped(text) == bare(text) == text


def test_a_megabyte_of_them_is_cheap() -> None:
    for text in ("\u202e" * 2**20, "\u202e\u202d" * 2**19, "a\u0336" * 2**19):
        few, many = partial(visible, text[: 2**16]), partial(visible, text)  # sixteen times as many
        assert grows_at_most(40, few, many)
        assert len(visible(text)) < 100_000
    assert "U+202E (1048576)" in visible("\u202e" * 2**20)
    assert escaped("\u202e" * 10) == "\\u202e(10 times)"
