"""What came too late to be a result: evidence on the card, and the result if staff say so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.admin.doubts import (
    card,
    doubtful,
    finish,
    give,
    last,
    payload,
    textarea,
    timed_out,
    zombie,
)
from tests.admin.pages import read, snapshot, url
from tests.admin.world import ONCE, World
from tests.effects import Effects
from tests.waiting import LIMIT

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("requests_commit")]


def test_what_a_zombie_returned_is_evidence(world: World, effects: Effects) -> None:
    run, late, worker = zombie({"sent": [1, 2]})
    assert run.status == "orphaned"
    assert url(run, "resolve", doubtful(run)) in card(run).forms
    late.report()
    worker.join(LIMIT)
    page = card(run)
    assert (
        "The tool returned after its worker had lost the run. This is evidence that it happened:" in page.text
    )
    assert page.text.count('{"sent": [1, 2]}') == 2
    assert "stored exactly so, as a JSON object" in page.text
    assert page.disabled == ["ar-why-2"]
    assert "The tool returned without an error, so it did happen." in page.text
    before = snapshot()
    response = give(run, "not_occurred")
    assert response.status_code == 409
    assert "so it did happen" in read(response).text
    assert snapshot() == before
    give(run, "occurred", result='{"sent": [1, 2]}')
    assert finish(run).status == "completed"
    assert payload(run, "tool_result")["content"] == {"sent": [1, 2]}
    assert effects.count() == 1


@ONCE
@pytest.mark.parametrize("returns", ["42", "null", None, True, "a\u202eb\nc", "", [1.5, "x" * 200]])
def test_what_is_left_as_it_was_filled_in_is_stored_exactly(world: World, returns: Any) -> None:
    run, late = timed_out(returns)
    late.report()
    page = card(run)
    assert "The tool returned after its time was over." in page.text
    data = textarea(run, "result")
    assert give(run, "occurred", result=data).status_code == 200
    stored = payload(run, "tool_result")["content"]
    assert (stored, type(stored)) == (returns, type(returns))


def test_an_error_that_came_late_is_shown_and_forbids_nothing(world: World) -> None:
    run, late = timed_out(ValueError("no money"))
    late.report()
    page = card(run)
    assert "The tool raised an error, too late to count. It may have happened all the same." in page.text
    assert "no money" in page.text
    assert page.disabled == []
    assert give(run, "not_occurred").status_code == 200


def test_a_report_that_comes_in_while_one_decides_is_seen_first(world: World) -> None:
    run, late = timed_out("sent")
    seen = last(run, doubtful(run))
    late.report()
    before = snapshot()
    response = give(run, "not_occurred", seq=seen)
    assert response.status_code == 409
    page = read(response)
    assert "The call moved on since you looked." in page.text
    assert "The tool returned after its time was over." in page.text
    assert textarea(run, "result") == "sent"
    assert snapshot() == before


def test_it_is_not_run_again_before_its_time_is_over(world: World, effects: Effects) -> None:
    run, late, worker = zombie("sent", timeout=900)
    page = card(run)
    assert "with the same key, not before 20" in page.text
    assert "in 14\xa0minutes), when the time of this attempt is over" in page.text
    give(run, "not_occurred")
    finish(run)
    assert (run.status, effects.count()) == ("queued", 1)
    assert run.not_before is not None
    late.go.set()
    worker.join(LIMIT)
