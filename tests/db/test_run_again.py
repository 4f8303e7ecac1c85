"""An ended run's task done again, in its session: a new run, linked to the old."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentruns import run_again, run_agent, start_run
from agentruns.exceptions import RunStateError, SessionBusyError
from agentruns.journal.verify import problems
from agentruns.models import Run
from agentruns.services.history import session_at
from agentruns.services.sweep import sweep
from tests.db.helpers import payloads, sound, the_run
from tests.db.stories import seq_of, story
from tests.shop.agents import shop_agent
from tests.statements import broken_commit

pytestmark = pytest.mark.django_db(transaction=True)


def test_again_in_the_same_session() -> None:
    run = story()
    again = run_again(run.pk, idempotency_key="k")
    assert (again.origin_id, again.origin_seq, again.input) == (run.pk, None, run.input)
    assert run_again(run.pk, idempotency_key="k").pk == again.pk
    assert payloads(again, "run_started")[0]["origin"] == {"run": str(run.pk)}
    with pytest.raises(RunStateError, match="it goes on by itself"):
        run_again(again.pk)
    with pytest.raises(RunStateError, match=f"'s1' belongs to run {run.pk}"):
        run_again(run.pk, idempotency_key=run.idempotency_key)
    sweep()
    assert sound(again).status == "awaiting-approval"
    assert len(session_at(again.pk, seq_of(again, "user")).conversation.messages()) == 7, (
        "the model sees what was done before"
    )


def test_again_while_the_same_is_asked_anew() -> None:
    run = story()
    start_run(run.agent, run.input, "s1")
    with pytest.raises(SessionBusyError, match=r"unfinished run .* \(queued\) with another task"):
        run_again(run.pk)


def test_what_was_asked_at_length_is_put_away_again(folder: Path) -> None:
    text = "and then? " * 20_000
    run = the_run(run_agent(shop_agent("patient"), text, "s6", idempotency_key="s6"))
    again = run_again(run.pk)
    assert (len(str(again.messages.latest("seq").payload)) < 2_000, again.input) == (True, text)
    assert problems(run.session_id) == []


def test_an_acknowledgement_that_is_lost() -> None:
    run = story()
    with broken_commit(1, went_through=True):
        again = run_again(run.pk)
    assert Run.objects.get(origin=run) == again
