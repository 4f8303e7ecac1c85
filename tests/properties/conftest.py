from __future__ import annotations

import pytest

from tests.properties.faults import Death, at_each_point


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Points at which the drive dies, without giving its lease back."""
    armed: list[tuple[str, int]] = []

    def reached(point: str) -> None:
        for index, (at, left) in enumerate(armed):
            if at == point:
                armed[index] = (at, left - 1)
                if left == 1:
                    del armed[index]
                    raise Death(point)

    at_each_point(monkeypatch, reached)
    return armed
