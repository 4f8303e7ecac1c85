"""The timeline, from rows alone: what took how long, what is left out, and that no row breaks it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentruns.admin.runs import spans, timeline
from agentruns.admin.runs.timeline import Axis
from agentruns.journal import events
from agentruns.journal.events import Row

START = datetime(2026, 11, 3, 14, 5, tzinfo=UTC)
DAYS = 3 * 86400
APPROVE = {"verb": "approve", "digest": "d", "actor": {"id": "1", "name": "ann"}}
CONSTANTS = {value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)}


def row(
    seq: int, at: float, kind: str, call: str = "", epoch: int = 1, attempt: int = 0, **payload: Any
) -> Row:
    moment = START + timedelta(seconds=at)
    tool = "refund" if call else ""
    return Row(seq, UUID(int=1), kind, call, tool, attempt, epoch, {"v": 1, **payload}, moment, "", "", None)


def rows(*given: tuple[Any, ...]) -> list[Row]:
    """Rows of (second, kind, call, values)."""
    return [row(seq, *one[:3], **(one[3] if len(one) > 3 else {})) for seq, one in enumerate(given, 1)]


ASKED = [
    (0, "user", "", {"epoch": 0}),
    (1.5, "assistant", "", {"calls": [{}]}),
    (1.5, "approval_requested", "c1", {"required": 1}),
]


def spans_of(found: list[Row], at: float = 100, doing: str = "") -> list[tuple[str, str, float, str]]:
    now = START + timedelta(seconds=at)
    return [
        (span.lane, span.what, ((span.end or now) - span.start).total_seconds(), span.outcome)
        for span in spans.read(found, now, doing).spans
    ]


def marks_of(found: list[Row]) -> list[tuple[str, int]]:
    return [(mark.what, mark.seq) for mark in spans.read(found, START).marks]


def test_a_run_with_an_approval() -> None:
    found = rows(
        *ASKED,
        (DAYS, "approval_decided", "c1", {"epoch": 0, **APPROVE}),
        (DAYS + 4, "tool_started", "c1", {"attempt": 1}),
        (DAYS + 6, "tool_result", "c1", {"attempt": 1, "outcome": "ok"}),
        (DAYS + 7, "assistant", "", {"calls": []}),
        (DAYS + 7, "run_completed", ""),
    )
    assert spans_of(found) == [
        ("model", "Model request 1, time in the queue included", 1.5, "asked for 1 call"),
        ("people", "Approval of refund", DAYS - 1.5, "Approved"),
        ("idle", "Queued for a worker", 4, ""),
        ("tools", "refund", 2, "Tool finished"),
        ("model", "Model request 2", 1, "replied"),
    ]
    assert marks_of(found) == [("Completed", 8)]


def test_three_days_of_waiting_do_not_squash_two_seconds_of_work() -> None:
    found = rows(
        *ASKED,
        (DAYS, "approval_decided", "c1", {"epoch": 0, **APPROVE}),
        (DAYS, "tool_started", "c1", {"attempt": 1}),
        (DAYS + 2, "tool_result", "c1", {"attempt": 1, "outcome": "ok"}),
        (DAYS + 2, "run_completed", ""),
    )
    drawn = timeline.draw(found, START, is_ended=True)
    (gap,) = drawn.breaks
    assert (gap.text, gap.title) == ("3 days", "3 days, drawn shorter")
    tool = next(bar for bar in drawn.bars if "ar-bar--tools" in bar.classes)
    assert float(tool.width) > 400
    assert drawn.ticks[0].text.startswith("3 Nov, ")
    assert drawn.ticks[-1].text.endswith(":02")
    assert drawn.summary.startswith("3 days in all. Model: 1.5 s; Tools: 2 s; Waiting for people: 3 days")


def test_two_approvers_an_edit_and_a_denial() -> None:
    asked = [*ASKED[:2], (1.5, "approval_requested", "c1", {"required": 2})]
    once = (5, "approval_decided", "c1", APPROVE)
    assert spans_of(rows(*asked, once), at=11.5)[-1] == ("people", "Approval of refund", 10, "")
    assert spans_of(rows(*asked, once, once))[-1][2:] == (3.5, "Approved")
    edited = (5, "approval_decided", "c1", {**APPROVE, "arguments": {}})
    assert spans_of(rows(*asked, once, edited), at=11.5)[-1][3] == ""
    denied = (8, "approval_decided", "c1", {"verb": "deny", "digest": "d"})
    assert spans_of(rows(*asked, once, denied))[-1][2:] == (6.5, "Denied")
    assert spans_of(rows(*asked, (8, "tool_result", "c1", {"outcome": "cancelled"})))[1][3] == (
        "Not executed: cancelled"
    )


def test_a_crash_a_takeover_and_a_verdict() -> None:
    found = rows(
        *ASKED[:2],
        (2, "tool_started", "c1", {"attempt": 1}),
        (62, "run_resumed", "", {"epoch": 2, "reason": "lease expired"}),
        (62, "orphan_found", "c1", {"attempt": 1, "action": "held"}),
        (80, "late_result", "c1", {"attempt": 1, "epoch": 0}),
        (100, "orphan_resolved", "c1", {"epoch": 0, "verdict": "not_occurred"}),
        (101, "tool_started", "c1", {"attempt": 2}),
        (103, "tool_result", "c1", {"attempt": 2, "outcome": "ok"}),
    )
    assert spans_of(found)[1:] == [
        ("tools", "refund", 60, "left no result"),
        ("people", "Verdict on refund", 38, "Verdict: it did not happen"),
        ("idle", "Queued for a worker", 1, ""),
        ("tools", "refund, attempt 2", 2, "Tool finished"),
    ]
    assert marks_of(found) == [
        ("Taken over: lease expired", 4),
        ("Call of refund in doubt", 5),
        ("Late report of refund", 6),
    ]


def test_a_worker_that_dies_between_calls_and_a_tool_that_is_rolled_back() -> None:
    silent = rows(*ASKED[:1], (60, "run_resumed", "", {"reason": "lease expired"}), (61, "assistant", ""))
    assert spans_of(silent) == [
        ("idle", "No word of the worker", 60, "taken over"),
        ("model", "Model request 1", 1, "replied"),
    ]
    again = rows(
        (0, "tool_started", "c1", {"attempt": 1}),
        (60, "run_resumed", "", {"reason": "lease expired"}),
        (61, "tool_started", "c1", {"attempt": 2}),
    )
    assert spans_of(again, at=71)[0] == ("tools", "refund", 60, "left no result")
    assert spans_of(again, at=71)[-1] == ("tools", "refund, attempt 2", 10, "")


@pytest.mark.parametrize(
    ("after", "backs_off", "asked"),
    [
        ([(40, "assistant", "")], 30, ("model", "Model request 2, time in the queue included", 9, "replied")),
        ([(5, "run_resumed", "", {"epoch": 0}), (6, "assistant", "")], 4, None),
        ([(7, "run_cancelled", "")], 6, None),
        ([], 30, None),
    ],
)
def test_back_off(after: list[Any], backs_off: float, asked: Any) -> None:
    failed = (1, "model_failed", "", {"retry_in": 30, "error": {"type": "overloaded_error", "text": ""}})
    found = spans_of(rows(*ASKED[:1], failed, *after), at=31, doing="" if after else "queue")
    assert found[0][2:] == (1, "failed: overloaded_error")
    assert found[1][:3] == ("idle", "Back-off after the model failed", backs_off)
    assert asked is None or found[2] == asked


def test_a_pause_ends_with_the_resume_that_ends_it() -> None:
    paused = [*ASKED[:1], (2, "run_paused", "", {"reason": "the bank is down", "epoch": 0})]
    assert spans_of(rows(*paused), at=12)[-1] == ("people", "Paused: the bank is down", 10, "")
    resumed = (9, "run_resumed", "", {"epoch": 0, "unpause": True, "reason": "asked to go on"})
    assert spans_of(rows(*paused, resumed))[0][2:] == (7, "Resumed")
    assert spans_of(rows(*paused, resumed), at=12, doing="queue")[-1] == (
        "idle",
        "Queued for a worker",
        3,
        "",
    )


@pytest.mark.parametrize(
    ("doing", "lane", "what"),
    [
        ("model", "model", "The model is asked"),
        ("queue", "idle", "Queued for a worker"),
        ("silent", "idle", "Its worker has fallen silent"),
    ],
)
def test_what_a_run_does_now(doing: str, lane: str, what: str) -> None:
    assert spans_of(rows(*ASKED[:1]), at=5, doing=doing) == [(lane, what, 5, "")]
    drawn = timeline.draw(rows(*ASKED[:1]), START + timedelta(seconds=5), doing=doing)
    assert "ar-bar--open" in drawn.bars[0].classes
    assert drawn.lines[0].length == "5 s so far"


def test_the_history_of_a_fork_is_not_its_own() -> None:
    copied = [one._replace(payload={**one.payload, "copied": {}}) for one in rows(*ASKED)]
    assert spans_of(copied) == []
    assert timeline.draw(copied, START).lines == []


def test_clocks_that_disagree_and_partners_that_are_missing() -> None:
    found = rows(
        (9, "tool_result", "c9", {"outcome": "ok"}),
        (9, "orphan_resolved", "c9", {"verdict": "occurred"}),
        (9, "tool_started", "c1", {"attempt": 1}),
        (3, "tool_result", "c1", {"attempt": 1, "outcome": "ok"}),
        (1, "invented_later", "c1"),
    )
    assert spans_of(found) == [("tools", "refund", 0, "Tool finished")]
    assert len(timeline.draw(found, START).bars) == 1


def test_what_is_left_out_is_said_and_where_a_bar_leads() -> None:
    drawn = timeline.draw(rows(*ASKED), START, is_whole=False, url=lambda seq: f"/rows/{seq}")
    assert "from row 1 on" in drawn.left_out
    assert {bar.url for bar in drawn.bars} == {"/rows/2", "/rows/3"}
    assert [line.url for line in drawn.lines] == ["/rows/2", "/rows/3"]


def test_calls_at_once_lie_below_each_other() -> None:
    calls = [(0, "tool_started", f"c{number}") for number in range(3)]
    ends = [(2, "tool_result", f"c{number}", {"outcome": "ok"}) for number in range(3)]
    drawn = timeline.draw(rows(*calls, *ends), START, is_ended=True)
    assert len({bar.y for bar in drawn.bars}) == 3
    assert {bar.text for bar in drawn.bars} == {"refund"}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 ms"), (0.34, "340 ms"), (2, "2 s"), (59.94, "59.9 s"), (61, "1 min 1 s"), (7500, "2 h 5 min"),
     (86400, "1 day"), (DAYS + 7200, "3 days 2 h")],
)  # fmt: skip
def test_lengths_in_words(seconds: float, words: str) -> None:
    assert timeline.duration(timedelta(seconds=seconds)) == words


ODD = st.recursive(st.none() | st.integers() | st.text(max_size=3) | st.floats(), st.lists, max_leaves=3)
PAYLOADS = st.dictionaries(
    st.sampled_from(
        [
            "verb",
            "arguments",
            "required",
            "outcome",
            "action",
            "reason",
            "unpause",
            "retry_in",
            "error",
            "calls",
        ]
    ),
    ODD | st.sampled_from(["approve", "held", "lease expired", True, 5.0, 1e300]),
    max_size=4,
)
ROWS = st.lists(
    st.tuples(
        st.integers(0, 10**7), st.sampled_from([*sorted(CONSTANTS), "invented_later"]),
        st.sampled_from(["", "c1", "c2"]), PAYLOADS, st.integers(0, 2),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from(["", "model", "queue", "silent"]), st.booleans())
def test_no_rows_break_it_and_everything_lies_inside(
    given_rows: list[Any], doing: str, is_ended: bool
) -> None:
    found = [
        row(seq, at, kind, call, epoch)._replace(payload=payload)
        for seq, (at, kind, call, payload, epoch) in enumerate(given_rows, 1)
    ]
    drawn = timeline.draw(found, START + timedelta(days=30), doing=doing, is_ended=is_ended)
    for bar in drawn.bars:
        left, width = float(bar.x), float(bar.width)
        assert left >= timeline.EDGE - 0.1
        assert left + width <= timeline.WIDTH - timeline.EDGE + 0.2
        assert width >= timeline.NARROWEST
        assert 0 < float(bar.y) < float(drawn.height)
    assert len(drawn.lines) == len(drawn.bars) + len(drawn.marks)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True))
@settings(max_examples=40, deadline=None)
def test_later_is_further_right(seconds: list[int]) -> None:
    moments = [START + timedelta(seconds=second) for second in seconds]
    axis = Axis(moments, [(min(moments), moments[0])], 900)
    places = [axis.x(moment) for moment in sorted(moments)]
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] <= 900.001
    labels = [tick.x for tick in axis.ticks()]
    assert all(b - a >= 110 for a, b in pairwise(labels))
