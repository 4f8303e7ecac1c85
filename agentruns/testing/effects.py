"""A ledger of outside effects for tests: how often each one happened, whatever the database says."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

VARIABLE = "AGENTRUNS_EFFECTS"


class EffectsLedger:
    """An append-only file, one JSON line for each effect, that survives a SIGKILL of its writer."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def from_environment(cls) -> EffectsLedger:
        """Return the ledger of the test that this process, or the one that started it, runs.

        Raises LookupError where there is none, so that a stand-in never gets into production unnoticed.
        """
        path = os.environ.get(VARIABLE)
        if not path:
            raise LookupError(f"{VARIABLE} names no file; the fixture `effects` sets it for one test.")
        return cls(path)

    def record(self, key: str, **facts: Any) -> None:
        """Record that the effect `key` happened once more."""
        line = json.dumps({"key": key, **facts}, default=str) + "\n"
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

    def counts(self) -> dict[str, int]:
        """Return how often each key happened."""
        return dict(Counter(line["key"] for line in self.lines()))

    def count(self, key: str | None = None) -> int:
        """Return how often `key` happened, or the number of all effects."""
        return self.counts().get(key, 0) if key is not None else len(self.lines())

    def repeated(self) -> list[str]:
        """Return the keys that happened more than once."""
        return [key for key, times in self.counts().items() if times > 1]
