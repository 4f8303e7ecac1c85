from __future__ import annotations

import itertools
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentruns.utils import ids


def test_ids_are_version_7_sort_as_made_and_differ_in_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.time()  # waits: for nothing; the ids are to tell the time
    made = [ids.uuid7() for _ in range(20_000)]
    ended = time.time()  # waits: the same
    assert made == sorted(made)
    assert {one.version for one in made} == {7}
    assert {one.variant for one in made} == {uuid.RFC_4122}
    assert began - 1 <= (made[-1].int >> 80) / 1000 <= ended + 1
    with ThreadPoolExecutor(4) as threads:
        others = threads.map(lambda _: [ids.uuid7() for _ in range(2000)], range(4))
    assert len({*made, *itertools.chain(*others)}) == 28_000
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert ids.uuid7() > made[-1], "a clock that goes back does not"
