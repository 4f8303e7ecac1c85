"""A run with two steps to fork, and its rows."""

from __future__ import annotations

from typing import Any

from agentruns import approve
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.db.helpers import run_turns, the_run
from tests.shop.agents import call

TURNS: list[dict[str, Any]] = [
    {"text": "look", "tools": [call("lookup", number="A1"), call("post", text="hello")]},
    {"tools": [call("refund", cents=5000)]},
]


def story() -> Run:
    """Complete a run of two steps, the second gated."""
    first = run_turns(*TURNS)
    approve(first.pending[0].pk, None)
    assert sweep().completed == 1
    return the_run(first)


def seq_of(run: Run, kind: str, position: int = 0) -> int:
    """Find the number of a run's row of a kind, by its position among them."""
    rows = Message.objects.filter(run=run, kind=kind).order_by("seq")
    return [*rows.values_list("seq", flat=True)][position]
