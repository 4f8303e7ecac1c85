"""Without any one of its guards the model breaks a promise."""

from __future__ import annotations

import pytest

from tests.model.explore import explore
from tests.model.guards import GUARDS
from tests.model.scenarios import AWAITS, AWAITS_OTHER, GATED, NOTHING, RECONCILE, TRANSACTIONAL
from tests.model.world import Left, Scenario

SOME = Left(crashes=1, freezes=1, verdicts=1, resumes=1, cancels=2, deliveries=2)
TWICE = "An effect happens twice for a tool without safe_to_retry."
# Guards that are taken out together, the calls of the reply, and the promise that is then broken.
CONTROLS = {
    "the claim": ((RECONCILE,), TWICE),
    "the takeover": ((NOTHING,), "The run waits for ever, and nobody is asked."),
    "the epoch": ((NOTHING,), "A run whose lease is lost is written to."),
    "the last row": ((NOTHING,), "A call starts after a cancel was requested."),
    "start before handler": ((NOTHING,), "A handler is entered without its start in the journal."),
    "the deadline": ((RECONCILE,), TWICE),
    "the hold": ((NOTHING,), TWICE),
    "the question": ((RECONCILE,), TWICE),
    "one transaction": ((TRANSACTIONAL,), "The effect of a transactional tool and its result are not one."),
    "the gate": ((GATED,), "A call starts before anybody has decided."),
    "the pending card": ((GATED,), "A card is decided twice."),
    "the expiry": ((GATED,), "A card is decided after its time."),
    "the consumption": ((GATED,), "A call starts without an approval that it uses up."),
    "the order": ((GATED, NOTHING), "A call starts although an earlier call waits."),
    "the stop after a doubt": (
        (NOTHING, NOTHING), "A call starts although the outcome of an earlier call of its reply is unknown."
    ),
    "cancel before start": ((NOTHING,), "A call starts after a cancel was requested."),
    "the settlement": ((NOTHING,), "A run has ended with an open call."),
    "the evidence": (
        (NOTHING,), "A person says that a call did not happen although its handler has returned."
    ),
    "the contradiction": (
        (NOTHING,), "A call starts again although its handler has returned."
    ),
    "the row of the event": ((AWAITS,), "A delivered event never comes to the journal."),
    "the early event": ((AWAITS_OTHER,), "A call waits for an event that has come."),
    "the untold event": ((AWAITS_OTHER,), "A delivered event never comes to the journal."),
    "the second look": ((AWAITS_OTHER,), "A call waits for an event that has come."),
    "the first delivery": ((AWAITS,), "An event is delivered twice."),
    "one delivery": ((AWAITS,), "A call waits for an event that has come."),
    "the time of a wait": ((AWAITS,), "A wait ends before its time."),
    "the sweep of events": ((AWAITS,), "The run waits for ever, and nobody is asked."),
    "the result of an open call": ((AWAITS,), "A call has two results."),
    "the start of an open call": ((AWAITS,), "A call starts after its result."),
    "the late result": ((NOTHING,), "The result of a handler is lost."),
    "the end, the fence": ((NOTHING,), "assistant comes after the end of the run."),
}  # fmt: skip


@pytest.mark.parametrize("guards", CONTROLS)
def test_a_model_without_a_guard_breaks_a_promise(guards: str) -> None:
    tools, promise = CONTROLS[guards]
    off = frozenset(guards.split(", "))
    found = explore(Scenario("negative control", tools, SOME, off=off))
    print(found.told())
    assert found.wrong == promise, found.told()


def test_each_guard_is_taken_out_once() -> None:
    assert {guard for guards in CONTROLS for guard in guards.split(", ")} == GUARDS.keys()
