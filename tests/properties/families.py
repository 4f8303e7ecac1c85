"""Families of random runs: what their agents do, and what is true of parents and child runs at any time."""

from __future__ import annotations

from collections import Counter
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

from agentruns.models import Run
from agentruns.models.event import CHILD
from tests.properties.faults import scripts
from tests.properties.machine import View
from tests.shop.agents import call

ERRAND, SCOUT = 8, 9  # numbers of the agents: the one has no child runs, the other hands on to it

OWN = [
    call("post", text="hi"), call("charge", cents=500), call("refund", cents=5000), call("refund", cents=5),
    call("lookup", number="A1"), call("invoice"), call("invoice"), call("broken"), call("mumble"),
    call("book"),
]  # fmt: skip
ERRANDS = scripts([*OWN, call("refund", cents=6000)], shortest=1)


def handing(*names: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Build a strategy of replies that hand tasks to these agents, most often, or act themselves."""
    over = [call(name, task=f"task {number}") for name in names for number in (1, 2, 3)]
    return scripts([*over, *over, *OWN[:6]], shortest=1)


def check_families(view: View) -> None:
    """Assert that each call has exactly one child run, and that no run waits for what never comes."""
    runs = {run.pk: run for run in view.runs}
    born = Counter((run.parent_id, _call_of(view, run)) for run in view.runs if run.parent_id)
    begun = Counter[Any]()
    for run_id, rows in view.rows.items():
        for row in rows:
            is_child = row.kind == "event_awaited" and row.payload["name"] == CHILD
            begun[run_id, row.call_id] += is_child
            if is_child:
                assert runs[UUID(row.payload["key"])].parent_id == run_id
    assert +begun == born, "a call has no child run, or several"
    assert max(born.values(), default=1) == 1
    for run in view.unfinished:
        assert run.status != "waiting" or any(wait.run_id == run.pk for wait in view.waits), (
            "it waits for nobody"
        )
    for wait in view.waits:
        parent = runs[wait.run_id]
        if wait.name != CHILD or wait.due_at is not None:  # the next sweep looks
            continue
        child = runs[UUID(wait.key)]
        assert not child.is_ended, "a run waits for a child run that has ended"
        assert not parent.is_ended, "nobody cancels the child run of a run that has ended"
        is_cancelled = [_has(view, each, "run_cancel_requested") for each in (parent, child)]
        assert is_cancelled != [True, False], "nobody cancels the child run of a run that is cancelled"


def check_end(view: View) -> None:
    """Assert that nothing of the families is left once their runs have ended."""
    assert not view.unfinished
    assert view.waits == [], "nobody settles an event"
    runs = {run.pk: run for run in view.runs}
    for run in view.runs:
        results = [row for row in view.rows[run.pk] if row.kind == "tool_result"]
        for row in results if run.status == "completed" else []:
            child = next((each for each in runs.values() if _is_of(view, each, run, row.call_id)), None)
            if child is not None and row.payload["outcome"] == "ok":
                assert child.status == "completed", "a result of a child run that has none"


def _is_of(view: View, child: Run, parent: Run, call_id: str) -> bool:
    return child.parent_id == parent.pk and _call_of(view, child) == call_id


def _call_of(view: View, run: Run) -> str:
    first = view.rows[run.pk][0]
    return str(first.payload["parent"]["call"])


def _has(view: View, run: Run, kind: str) -> bool:
    return any(row.kind == kind for row in view.rows[run.pk])
