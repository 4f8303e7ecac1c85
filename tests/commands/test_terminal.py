from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from uuid import UUID

import pytest

from agentruns.management.terminal import as_json, call_text, escaped, moment, shortened, table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Grüße, 24.90 €", "Grüße, 24.90 €"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("safe\u202eetacovda", "safe\\u202eetacovda"),
        ("one\ntwo\r\x00", "one\\ntwo\\r\\x00"),
        ("zero\u200bwidth \ud800", "zero\\u200bwidth \\ud800"),
        ("no\xa0break", "no\\xa0break"),
    ],
)
def test_what_a_terminal_would_act_on_is_shown(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_what_the_encoding_lacks_is_shown() -> None:
    assert escaped("24 €", "ascii") == "24 \\u20ac"


def test_json_is_legal_and_ascii() -> None:
    value = {
        "nan": float("nan"),
        "id": UUID(int=1),
        "at": datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1))),
        "text": "é\x7f\u202e",
    }
    text = as_json(value)
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == {
        "nan": "NaN", "id": str(UUID(int=1)), "at": "2026-01-01T00:00:00+00:00", "text": "é\x7f\u202e",
    }  # fmt: skip


def test_long_texts_are_cut() -> None:
    assert shortened("a  b\nc") == "a b c"
    assert shortened("x" * 200, 10) == "x" * 9 + "…"
    assert call_text("post", {"text": "hi", "n": 1}) == 'post(text="hi", n=1)'


def test_columns_are_aligned() -> None:
    assert list(table([("A", "B"), ("long one", "x\n")])) == ["A         B", "long one  x\\n"]


def test_a_moment_is_in_utc() -> None:
    assert moment(datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))) == "2026-01-01 00:00:00"
    assert moment(None) == ""
