"""Rows as cards: every kind in words, and a row of newer code at least with its payload."""

from __future__ import annotations

from itertools import product
from typing import Any

from agentruns.admin.runs.steps import PAYLOAD_LIMIT, row_card
from agentruns.journal import events
from agentruns.journal.masking import Mask
from tests.rows import row

CONSTANTS = {value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)}
KINDS = sorted(CONSTANTS - {events.OUTPUT_INVALID, events.MESSAGE, events.COPIED})


def test_there_are_kinds() -> None:
    assert len(KINDS) == 29


ODD: list[dict[str, Any]] = [
    {},
    {"content": None, "calls": None, "actor": "x", "error": "x", "digest": 5, "outcome": [], "verb": {}},
    {"content": [5, None], "calls": [5], "actor": {"name": None}, "error": {}, "verb": "x", "outcome": "x"},
]


def test_no_payload_breaks_a_card() -> None:
    mask = Mask([{"tools": {"refund": {"sensitive": ["cents"]}}}])
    for kind, payload in product([*KINDS, "invented_later", "<script>\u202e"], ODD):
        shown = row_card(mask.row(row(kind, payload)))
        assert shown.title
        assert "\u202e" not in shown.title
        assert shown.payload.text


def test_who_did_it_and_what_it_cost() -> None:
    assert row_card(row(events.RUN_PAUSED, {"actor": {"id": "1", "name": "ann"}})).who == "ann"
    assert row_card(row(events.RUN_PAUSED, {}, epoch=3)).who == "worker"
    assert row_card(row(events.RUN_PAUSED, {})).who == "the program"
    reply = {"calls": [], "content": [], "usage": {"input_tokens": 3}, "cost": "0.0002"}
    failed = {"error": {"type": "T", "text": "x"}, "usage": {"input_tokens": 3}, "cost": "0.0001"}
    told, why = (
        row_card(row(kind, payload)).facts
        for kind, payload in ((events.ASSISTANT, reply), (events.MODEL_FAILED, failed))
    )
    assert told == [("Tokens", "input_tokens 3"), ("Cost", "0.0002")]
    assert ("Cost", "0.0001") in why


def said(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


DECIDED: dict[str, Any] = {"digest": "d", "channel": "worker"}
TITLES: list[tuple[str, dict[str, Any], str]] = [
    (events.APPROVAL_DECIDED, {**DECIDED, "verb": "expire"}, "Nobody answered in time"),
    (events.APPROVAL_DECIDED, {**DECIDED, "verb": "answer", "text": "no"}, "Answered instead of run"),
    (
        events.APPROVAL_DECIDED,
        {**DECIDED, "verb": "approve", "arguments": {"a": 1}},
        "Approved with edited arguments",
    ),
    (events.TOOL_RESULT, {"outcome": "unknown", "content": "x"}, "Outcome unknown"),
    (events.ORPHAN_RESOLVED, {"verdict": "not_occurred", "evidence": "x"}, "Verdict: it did not happen"),
    (events.LATE_RESULT, {"never_entered": True}, "Late report of a worker that had lost the run"),
    (events.LATE_RESULT, {"worker_epoch": 0, "content": "x"}, "What was delivered too late"),
    (events.EVENT_AWAITED, {"name": "payment", "key": "k", "until": None}, "Waits for an event"),
    (events.EVENT_DELIVERED, {"name": "payment", "key": "k", "actor": None}, "Event delivered"),
    (events.EVENT_DELIVERED, {"name": "p", "key": "k", "late": True}, "Event delivered, too late to count"),
    (events.MODEL_FAILED, {"error": {"type": "T", "text": "x"}, "retry_in": 2.0}, "Model call failed"),
    (events.RUN_CANCELLED, {"reason": "why"}, "Cancelled"),
    (events.USER, {"content": said("refund it")}, "Task given"),
    (
        events.USER,
        {"content": said("not so"), "reason": events.OUTPUT_INVALID},
        "Answer sent back: not of the required form",
    ),
]


def test_titles() -> None:
    for kind, payload, title in TITLES:
        shown = row_card(row(kind, payload))
        assert shown.title == title
        assert shown.facts or shown.bodies
    refused = {"outcome": "error", "content": "There is no such tool."}
    titles = [row_card(row(events.TOOL_RESULT, refused, attempt=attempt)).title for attempt in (0, 1)]
    assert titles == ["Not executed: refused", "Tool gave an error"], "which never started gave no error"


def test_what_is_long_is_cut_says_so_and_can_be_whole() -> None:
    long = row(events.TOOL_RESULT, {"outcome": "ok", "content": "x" * 3 * PAYLOAD_LIMIT})
    assert row_card(long).payload.left_out > 0
    assert row_card(long).bodies[0].left_out > 0
    assert row_card(long, whole=True).payload.left_out == row_card(long, whole=True).bodies[0].left_out == 0
    cut, short = (row(events.TOOL_RESULT, {"outcome": "ok", "content": "x" * size}) for size in (91, 90))
    assert (row_card(cut).brief, row_card(short).brief) == ("x" * 90 + "…", "x" * 90)


def test_sensitive_arguments_are_masked_wherever_they_are() -> None:
    definition = {"tools": {"refund": {"sensitive": ["card"]}, "post": {"sensitive": []}}}
    mask = Mask([definition])
    assert (mask.names("refund"), mask.names("post")) == (("card",), ())
    call = {"tool": "refund", "arguments": {"card": "4242", "cents": 1}, "verdict": "ask"}
    said = {"type": "tool_use", "name": "refund", "input": {"card": "4242", "cents": 1}}
    reply = mask.row(row(events.ASSISTANT, {"calls": [call], "content": [said]}))
    asked = mask.row(row(events.APPROVAL_REQUESTED, {"arguments": {"card": "4242"}}))
    edited = mask.row(row(events.TOOL_RESULT, {"edited": {"card": "4242"}}))
    for one in (reply, asked, edited):
        assert "4242" not in str(one.payload)
        assert "***" in str(one.payload)
    assert call["arguments"]["card"] == "4242"
    other = row(events.APPROVAL_REQUESTED, {"arguments": {"card": "4242"}}, tool_name="post")
    assert Mask([definition]).row(other) == other
    assert "4242" not in str(mask.row(other).payload)  # which repeats a value that is sensitive
