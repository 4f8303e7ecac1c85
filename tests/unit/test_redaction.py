"""What AGENTRUNS_REDACT takes out of texts, values and log records; and edits that carry what it shows."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest

import agentruns
from agentruns.journal import events
from agentruns.journal.masking import Mask, carries_mask
from agentruns.utils import redaction
from agentruns.utils.redaction import FAILED, Secrets, get_logger, redact, redacted
from tests.cost import grows_at_most
from tests.redacting import CARD, FAIL, HIDE, KEY, NOT_TEXT, leaks
from tests.rows import row


@pytest.fixture
def hidden(settings: Any) -> None:
    settings.AGENTRUNS_REDACT = HIDE


@pytest.fixture(params=[FAIL, NOT_TEXT, "tests.redacting.gone", "no.such.module", "hide"])
def failing(request: pytest.FixtureRequest, settings: Any) -> str:
    settings.AGENTRUNS_REDACT = request.param
    return str(request.param)


def test_without_the_setting_everything_is_the_same_object(caplog: pytest.LogCaptureFixture) -> None:
    text, value = f"pay {CARD}", {"card": [CARD]}
    assert redact(text) is text
    assert redacted(value) is value
    assert not carries_mask("[card]", "card", {"card": CARD})
    try:
        raise ValueError(KEY)
    except ValueError:
        get_logger("agentruns.tried").error("Failed for %s", CARD, exc_info=True)
    (record,) = caplog.records
    assert record.args == (CARD,)
    assert record.exc_info is not None and str(record.exc_info[1]) == KEY


def test_a_value_is_redacted_wherever_it_holds_text(hidden: None) -> None:
    value = {CARD: [KEY, (CARD, 7)], "n": int(CARD), "small": 12, "yes": True, "none": None, "f": 1.5}
    hidden_of = {"[card]": ["[key]", ("[card]", 7)], "n": "[card]"}
    assert redacted(value) == {**hidden_of, "small": 12, "yes": True, "none": None, "f": 1.5}
    assert value["n"] == int(CARD)  # a copy
    assert redact(f"pay {CARD} with {KEY}") == "pay [card] with [key]"
    assert redacted({CARD: 1, CARD[::-1]: 2}) == {"[card]": 1, "[card] (2)": 2}, "both are kept"


def test_a_function_that_fails_hides_the_text_and_is_logged_without_it(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert redact(f"pay {CARD}") == FAILED
    assert redacted({"a": [CARD]}) == {FAILED: [FAILED]}
    assert {record.levelname for record in caplog.records} == {"ERROR"}
    assert all("AGENTRUNS_REDACT" in record.getMessage() for record in caplog.records)
    get_logger("agentruns.tried").error("Failed for %s", CARD)
    assert FAILED in [record.getMessage() for record in caplog.records]
    assert leaks(caplog.text) == []
    assert carries_mask(FAILED, "card", ORIGINAL) and not carries_mask("fine", "safe", ORIGINAL)


class Unsayable:
    def __repr__(self) -> str:
        raise ValueError(CARD)


def test_a_log_record_holds_nothing_but_redacted_text(hidden: None, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("agentruns.tried")
    assert get_logger("agentruns.tried") is logger and len(logger.filters) == 1, "it is filtered once"
    try:
        raise ValueError(f"no access with {KEY}")
    except ValueError:
        logger.error("Failed for %s: %r", CARD, {"key": KEY}, exc_info=True)
    logger.error("Cannot say %r", Unsayable())
    first, second = caplog.records
    assert first.getMessage() == "Failed for [card]: {'key': '[key]'}"
    assert "ValueError: no access with [key]" in caplog.text
    assert "test_redaction.py" in caplog.text  # the traceback itself
    assert (first.args, first.exc_info) == ((), None)
    assert second.getMessage() == FAILED
    assert leaks(caplog.text) == []


def test_every_logger_of_the_package_redacts() -> None:
    for found in pkgutil.walk_packages(agentruns.__path__, "agentruns."):
        if ".migrations" not in found.name and ".testing" not in found.name:
            importlib.import_module(found.name)
    made = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    loggers = [one for one in made if one.name.startswith("agentruns.")]
    assert {"agentruns.executor", "agentruns.tools", "agentruns.sweep"} <= {one.name for one in loggers}
    bare = [one.name for one in loggers if not one.filters and ".testing" not in one.name]
    assert bare == [redaction.logger.name]  # use get_logger; redaction's own says nothing of a text


ORIGINAL = {"card": CARD, "text": f"Pay {CARD} or {KEY}, soon.", "more": {"notes": [KEY]}, "safe": "ok"}


@pytest.mark.parametrize(
    ("name", "masked", "true"),
    [
        ("card", ["[card]"], [CARD, CARD[::-1]]),
        (
            "text",
            [
                "Pay [card] or [key], soon.", "Pay [card] or [key], today.",
                f"Pay {CARD} or [key], soon.", "[key]",
            ],
            [f"Pay {CARD} or {KEY}, today.", "Pay nothing."],
        ),
        ("more", [{"notes": ["new", "[key]"]}, {"[key]": []}], [{"notes": [KEY, "new"]}]),
        ("safe", ["[card]"], ["fine", True]),
    ],
)  # fmt: skip
def test_an_edit_that_carries_a_mask_is_found_and_one_with_true_values_carries_none(
    hidden: None, name: str, masked: list[Any], true: list[Any]
) -> None:
    for edited in (*masked, *true):
        assert carries_mask(edited, name, ORIGINAL) == (edited in masked), edited


def test_a_text_that_was_in_the_argument_before_is_no_mask(hidden: None) -> None:
    original = {"text": f"Write [card], not {CARD}", "card": CARD}
    assert not carries_mask("Write [card]", "text", original)
    assert carries_mask("[card]", "card", original), "all of what was shown of it"
    original = {"text": f"{CARD} " + "word " * 20_000 + KEY}  # compared in linear time
    assert carries_mask(redact(original["text"]), "text", original)
    assert not carries_mask(original["text"] + " more", "text", original)


def last_four(text: str) -> str:
    return re.sub(r"\d{12}(\d{4})", r"XXXX-\1", text)


def stars(text: str) -> str:
    return re.sub(r"\d{16}|sk-\w+", "***", text)


@pytest.mark.parametrize(
    ("function", "masked", "fine"),
    [
        ("stars", ["***", "a***b", "no ***, ***"], ["**", "****", "* * *"]),
        ("last_four", ["XXXX-6789", "see XXXX", "(XXXX)", "[XXXX]"], ["ends in 6789", "6789", "XXX"]),
    ],
)
def test_masks_of_every_form_are_found(
    settings: Any, function: str, masked: list[str], fine: list[str]
) -> None:
    settings.AGENTRUNS_REDACT = f"{__name__}.{function}"
    original = {"text": f"Pay card {CARD}, not {KEY} or {CARD[::-1]}.", "note": "", "cards": [CARD] * 3}
    for edited in (*masked, *fine, redact(original["text"]), [{redact(CARD): 5}]):
        assert carries_mask(edited, "note", original) == (edited not in fine), edited


def test_the_words_in_a_mask_are_words_that_may_be_written(hidden: None) -> None:
    original = {"text": f"The card {CARD}", "note": ""}
    for edited in ("of the card", "card] [ca rd", "key"):
        assert not carries_mask(edited, "note", original), edited
    assert carries_mask("of the[card]", "note", original)


def test_a_mask_is_looked_for_in_linear_time(settings: Any) -> None:
    settings.AGENTRUNS_REDACT = f"{__name__}.last_four"
    texts = [" ".join(f"{number:016}" for number in range(start, start + 2_000)) for start in (0, 5_000)]
    original = {"text": texts[0], "note": ""}
    assert carries_mask(redact(texts[0]).replace("XXXX-", ""), "note", original), "of as many as that, too"
    assert not carries_mask(texts[1], "note", original)


def test_values_are_found_exactly_and_as_they_may_be_written() -> None:
    secrets = Secrets(['it\'s "é"', 1234567, 2.0, "abcd", "abcdef", "cdefgh"])
    said = 'it\'s "é", it\'s \\"é\\" or it\\\'s; 1,234,567 or 1234567.0; abcdefgh, abcde, abc'
    assert secrets.hide(said) == "***, *** or it\\'s; *** or ***.0; ***gh, ***e, abc"
    assert secrets.walk({"abcd": [1234567, 7, True, None, 2]}) == {"***": ["***", 7, True, None, 2]}
    assert Secrets(["x" * 20, "x" * 16]).hide("x" * 17 + "y" + "x" * 20) == "***xy***"
    assert secrets.hide("ABCD, a b c d, abc d") == "ABCD, a b c d, abc d", (
        "what is spelt in another way stays"
    )


def test_very_many_values_that_begin_alike_hide_the_whole_text() -> None:
    begins = "The same beginning "
    values = Secrets([f"{begins}{'a' * number}b" for number in range(900)])
    assert values.hide(f"Once: {begins}") == f"Once: {begins}"
    assert values.hide(begins + "a" * 300 + "b.") == "***."
    assert values.hide(f"{begins}{'a' * 40} " * 50) == "***"


# Values by their number, and a text that comes as near to them as it can
ALIKE = {
    "alike": (lambda number: ["a" * (16 + each) + "b" for each in range(number)], "a"),
    "words": (lambda number: ["ab" * (2 + each % 7) + "c" * (each // 7) for each in range(number)], "ab"),
    "long": (lambda number: ["a" * 100 * number + "b"], "a"),
    "short": (lambda number: [f"{each:x}" for each in range(number)], "0123456789abcdef "),
}


@pytest.mark.parametrize("family", ALIKE)
def test_a_search_is_linear_in_the_text_whatever_the_values_are(family: str) -> None:
    make, piece = ALIKE[family]

    def search(number: int, length: int) -> Callable[[], object]:
        secrets, text = Secrets(make(number)), (piece * length)[:length]
        return lambda: [secrets.hide(text), secrets.hide(text, short=True)]

    assert grows_at_most(24, search(250, 4_000), search(250, 32_000))  # 8 times the text
    assert grows_at_most(12, search(10, 16_000), search(250, 16_000))  # 25 times the values


@pytest.mark.parametrize("values", [["x" * 40_000 + "y", "aX"], ["ab" * 20_000 + "c"]], ids=["far", "near"])
def test_the_end_of_a_draft_is_found_in_linear_time(values: list[str]) -> None:
    secrets = Secrets(values)
    few, many = ("a" * 1_000, "a" * 8_000)
    assert grows_at_most(24, lambda: secrets.settled(few), lambda: secrets.settled(many))


def test_the_end_of_a_draft_as_long_as_a_value_is_found_in_linear_time() -> None:
    few, many = (("xy" * size, Secrets("ab" * size)) for size in (20_000, 160_000))
    assert grows_at_most(24, lambda: few[1].settled(few[0]), lambda: many[1].settled(many[0]))


def test_no_part_of_a_value_stands_at_the_end_of_a_draft() -> None:
    secrets = Secrets(["abcX", "X12345", "abcdefghijklmnopqrstuvwxyz"])
    ends = {
        "say abcX1": 4,
        "say abc": 4,
        "say abcdefghijklmnopq": 4,
        "say abX": 6,
        "so abcd?": 8,
        "X12345": 6,
    }
    assert {text: secrets.settled(text) for text in ends} == ends


def test_members_whose_names_are_masked_alike_are_all_kept() -> None:
    assert Secrets(["first", "other"]).walk({"first": 1, "other": 2, "*** (2)": 3}) == {
        "***": 1, "*** (2)": 2, "*** (2) (2)": 3,
    }  # fmt: skip
    few, many = ({f"key {number}": number for number in range(size)} for size in (500, 8_000))
    secrets = Secrets([*many])
    assert len(secrets.walk(many)) == len(many)
    assert grows_at_most(64, lambda: secrets.walk(few), lambda: secrets.walk(many))  # 16 times as many


def test_a_mask_without_sensitive_names_learns_nothing() -> None:
    mask = Mask()
    mask.know("pay", {"pin": "4711"})
    mask.know_result("pay", "4711")
    mask.row(row(events.ASSISTANT, {"calls": [{"tool": "pay", "arguments": {"pin": "4711"}}], "content": []}))
    assert not mask and not mask.secrets and mask.json("4711") == "4711"


def test_a_mended_input_of_a_sensitive_tool_is_masked() -> None:
    kept = {"tool": "pay", "arguments": {}, "original": {"name": "pay!", "input": '{"pin": "77"}'}}
    mask = Mask([{"tools": {"pay": {"sensitive": ["pin"]}}}])
    shown = mask.row(row(events.ASSISTANT, {"calls": [kept], "content": []}))
    assert shown.payload["calls"][0]["original"] == {"name": "pay!", "input": "***"}
