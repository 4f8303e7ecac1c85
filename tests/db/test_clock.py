"""The journal's clock: told with appends, asked once a minute, and never a reason to lose a row."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from agentruns import start_run
from agentruns.utils import clock
from agentruns.utils.db import database_now, uptime
from tests.shop.agents import shop_agent

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite's clock is this machine's own"),
]


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_readings", {})


def make_known(*, off: float, age: float) -> None:
    """Let the known reading be so many seconds off and so many seconds old."""
    known = clock._readings["default"]
    moment = known.moment + timedelta(seconds=off - age)
    clock._readings["default"] = clock.Reading(moment, known.sent - age, known.received - age)


def is_right() -> bool:
    return abs(clock.now("default") - database_now("default")) < timedelta(seconds=1)


def refuse(execute: Any, sql: str, *args: Any) -> Any:
    raise OperationalError("the server closed the connection unexpectedly")


def test_an_append_tells_the_time() -> None:
    start_run(shop_agent("brief"), "do it", "s1")
    with CaptureQueriesContext(connection) as captured:
        clock.now("default")
    assert len(captured) == 0
    assert is_right()
    make_known(off=3600, age=31)
    start_run(shop_agent("briefer"), "do it", "s2")
    assert is_right()


def test_it_is_asked_once_a_minute_where_nothing_is_appended() -> None:
    with CaptureQueriesContext(connection) as captured:
        [clock.now("default") for _ in range(3)]
    assert len(captured) == 1
    make_known(off=3600, age=61)
    assert is_right()
    # An answer that was long in coming, as where a lock was waited for, is not taken.
    clock.told("default", database_now("default") - timedelta(hours=1), uptime() - 2 * clock.PRECISION)
    assert is_right()


def test_an_unreachable_database_leaves_the_time_that_was_told() -> None:
    clock.now("default")
    make_known(off=0, age=90)
    with connection.execute_wrapper(refuse):
        later = clock.now("default")
    assert abs(later - database_now("default")) < timedelta(seconds=1)
    clock._readings.clear()
    with connection.execute_wrapper(refuse), pytest.raises(OperationalError):
        clock.now("default")
