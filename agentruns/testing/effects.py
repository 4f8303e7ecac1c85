"""A ledger of outside effects for tests, which counts each effect independently of the database."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

VARIABLE = "AGENTRUNS_EFFECTS"


class EffectsLedger:
    """An append-only file with one JSON line for each effect, which survives a SIGKILL of its writer."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def from_environment(cls) -> EffectsLedger:
        """Open the ledger of a test with the fixture `effects`, in the test's process or a child process.

        Raises LookupError if AGENTRUNS_EFFECTS is not set, so that no tool uses a ledger in production.
        """
        if not (path := os.environ.get(VARIABLE)):
            raise LookupError(f"{VARIABLE} names no file; the fixture `effects` sets it for one test.")
        return cls(path)

    def record(self, key: str, **facts: Any) -> None:
        """Append a line that says that the effect `key` happened, with `facts`, and sync the file."""
        line = json.dumps({"key": key, **facts}, default=str) + "\n"
        with self.path.open("ab", buffering=0) as ledger:
            ledger.write(line.encode())
            os.fsync(ledger)

    def lines(self) -> list[dict[str, Any]]:
        """Read the effects in the order in which they were recorded, each as a dict of its key and facts."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def counts(self) -> dict[str, int]:
        """Count the effects of each key."""
        return dict(Counter(line["key"] for line in self.lines()))

    def count(self, key: str | None = None) -> int:
        """Count the effects of `key`, or all effects if `key` is None."""
        return self.counts().get(key, 0) if key is not None else len(self.lines())

    def repeated(self) -> list[str]:
        """List the keys of effects that happened more than once."""
        return [key for key, times in self.counts().items() if times > 1]
