"""No test fails on a slow machine: tests wait for events, with limits of minutes, by `tests.waiting`.

`python -m tests.packaging.test_waiting` lists every line that sleeps, reads a clock, or waits less than that.
A comment "# waits: the reason" allows the statement in which it stands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MARKER = "# waits: "
SHORTEST = 120  # seconds
HELPER = TESTS / "waiting.py"  # the one module that polls

CLOCKS = {
    *(f"time.{name}" for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")),
    *("monotonic", "perf_counter", "process_time", "thread_time"),
}
SLEEPS = {"sleep", "wait_for_timeout"}
# What waits, by the position of its limit among the arguments; None: only by name.
WAITS = {
    "wait": 0, "join": 0, "result": 0, "poll": 0, "settimeout": 0, "timeout": 0, "exception": 0,
    "receive_output": 0, "communicate": 1, "wait_for": 1, "create_connection": 1, "acquire": 1, "urlopen": 2,
    "wait_for_async": 2, "Barrier": 2, "get": None, "put": None, "run": None, "check_output": None,
    "check_call": None, "open": None, "set_default_timeout": 0, "set_default_navigation_timeout": 0,
}  # fmt: skip
NAMES = {"timeout", "seconds", "patience"}
PLAYWRIGHT = re.compile("(not_)?to_[a-z]|wait_for_|expect_|set_default_|goto$|click$|fill$|set_options$")
LIMITS = re.compile("PATIENCE|LIMIT$|WITHIN|TIMEOUT|DEADLINE|SECONDS|SOON|AT_MOST")


class Module:
    """A module of the tests, and the numbers that its constants name."""

    def __init__(self, text: str) -> None:
        self.lines, self.tree = ["", *text.splitlines()], ast.parse(text)
        self.constants: dict[str, float] = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = self.number(node.value)
                if value is not None:
                    self.constants[node.targets[0].id] = value

    def number(self, node: ast.expr) -> float | None:
        """Compute the number that an expression of constants stands for."""
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return value
            case ast.Name(id=name):
                return self.constants.get(name)
            case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as sign, right=right):
                one, other = self.number(left), self.number(right)
                if one is None or not other:
                    return None
                return one * other if isinstance(sign, ast.Mult) else one / other
            case _:
                return None

    def findings(self) -> Iterator[tuple[int, str]]:
        """Find each line that a slow machine may break, and why."""
        for node in ast.walk(self.tree):
            why = self._of(node)
            if why and isinstance(node, ast.stmt | ast.expr):
                lines = self.lines[node.lineno : (node.end_lineno or node.lineno) + 1]
                if not any(MARKER in line for line in lines):
                    yield node.lineno, why

    def _of(self, node: ast.AST) -> str:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if LIMITS.search(name):
                unit = 1000 if "millisecond" in self.lines[node.lineno] else 1
                return self._short(value, SHORTEST * unit)
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                if name in SLEEPS:
                    return "" if node.args and self.number(node.args[0]) == 0 else "sleeps"
                if ast.unparse(node.func) in CLOCKS:
                    return "reads a clock"
                return self._of_limits(node, name)
            case _:
                return ""

    def _of_limits(self, node: ast.Call, name: str) -> str:
        by_browser = (bool(PLAYWRIGHT.match(name)) and name not in WAITS) or name.startswith("set_default_")
        if not by_browser and name not in WAITS:
            return ""
        limits, place = [each.value for each in node.keywords if each.arg in NAMES], WAITS.get(name)
        limits += node.args[place : place + 2] if place is not None else []
        shortest = SHORTEST * (1000 if by_browser else 1)
        return next(filter(None, (self._short(limit, shortest) for limit in limits)), "")

    def _short(self, limit: ast.expr, shortest: float) -> str:
        value = self.number(limit)
        return f"waits {value:g} at most" if value is not None and 0 < value < shortest else ""


def found(folder: Path) -> list[str]:
    """List what a slow machine may break in the modules of a folder."""
    return [
        f"{path.relative_to(TESTS.parent)}:{line}: {why}"
        for path in sorted(folder.rglob("*.py"))
        if path != HELPER
        for line, why in sorted({*Module(path.read_text()).findings()})
    ]


def test_no_test_depends_on_the_speed_of_the_machine() -> None:
    assert found(TESTS) == []


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(1)", "assert time.monotonic() - began < 3", "thread.join(5)", "wait_for(done, 'it', 9)",
        "expect(page).to_have_text('x', timeout=5_000)", "subprocess.run(command, timeout=2 * 20)",
        "PATIENCE = 30  # seconds", "PATIENCE = 30_000  # milliseconds", "await server.receive_output(10)",
    ],
)  # fmt: skip
def test_such_a_line_is_found_and_may_give_a_reason(line: str) -> None:
    assert [*Module(line).findings()]
    assert not [*Module(f"{line}  {MARKER}for nothing").findings()]


if __name__ == "__main__":
    print(*found(TESTS), sep="\n")
