"""Excerpts of long results: their length, where they are cut, and what they say of the rest."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import pytest

from agentruns import tool
from agentruns.checks.settings import check_values
from agentruns.tools.excerpts import BLOCK, UNBOUNDED, Bounds, excerpt, size_of, texts_of

TEXTS = {
    "plain": "".join(f"{number:07d}\n" for number in range(20_000)),
    "accents": "e\u0301\u0323" * 40_000,
    "emoji": "\U0001f469\U0001f3fd\u200d\U0001f680" * 30_000,
    "accents alone": "\u0301" * 120_000,
    "JSON": '{"a":[' + "1," * 60_000 + "1]}",
}


def result(content: Any, id: str = "t1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, "is_error": True}


def conversation(*results: dict[str, Any], tool: str = "find") -> list[dict[str, Any]]:
    calls = [{"type": "tool_use", "id": each["tool_use_id"], "name": tool, "input": {}} for each in results]
    return [{"role": "assistant", "content": calls}, {"role": "user", "content": [*results]}]


@pytest.mark.parametrize("most", [1_000, 4_321, 100_000])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_excerpt_has_both_ends_and_says_what_is_left_out(text: str, most: int) -> None:
    short = excerpt(result(text), most, is_readable=True)
    said = short["content"]
    assert len(said) <= most and short == {**result(text), "content": said}
    found = re.search(
        r"\n\n\[(\d+) characters are left out here; the whole result has (\d+) characters\. Read on: "
        r'read_result\(result="t1", offset=(\d+)\)\.\]\n\n',
        said,
    )
    assert found is not None
    left, whole, offset = map(int, found.groups())
    head, tail = said[: found.start()], said[found.end() :]
    assert (whole, offset, left) == (len(text), len(head), len(text) - len(head) - len(tail))
    assert text.startswith(head) and text.endswith(tail) and len(head) > len(tail) > 0
    if text != TEXTS["accents alone"]:  # there is no better place
        rest = text[offset : offset + 1] + tail[:1]
        assert not any(unicodedata.combining(each) or each == "\u200d" for each in rest)
        assert not head.endswith("\u200d")
    assert excerpt(result(text), most, is_readable=True) == short, "the same each time"
    assert "read_result" not in str(excerpt(result(text), most)) and "left out" in str(
        excerpt(result(text), most)
    )


def test_an_excerpt_of_an_excerpt_says_what_the_whole_was() -> None:
    once = excerpt(result(TEXTS["plain"]), 50_000, is_readable=True)
    twice = excerpt(once, 2_000)
    assert size_of(twice) <= 2_000 and twice["content"].count("left out here") == 1
    left, whole, offset = map(int, re.findall(r"(\d+)(?: characters|\))", twice["content"]))
    head, tail = re.split(r"\n\n\[.*\]\n\n", twice["content"])
    assert (whole, offset, left) == (len(TEXTS["plain"]), len(head), whole - len(head) - len(tail))
    assert TEXTS["plain"].startswith(head) and TEXTS["plain"].endswith(tail)


def test_a_result_that_quotes_a_note_is_cut_like_any_other() -> None:
    quoted = excerpt(result(TEXTS["plain"]), 1_000)["content"].replace(f"{len(TEXTS['plain'])}", "7")
    text = quoted + TEXTS["plain"]
    short = excerpt(result(text), 2_000, is_readable=True)["content"]
    assert f"the whole result has {len(text)} characters. Read on" in short and "-" not in short


@pytest.mark.parametrize("most", [1, 50, 200])
def test_no_bound_is_too_small_for_its_note(most: int) -> None:
    assert len(excerpt(result("x" * 5_000, "i" * 99), most, is_readable=True)["content"]) == most


def test_an_id_that_no_model_would_repeat_is_not_named() -> None:
    assert "read_result" not in str(excerpt(result("x" * 5_000, "i" * 101), 2_000, is_readable=True))


def test_texts_in_a_list_are_counted_and_its_files_stay() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x" * 9_000}}
    few = result([{"type": "text", "text": "x" * 400}, picture, {"type": "text", "text": "y" * 400}])
    assert excerpt(few, 1_000) is few
    many = result([{"type": "text", "text": f"{number:04d}"} for number in range(5_000)] + [picture])
    first, last = excerpt(many, 10_000)["content"]
    assert last == picture and len(first["text"]) <= 10_000
    assert first["text"].startswith("0000\n0001\n") and first["text"].endswith("\n4998\n4999")
    small = result([{"type": "text", "text": "x"}] * 1_000)
    assert size_of(small) == 1_000 * (1 + BLOCK) - BLOCK
    (text,) = excerpt(small, 2_000)["content"]
    assert text["text"] == "\n".join(texts_of(small)), (
        "nothing is left out of texts that fit without their blocks"
    )


def test_each_tool_has_its_bound_and_what_is_not_a_result_stays() -> None:
    @tool(sent_max=2_000)
    def find() -> str:
        """Find."""
        return ""

    @tool(sensitive_results=["*"])
    def look() -> str:
        """Look."""
        return ""

    @tool
    def read_result() -> str:
        """Read."""
        return ""

    tools = {each.name: each for each in (find, look, read_result)}
    bounds = Bounds.of_tools(tools, tools)
    text = {"type": "text", "text": "x" * 500_000}
    for name, most, says in (("find", 2_000, True), ("look", 100_000, False), ("gone", 100_000, False)):
        messages = conversation(result("x" * 200_000), tool=name)
        messages[1]["content"].append(text)
        (_said, read) = bounds.apply(messages)
        assert most * 0.9 < size_of(read["content"][0]) <= most and read["content"][1] == text
        assert ("Read on" in str(read)) is says, name
        assert len(messages[1]["content"][0]["content"]) == 200_000, "the journal's own are not altered"
        assert UNBOUNDED.apply(messages) == messages
        (_said, least) = bounds.at_most(1_500).apply(messages)
        assert 1_400 < size_of(least["content"][0]) <= 1_500
    assert "Read on" not in str(Bounds.of_tools(tools, ["find"]).apply(conversation(result("x" * 9_999))))


@pytest.mark.parametrize(("bound", "share"), [(100_000, 25_000), (2_000, 1_000)])
def test_the_results_of_one_reply_share_a_bound(bound: int, share: int) -> None:
    results = [result("x" * 1_200_000, f"t{number}") for number in range(8)]
    (_said, read) = Bounds(bound).apply(conversation(*results))
    assert all(share * 0.9 < size_of(each) <= share for each in read["content"])


@pytest.mark.parametrize("value", [None, 1_000, 0, 999, True, 5_000.0, "5000"])
def test_the_setting_is_checked(value: Any, settings: Any) -> None:
    settings.AGENTRUNS_RESULT_SENT_MAX = value
    is_wrong = value not in (None, 1_000) or value is True
    assert [each.id for each in check_values(None)] == (["agentruns.E012"] if is_wrong else [])


@pytest.mark.parametrize("value", [0, 999, -1, True, 5_000.0, "5000"])
def test_a_bound_that_is_no_number_of_characters_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="sent_max must be a whole number from 1000 on"):

        @tool(sent_max=value)
        def find() -> None:
            """Find."""
