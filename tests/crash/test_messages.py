"""A sender dies, or the worker of a run that is written to: a message that was committed is there once."""

from __future__ import annotations

import pytest

from agentruns import send_message, start_run
from agentruns.journal.verify import problems
from agentruns.models import Run
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.crash.kills import run_and_die
from tests.crash.processes import expire_lease
from tests.db.helpers import GO_ON

pytestmark = pytest.mark.django_db(transaction=True)

AGENT = "calls-lookup"


def said(run: Run) -> list[str]:
    """What the user said in the run's conversation, which the provider takes."""
    assert Run.objects.get(pk=run.pk).status == "completed"
    assert problems(run.session_id) == []
    messages = result_of(run.pk).messages
    check_messages([*messages, GO_ON])
    blocks = [block for one in messages if one["role"] == "user" for block in one["content"]]
    return [block["text"] for block in blocks if block["type"] == "text"]


@pytest.mark.parametrize(("point", "there"), [("before_start_commit", 0), ("after_start", 1)])
@pytest.mark.parametrize("opened", [True, False])
def test_a_sender_that_dies(point: str, there: int, opened: bool) -> None:
    if opened:
        start_run(AGENT, "do it", "s1")
    run_and_die("send", "s1", "and this", AGENT, point=point)
    sweep()
    runs = list(Run.objects.all())
    assert len(runs) == (opened or there)
    for run in runs:
        assert said(run) == ["do it"] * opened + ["and this"] * there


@pytest.mark.parametrize(
    "point", ["after_model", "after_reply", "after_tool", "after_result", "before_finish"]
)
def test_a_worker_that_dies(point: str) -> None:
    run_and_die("run", AGENT, "s1", point=point)
    run = send_message("s1", "and this")
    expire_lease(run)
    sweep()
    assert said(run) == ["do it", "and this"]
