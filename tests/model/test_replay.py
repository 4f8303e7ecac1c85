"""Traces of the model on the real engine: it does the same, and the same can be seen, after every step."""

from __future__ import annotations

import pytest

from agentruns.engine import in_doubt
from agentruns.models.statuses import Orphan
from tests.effects import Effects
from tests.model.explore import explore
from tests.model.processes import take_steps
from tests.model.replay import Replay
from tests.model.scenarios import SCENARIOS, scenario
from tests.model.traces import Seen, sample, way_to
from tests.settings import BRIEF, DATABASE

pytestmark = pytest.mark.django_db(transaction=True)

# In `make test` a pair of actions that two scenarios share is tried in one of them.
GROUPS = {"all": [*SCENARIOS]} if BRIEF else {name: [name] for name in SCENARIOS}


@pytest.mark.parametrize("group", GROUPS)
def test_the_engine_does_what_the_model_does(
    group: str, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_steps(monkeypatch)
    covered: set[Seen] = set()
    for name in GROUPS[group]:
        traces = sample(explore(scenario(name)), covered)
        if BRIEF:  # an eighth on each database; `make test-full` tries all on both
            traces = traces[DATABASE == "postgres" :: 8]
        print(f"{name}: {len(traces)} traces, {sum(map(len, traces)):,} steps")
        for trace in traces:
            Replay(scenario(name), effects).follow(trace)
    print(f"{len(covered)} actions and pairs of consecutive actions")


def test_an_event_that_came_early_is_evidence_if_its_call_gets_another_result_first(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that had lost the run named the event, and a person was faster than the sweep."""
    take_steps(monkeypatch)
    case = scenario("a call that waits for an event by another key")
    last = "sweep settles: event_delivered late, late_result"
    Replay(case, effects).follow(way_to(explore(case), last))


def test_a_replay_notices_an_engine_that_does_something_else(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that holds no call in doubt, but retries it."""
    take_steps(monkeypatch)
    found = in_doubt._found
    monkeypatch.setattr(
        in_doubt, "_found", lambda batch, call, action, *rest: found(batch, call, Orphan.RETRY, *rest)
    )
    name = "a tool that declares nothing"
    traces = sample(explore(scenario(name)), set())
    with pytest.raises(AssertionError, match="orphan_found 1 held"):
        for trace in traces:
            Replay(scenario(name), effects).follow(trace)
