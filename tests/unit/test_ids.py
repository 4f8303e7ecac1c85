from __future__ import annotations

import threading
import time
import uuid

from agentruns.utils import ids


def test_ids_are_version_7_and_sort_as_made() -> None:
    began = time.time()  # waits: for nothing; the ids are to tell the time
    made = [ids.uuid7() for _ in range(20_000)]
    ended = time.time()  # waits: the same
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert {one.version for one in made} == {7}
    assert {one.variant for one in made} == {uuid.RFC_4122}
    assert began - 1 <= (made[-1].int >> 80) / 1000 <= ended + 1


def test_threads_never_make_the_same_id() -> None:
    made: list[uuid.UUID] = []
    threads = [
        threading.Thread(target=lambda: made.extend(ids.uuid7() for _ in range(2000))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8000


def test_a_clock_that_goes_back_does_not(monkeypatch: object) -> None:
    first = ids.uuid7()
    monkeypatch.setattr(time, "time_ns", lambda: 0)  # type: ignore[attr-defined]
    assert ids.uuid7() > first
