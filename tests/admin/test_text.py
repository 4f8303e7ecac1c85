from __future__ import annotations

import pytest

from agentruns.admin.html import arguments, bare, body, pretty, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("windows\r\nlines", "windows\nlines"),
        ("Grüße 你好 שלום 🙂", "Grüße 你好 שלום 🙂"),
        ("a⚠\ufe0fb", "a⚠\ufe0fb"),
        ("a\ufe0fb", "a[U+FE0F]b"),
        ("\u202etxt", "[U+202E]txt"),
        ("a\u200bb", "a[U+200B]b"),
        ("a\u00a0b", "a[U+00A0]b"),
        ("lone\rreturn", "lone[U+000D]return"),
        ("\x1b[31m", "[U+001B][31m"),
        ("\ud800", "[U+D800]"),
        ("\x00", "[U+0000]"),
        ("a\u3164b", "a[U+3164]b"),
        ("\U000e0041", "[U+E0041]"),
        ("\U000e0100", "[U+E0100]"),
    ],
)
def test_hidden_characters_are_shown(text: str, shown: str) -> None:
    assert bare(text) == shown
    marked = visible(text)
    assert marked.encode()
    assert ("ar-char" in marked) == (shown != text.replace("\r\n", "\n"))


def test_html_is_escaped() -> None:
    assert visible("<b>\"'&\u200b<i>") == (
        '&lt;b&gt;&quot;&#x27;&amp;<span class="ar-char" title="ZERO WIDTH SPACE">U+200B</span>&lt;i&gt;'
    )


def test_a_cut_says_how_much_is_missing() -> None:
    cut = body("label\u202e", "x" * 10, limit=4)
    assert (cut.text, cut.left_out, cut.label) == ("xxxx", 6, "label[U+202E]")
    assert body("label", "x" * 10).left_out == 0


def test_arguments_are_whole_and_typed() -> None:
    values = {"a": "x" * 9000, "b": 5, "c": True, "d": None, "e": [1], "f": {"g": 1}, "h": ""}
    shown = arguments(values)
    assert [one.kind for one in shown] == [
        "text", "number", "yes or no", "nothing", "list", "object", "empty text",
    ]  # fmt: skip
    assert [one.left_out for one in shown] == [0] * 7
    assert shown[0].text == "x" * 9000
    assert [str(one.text) for one in shown[1:4]] == ["5", "true", "null"]


def test_what_is_not_json_is_shown_all_the_same() -> None:
    assert pretty({"n": float("nan"), "o": object})
