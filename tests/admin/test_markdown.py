"""A model's markdown on a page: readable, and nothing of it acts."""

from __future__ import annotations

import pytest

from agentruns.admin.markdown import markdown


def html(text: str) -> str:
    return str(markdown("", text).text)


def test_it_reads_as_it_was_meant() -> None:
    shown = html("# Refund\n\nI **refunded** 24.90:\n\n- mug\n- `code`\n\n| a | b |\n|---|--:|\n| 1 | 2 |")
    for part in ("<p><strong>Refund</strong></p>", "<strong>refunded</strong>", "<li>mug</li>", "<td>2</td>"):
        assert part in shown
    assert "style" not in shown
    assert "<h1" not in shown


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "![x](https://evil.example/track.png)",
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](data:text/html,hi)",
        "[x](/admin/logout/)",
        "[x](//evil.example)",
        "[x](http://[)",
        '[x](https://a.example "onmouseover=alert(1)")',
        '<https://a.example/" onclick=alert(1)>',
        "```html\n<b onclick=x>\n```",
        "[a]: javascript:alert(1)\n\n[a]",
    ],
)
def test_nothing_acts_or_is_loaded(text: str) -> None:
    shown = html(text)
    for bad in (
        "<script",
        "<img",
        "<a ",
        "<b ",
        "title=",
    ):
        assert bad not in shown


@pytest.mark.parametrize("text", ["DE02\\-7", "DE**02**-7", "DE`02`-7", "~~DE02~~-7", "*DE*02-7"])
def test_markdown_puts_no_masked_value_together(text: str) -> None:
    shown = str(markdown("", f"PIN {text}", hide=lambda said: said.replace("DE02-7", "***")).text)
    assert shown == "PIN ***"


def test_links_stay_as_they_are_written() -> None:
    source = (
        "[your bank](https://bank.example@evil.example/x?a=1) and <mailto:ben@example.com?bcc=eve@x.example>"
    )
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


@pytest.mark.parametrize("entity", ["&#x202e;", "&#8238;", "&zwnj;", "&#x3164;", "&#52;"])
def test_an_entity_is_the_text_that_was_masked_and_marked(entity: str) -> None:
    for text in (f"pay {entity}1", f"[pay {entity}1](https://x.example)", f"|a|\n|---|\n|{entity}1|"):
        assert f"&amp;{entity[1:]}1" in html(text)


def test_a_long_text_is_cut_and_says_so() -> None:
    assert markdown("", "x" * 50, 10).left_out == 40
    assert markdown("", "\u200bx" * 5000).left_out > 0
