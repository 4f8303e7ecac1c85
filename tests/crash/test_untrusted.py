"""A worker is killed between what outsiders wrote and the call that acts: a person is asked all the same."""

from __future__ import annotations

import pytest

from agentruns import approve, start_run
from agentruns.journal.verify import problems
from agentruns.models import Approval, Session
from agentruns.services.sweep import sweep
from tests.crash.processes import run_and_die
from tests.crash.readers import agent, boss
from tests.db.outsiders import WHY, acted, card, drive
from tests.effects import Effects
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

MODULE = "tests.crash.readers"
READING = (
    *("read_mail:before", "read_mail:after", "before_tool", "after_tool", "before_result_commit"),
    *("after_result", "before_model:2", "after_model:2", "after_reply:2"),
)
COMING_UP = (
    "after_children",
    "after_tool",
    "before_finish",
    "after_finish",
    "before_settled",
    "after_settled",
)


def wait_for_card() -> Approval:
    def is_asked() -> bool:
        sweep()
        return Approval.objects.pending().exists()

    wait_for(is_asked, "the card")
    return card()


def goes_on(effects: Effects) -> None:
    """Wait for the card, which names the mail, and check that the call acts once after an approval."""
    waiting = wait_for_card()
    assert (waiting.why, acted(effects)) == (WHY, [])
    approve(waiting.pk, None, digest=waiting.digest)
    assert drive(waiting.run).status == "completed"
    assert acted(effects) == ["send_mail"]
    assert not any(problems(session.pk) for session in Session.objects.all())


@pytest.mark.parametrize("place", READING)
def test_a_worker_is_killed_between_the_mail_and_the_call(place: str, effects: Effects) -> None:
    start_run(agent, "do it", "s1")
    at = {"SHOP_KILL": place} if place.startswith("read_mail") else {"point": place}
    run_and_die("work", module=MODULE, **at)
    goes_on(effects)


@pytest.mark.parametrize("point", COMING_UP)
def test_a_worker_is_killed_while_a_child_that_has_read_comes_up(point: str, effects: Effects) -> None:
    start_run(boss, "do it", "s1")
    run_and_die("work", point=point, module=MODULE)
    goes_on(effects)
