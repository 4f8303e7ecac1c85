"""Texts on a page, a model's markdown too: readable, and nothing of them hides or acts."""

from __future__ import annotations

from agentruns.admin.html import arguments, bare, body, pretty, visible
from agentruns.admin.markdown import markdown

SHOWN = {
    "plain": "plain", "two\nlines\tand a tab": "two\nlines\tand a tab", "windows\r\nlines": "windows\nlines",
    "Grüße 你好 שלום 🙂": "Grüße 你好 שלום 🙂", "a⚠\ufe0fb": "a⚠\ufe0fb", "a\ufe0fb": "a[U+FE0F]b",
    "\u202etxt": "[U+202E]txt", "a\u200bb": "a[U+200B]b", "a\u00a0b": "a[U+00A0]b",
    "lone\rreturn": "lone[U+000D]return", "\x1b[31m": "[U+001B][31m", "\ud800": "[U+D800]",
    "\x00": "[U+0000]",
    "a\u3164b": "a[U+3164]b", "\U000e0041": "[U+E0041]", "\U000e0100": "[U+E0100]",
}  # fmt: skip


def test_hidden_characters_are_shown() -> None:
    for text, shown in SHOWN.items():
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
    assert markdown("", "x" * 50, 10).left_out == 40
    assert markdown("", "\u200bx" * 5000).left_out > 0


def test_arguments_are_whole_and_typed() -> None:
    values = {"a": "x" * 9000, "b": 5, "c": True, "d": None, "e": [1], "f": {"g": 1}, "h": ""}
    shown = arguments(values)
    assert [one.kind for one in shown] == [
        "text", "number", "yes or no", "nothing", "list", "object", "empty text",
    ]  # fmt: skip
    assert [one.left_out for one in shown] == [0] * 7
    assert shown[0].text == "x" * 9000
    assert [str(one.text) for one in shown[1:4]] == ["5", "true", "null"]
    assert pretty({"n": float("nan"), "o": object}), "what is not JSON is shown all the same"


def html(text: str) -> str:
    return str(markdown("", text).text)


def test_it_reads_as_it_was_meant() -> None:
    shown = html("# Refund\n\nI **refunded** 24.90:\n\n- mug\n- `code`\n\n| a | b |\n|---|--:|\n| 1 | 2 |")
    for part in ("<p><strong>Refund</strong></p>", "<strong>refunded</strong>", "<li>mug</li>", "<td>2</td>"):
        assert part in shown
    assert "style" not in shown
    assert "<h1" not in shown


ACTING = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "![x](https://evil.example/track.png)",
    "[x](javascript:alert(1))", "[x](JaVaScRiPt:alert(1))", "[x](data:text/html,hi)", "[x](/admin/logout/)",
    "[x](//evil.example)", "[x](http://[)", '[x](https://a.example "onmouseover=alert(1)")',
    '<https://a.example/" onclick=alert(1)>', "```html\n<b onclick=x>\n```",
    "[a]: javascript:alert(1)\n\n[a]",
)  # fmt: skip


def test_nothing_acts_or_is_loaded() -> None:
    for text in ACTING:
        shown = html(text)
        assert not [bad for bad in ("<script", "<img", "<a ", "<b ", "title=") if bad in shown], text


def test_markdown_puts_no_masked_value_together() -> None:
    for text in ("DE02\\-7", "DE**02**-7", "DE`02`-7", "~~DE02~~-7", "*DE*02-7"):
        shown = markdown("", f"PIN {text}", hide=lambda said: said.replace("DE02-7", "***")).text
        assert str(shown) == "PIN ***", text


def test_links_stay_as_they_are_written() -> None:
    bank, mail = "https://bank.example@evil.example/x?a=1", "mailto:ben@example.com?bcc=eve@x.example"
    source = f"[your bank]({bank}) and <{mail}>"
    shown = html(source)
    assert source.replace("<", "&lt;").replace(">", "&gt;") in shown
    assert "<a" not in shown


def test_hidden_characters_are_marked_and_masks_stay_masks() -> None:
    shown = html("pay \u202eevil\x00 \ud800 [a\u200b](https://x.example/\u200b) ***\n\n***\n\n`***`")
    for hidden in "\u202e\u200b\x00":
        assert hidden not in shown
    assert shown.count('<span class="ar-char"') == 5  # in the address too
    assert shown.count("***") == 3
    assert "<hr" not in shown


def test_an_entity_is_the_text_that_was_masked_and_marked() -> None:
    for entity in ("&#x202e;", "&#8238;", "&zwnj;", "&#x3164;", "&#52;"):
        for text in (f"pay {entity}1", f"[pay {entity}1](https://x.example)", f"|a|\n|---|\n|{entity}1|"):
            assert f"&amp;{entity[1:]}1" in html(text)
