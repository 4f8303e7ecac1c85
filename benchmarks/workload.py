"""What every system is asked to do: W(n, k), n steps of k tool calls each, then a final text."""

from __future__ import annotations

import random

TEXT = 1024  # bytes a reply says
POOL = 1 << 17


def _pool() -> str:
    """Return text of made-up words, the same in every process."""
    chance = random.Random(7)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 10))) for _ in range(4000)]
    return " ".join(chance.choices(words, k=POOL // 5))[:POOL]


_POOL = _pool()


def words(seed: int, size: int) -> str:
    """Return `size` bytes of text that look like prose and differ with `seed`."""
    begin = seed * 7919 % (POOL - size)
    return "x" + _POOL[begin : begin + size - 2] + "x"  # no space at either end, which some APIs refuse


class Workload:
    """A scripted model and a no-op tool that count what they are asked for.

    Steps are numbered from 0; `reply(steps)` is the final text. The query of a call is the number of its
    result, from 0 to steps * calls - 1: a tool returns `workload.result(int(query))`.
    """

    def __init__(self, steps: int, calls: int, payload: int = 1024) -> None:
        self.steps, self.calls, self.payload = steps, calls, payload
        self.replies: list[int] = []
        self.results: list[int] = []

    def __str__(self) -> str:
        return f"W({self.steps}, {self.calls})"

    def reply(self, step: int) -> tuple[str, list[tuple[str, str]]]:
        """Return the text of a reply, and the id and the query of each call it asks for."""
        self.replies.append(step)
        numbers = range(step * self.calls, (step + 1) * self.calls) if step < self.steps else ()
        return words(step, TEXT), [(f"call_{number}", str(number)) for number in numbers]

    def result(self, number: int) -> str:
        """Return what call `number` returns."""
        self.results.append(number)
        return words(number + 100_003, self.payload)

    def check(self) -> None:
        """Raise AssertionError unless each reply was asked for once, in order, and each call ran once."""
        if self.replies != list(range(self.steps + 1)):
            raise AssertionError(f"{self}: the model was asked for the replies {self.replies}.")
        if sorted(self.results) != list(range(self.steps * self.calls)):
            raise AssertionError(f"{self}: the calls {sorted(self.results)} ran.")
