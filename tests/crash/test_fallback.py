"""A real SIGKILL, a cancel and a pause around the requests to an overloaded model and to its fallback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentruns import cancel_run, pause_run, resume_run
from agentruns.journal.verify import problems
from agentruns.models import Run
from tests.crash.processes import expire_lease, finish, run_and_die, start, start_held
from tests.db.helpers import payloads
from tests.effects import Effects

pytestmark = pytest.mark.django_db(transaction=True)

# where the process dies at its first step -> replies that were paid and lost with it
INSIDE = {"first:before": 0, "first:after": 0, "second:before": 0, "second:after": 1}
BETWEEN = {"before_model": 0, "after_model": 1, "after_reply": 0, "before_finish": 1, "after_finish": 0}
PLACES = {**INSIDE, **BETWEEN}
KILLS = [(where, "nothing") for where in PLACES]
KILLS += [(where, then) for where in ("second:before", "second:after") for then in ("cancel", "pause")]
ASKS: dict[str, Callable[[Run], object]] = {
    "nothing": lambda run: None,
    "cancel": lambda run: cancel_run(run.pk),
    "pause": lambda run: pause_run(run.pk),
}


def accounts(run: Run, effects: Effects, lost: int) -> None:
    """Check that each reply that can be known counts once, and that its row says who gave it."""
    replies, failures = payloads(run, "assistant"), payloads(run, "model_failed")
    assert effects.count("second") == len(replies) + lost
    assert {row["fallback"] for row in [*replies, *failures]} <= {"second"}
    assert run.step == len(replies)
    assert run.usage.get("input_tokens", 0) == 100 * len(replies) + len(failures)
    assert problems(run.session_id) == []


@pytest.mark.parametrize(("where", "then"), KILLS)
def test_no_reply_of_a_fallback_counts_twice_when_its_process_is_killed(
    where: str, then: str, effects: Effects
) -> None:
    place = {"SHOP_KILL": where} if where in INSIDE else {"point": where}
    run_and_die("run", "falls-back", "s1", **place)
    run = Run.objects.get()
    if not run.is_ended:
        expire_lease(run)
    ASKS[then](run)
    finish(start("sweep"))
    run.refresh_from_db()
    accounts(run, effects, PLACES[where])
    if then == "pause":
        assert run.status == "paused"
        assert resume_run(run.pk).status == "completed"
        run.refresh_from_db()
        accounts(run, effects, PLACES[where])
    assert run.status == ("cancelled" if then == "cancel" else "completed")
    assert sum(line.get("tool") == "charge" for line in effects.lines()) == (then != "cancel")


@pytest.mark.parametrize("then", ["cancel", "pause"])
@pytest.mark.parametrize(("where", "paid"), [("first:before", 0), ("second:before", 1)])
def test_who_asks_for_a_stop_gets_it_before_the_fallback_or_after_its_reply(
    where: str, paid: int, then: str, effects: Effects, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    child, run = start_held("falls-back", where, effects, gate)
    ASKS[then](run)
    gate.unlink()
    finish(child)
    run.refresh_from_db()
    assert (run.status, effects.count("second")) == ({"cancel": "cancelled", "pause": "paused"}[then], paid)
    accounts(run, effects, 0)
