"""The time of steps and waits, from rows alone: what is said, and that no row breaks it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings, strategies as st

from agentruns.admin.html import duration
from agentruns.admin.runs.steps import Timing, timings
from agentruns.journal import events
from agentruns.journal.events import Row

START = datetime(2026, 11, 3, 14, 5, tzinfo=UTC)
DAY = 86400
TAKEN_OVER = {"epoch": 2, "reason": "lease expired"}
KINDS = sorted(value for name, value in vars(events).items() if name.isupper() and isinstance(value, str))
ASKED = [
    (0, "user", "", {"epoch": 0}),
    (1.5, "assistant", "", {"calls": [{}]}),
    (1.5, "approval_requested", "c1", {"required": 1}),
]


def row(seq: int, at: float, kind: str, call: str = "", epoch: int = 1, **payload: Any) -> Row:
    moment = START + timedelta(seconds=at)
    return Row(seq, UUID(int=1), kind, call, "", 0, epoch, {"v": 1, **payload}, moment, "", "", None)


def rows(*given: tuple[Any, ...]) -> list[Row]:
    """Rows of (second, kind, call, values)."""
    return [row(seq, *one[:3], **(one[3] if len(one) > 3 else {})) for seq, one in enumerate(given, 1)]


def said(*given: tuple[Any, ...]) -> list[tuple[str, str]]:
    found = timings(rows(*given))
    texts = ((one.waited, one.took) for _seq, one in sorted(found.items()))
    return [(waited.replace("\xa0", " "), took.replace("\xa0", " ")) for waited, took in texts]


FAILED = (1, "model_failed", "", {"retry_in": 30})
ASKED_TO_GO_ON = {"epoch": 0, "reason": "asked to go on"}
# Rows, and what is said of the last ones: the wait before, and the time that the step took.
SAID: dict[str, tuple[list[Any], list[tuple[str, str]]]] = {
    "a run with an approval": (
        [
            *ASKED, (DAY, "approval_decided", "c1", {"epoch": 0}), (DAY + 4, "tool_started", "c1"),
            (DAY + 6, "tool_result", "c1"), (DAY + 7, "assistant", ""), (DAY + 7, "run_completed", ""),
        ],
        [
            ("", "1.5 s, time in the queue included"), ("", ""), ("waited 23 h 59 min for an approval", ""),
            ("waited 4 s for a worker", ""), ("", "2 s"), ("", "1 s"), ("", ""),
        ],
    ),
    "what comes between does not shorten a wait": (
        [
            *ASKED, (50, "late_result", "c0", {"epoch": 0}), (61.5, "approval_decided", "c1", {"epoch": 0}),
            (71.5, "approval_decided", "c1", {"epoch": 0}),
        ],
        [("waited 1 min for an approval", ""), ("waited 10 s for an approval", "")],
    ),
    "a cancel ends a wait": (
        [*ASKED, (5, "run_cancelled", "", {"epoch": 0})],
        [("waited 3.5 s for an approval", "")],
    ),
    "calls at once take each their own time": (
        [
            (0, "tool_started", "c1"), (0.5, "tool_started", "c2"), (2, "tool_result", "c1"),
            (3, "tool_result", "c2"),
        ],
        [("", "2 s"), ("", "2.5 s")],
    ),
    "a crash, a takeover and a verdict": (
        [
            (0, "tool_started", "c1"), (60, "run_resumed", "", TAKEN_OVER),
            (60, "orphan_found", "c1", {"action": "held"}),
            (100, "orphan_resolved", "c1", {"epoch": 0, "verdict": "occurred"}), (100, "tool_result", "c1"),
        ],
        [("no word of its worker for 1 min", ""), ("", ""), ("waited 40 s for a verdict", ""), ("", "")],
    ),
    "back-off": ([ASKED[0], FAILED, (40, "assistant", "")], [("waited 30 s for the next attempt", "9 s")]),
    "cut short": ([ASKED[0], FAILED, (5, "assistant", "")], [("waited 4 s for the next attempt", "0 s")]),
    "back-off ended by hand": (
        [ASKED[0], FAILED, (5, "run_resumed", "", ASKED_TO_GO_ON), (6, "assistant", "")],
        [("waited 4 s to be resumed", ""), ("", "1 s, time in the queue included")],
    ),
    "a pause ends with the resume that ends it": (
        [
            ASKED[0], (2, "run_paused", "", {"epoch": 0}),
            (9, "run_resumed", "", {**ASKED_TO_GO_ON, "unpause": True}),
        ],
        [("paused for 7 s", "")],
    ),
    "clocks that disagree, and a start that is missing": (
        [(9, "tool_started", "c1"), (3, "tool_result", "c1"), (1, "tool_result", "c9")],
        [("", "0 s"), ("", "")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_is_said_of_waits_and_steps(case: str) -> None:
    given, expected = SAID[case]
    assert said(*given)[-len(expected) :] == expected


def test_the_history_of_a_fork_has_no_times_and_each_sixth_of_a_bar_is_tenfold() -> None:
    copied = [one._replace(payload={**one.payload, "copied": {}}) for one in rows(*ASKED)]
    assert timings(copied) == timings([*copied, row(4, 50, "assistant")]) == {}
    for seconds, bar in ((0.0005, "0.0"), (0.1, "2.0"), (10, "4.0"), (DAY, "6.0")):
        found = timings(rows((0, "tool_started", "c1"), (seconds, "tool_result", "c1")))
        assert found[2].bar == bar


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (0.34, "340 ms"), (2, "2 s"), (59.94, "59.9 s"), (61, "1 min 1 s"),
        (7500, "2 h 5 min"), (DAY, "1 d"), (3 * DAY + 7261, "3 d 2 h"),
    ],
)  # fmt: skip
def test_lengths_in_words(seconds: float, words: str) -> None:
    assert duration(timedelta(seconds=seconds)).replace("\xa0", " ") == words


ODD = st.recursive(st.none() | st.integers() | st.text(max_size=3) | st.floats(), st.lists, max_leaves=3)
PAYLOADS = st.dictionaries(
    st.sampled_from(["reason", "unpause", "retry_in", "action"]),
    ODD | st.sampled_from(["held", "lease expired", True, 5.0, 1e300]),
    max_size=4,
)
ROWS = st.lists(
    st.tuples(
        st.integers(0, 10**7), st.sampled_from([*KINDS, "invented_later"]),
        st.sampled_from(["", "c1", "c2"]), PAYLOADS, st.integers(0, 2),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_no_rows_break_it(given_rows: list[Any]) -> None:
    found = [
        row(seq, at, kind, call, epoch)._replace(payload=payload)
        for seq, (at, kind, call, payload, epoch) in enumerate(given_rows, 1)
    ]
    for one in timings(found).values():
        assert isinstance(one, Timing)
        assert bool(one.bar) == bool(one.took)
        assert 0 <= float(one.bar or 0) <= 6
