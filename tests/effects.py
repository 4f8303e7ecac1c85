"""The outside world of the tests: what really happened, whatever the database says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "AGENTRUNS_TEST_EFFECTS"


class Effects:
    """An append-only file, one JSON line for each effect, that survives a SIGKILL of its writer."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def from_environment(cls) -> Effects:
        """Return the ledger of the test that started this process."""
        return cls(os.environ[VARIABLE])

    def record(self, key: str, **facts: Any) -> None:
        """Let the effect `key` happen, once more."""
        line = json.dumps({"key": key, **facts}) + "\n"
        ledger = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(ledger, line.encode())
            os.fsync(ledger)
        finally:
            os.close(ledger)

    def lines(self) -> list[dict[str, Any]]:
        """Return the effects in the order in which they happened."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def count(self, key: str | None = None) -> int:
        """Return how often `key` happened; without it, all effects."""
        return sum(key is None or line["key"] == key for line in self.lines())
