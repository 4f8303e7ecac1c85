from __future__ import annotations

import itertools
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentruns.utils import ids


def test_ids_are_version_7_and_sort_as_made(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time()  # waits: for nothing; the ids are to tell the time
    made = [ids.uuid7() for _ in range(20_000)]
    ended = time.time()  # waits: the same
    assert made == sorted(made)
    assert len(set(made)) == len(made)
    assert {one.version for one in made} == {7}
    assert {one.variant for one in made} == {uuid.RFC_4122}
    assert began - 1 <= (made[-1].int >> 80) / 1000 <= ended + 1
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert ids.uuid7() > made[-1], "a clock that goes back does not"


def test_threads_never_make_the_same_id() -> None:
    with ThreadPoolExecutor(4) as threads:
        made = threads.map(lambda _: [ids.uuid7() for _ in range(2000)], range(4))
    assert len({*itertools.chain(*made)}) == 8000
