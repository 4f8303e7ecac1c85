"""Each verdict ends right, in the journal, in the effects and for later calls; late reports are evidence."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from agentruns import pause_run
from agentruns.engine.in_doubt import AFTER_UNKNOWN, UNKNOWN
from agentruns.services.sweep import sweep
from tests.admin import doubts
from tests.admin.doubts import EVIDENCE, card, doubtful, finish, give, in_doubt, last, payload, start
from tests.admin.pages import look, read, says, unchanged, url
from tests.admin.people import browser
from tests.admin.world import World
from tests.effects import Effects
from tests.shop.agents import call
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)


def test_it_happened_stores_the_result_once(world: World, effects: Effects, requests_commit: str) -> None:
    run = in_doubt()
    told = "Recorded: it happened. The result is stored as a JSON object. A worker picks up the run."
    says(give(run, "occurred", result='{"wire": 7}'), told)
    verdict = payload(run, "orphan_resolved")
    assert (verdict["actor"]["name"], verdict["evidence"]) == ("superuser", EVIDENCE)
    assert finish(run).status == "completed"
    result = payload(run, "tool_result")
    assert (result["outcome"], result["content"], result["is_error"]) == ("ok", {"wire": 7}, False)
    assert effects.count() == 1
    logged = LogEntry.objects.get(object_id=str(run.pk)).change_message
    assert "wire: occurred." in logged and EVIDENCE in logged
    page = card(run, "In doubt since 20")
    assert re.search(rf"superuser: it happened, 20.+\. Evidence: {EVIDENCE}", page.text)
    assert "The model was told the result that superuser entered." in page.text
    assert "Tool finished" not in page.text, "nobody saw it finish"
    assert url(run, "resolve", doubtful(run)) not in page.forms


def test_what_is_typed_is_json_or_text(world: World) -> None:
    for number, (typed, stored) in enumerate((
        ("[1, 2]", [1, 2]), ("12.5", 12.5), ("went out at noon\r\nsays Ann", "went out at noon\nsays Ann"),
        *((text, text) for text in ("true", "NaN", '"quoted"', "[" * 5000, "9" * 5000, "<b>\u202e</b>")),
    )):  # fmt: skip
        run = in_doubt(session=str(number))
        assert give(run, "occurred", result=typed).status_code == 200
        assert payload(run, "tool_result")["content"] == stored


def test_it_did_not_happen_runs_it_once_more_with_the_same_key(world: World, effects: Effects) -> None:
    run = in_doubt()
    says(give(run, "not_occurred", "resolver"), "Recorded: it did not happen. A worker picks up the run.")
    assert "A worker runs it again, with the same key." in card(run).text
    assert effects.count() == 1
    assert finish(run).status == "completed"
    assert [line["attempt"] for line in effects.lines()] == [1, 2]
    assert len({line["key"] for line in effects.lines()}) == 1
    assert payload(run, "tool_result")["content"] == "wired"
    assert payload(run, "orphan_resolved")["actor"]["name"] == "resolver"
    assert sweep().found == 0


def test_unknown_is_told_to_the_model_and_what_follows_is_not_run(world: World, effects: Effects) -> None:
    run = in_doubt(call("post", text="later"))
    assert read(give(run, "unknown", evidence="")).text.count("Recorded: unknown.") == 1
    assert finish(run).status == "completed"
    first, second = payload(run, "tool_result"), payload(run, "tool_result", 1)
    assert first["outcome"] == "unknown"
    assert UNKNOWN.format(tool="wire") in first["content"]
    assert (second["outcome"], second["content"]) == ("cancelled", AFTER_UNKNOWN)
    assert effects.count() == 1
    card(
        run,
        "superuser had its outcome told to the model as unknown",
        "Nobody has cleared it.",
        "The run has ended and stays ended.",
    )


def test_a_paused_run_stays_paused_and_cancelling_the_card_ends_a_run(world: World, effects: Effects) -> None:
    paused, run = in_doubt(session="paused"), in_doubt()
    pause_run(paused.pk, None, reason="audit")
    card(paused, "The run stays paused until somebody resumes it.")
    told = "Recorded: it happened. The result is stored as text."
    page = says(give(paused, "occurred", result="sent"), told)
    assert "is stored as text. A worker takes" not in page.text
    assert finish(paused).status == "paused"
    assert url(run, "cancel") in card(run).forms
    browser("superuser").post(url(run, "cancel"), {"reason": "enough"})
    run.refresh_from_db()
    assert run.status == "cancelled"
    page = card(run, "Its outcome was recorded as unknown")
    assert "The model was told so" not in page.text, "nobody asks it any more"
    assert "told to the model" not in look(run).text
    assert url(run, "cancel") not in page.forms
    assert effects.count() == 2


@pytest.mark.parametrize("verdict", ["occurred", "not_occurred"])
def test_a_verdict_after_the_end_only_lifts_the_doubt(world: World, effects: Effects, verdict: str) -> None:
    run = doubts.uncleared()
    assert "nothing runs, and what the model was told stays" in card(run).text
    shown = look(
        run,
        "Completed. Somebody still has to say what became of a call:",
        "The outcome of a call of wire is unknown; nobody has cleared it.",
        "Until then each further call of wire asks a person.",
    )
    assert "It waits for nobody" not in shown.text
    assert url(run, "call", doubtful(run)) in shown.links
    rows = run.messages.count()
    page = says(give(run, verdict), "The doubt is lifted.", "Completed. It waits for nobody.")
    assert "nobody has cleared it" not in page.text
    assert run.messages.count() == rows + 1
    assert finish(run).status == "completed"
    assert effects.count() == 1
    assert url(run, "resolve", doubtful(run)) not in card(run, "The doubt is lifted.").forms
    again = start({"tools": [call("wire", text="y")]}, key="again")
    assert (again.approvals.count(), effects.count()) == (0, 2)


def test_a_doubt_of_an_earlier_run_stands_on_the_later_one_until_it_is_lifted(world: World) -> None:
    first = doubts.uncleared()
    second = start({"tools": [call("post", text="hi")]}, key="second")
    assert second.pk != first.pk
    page = look(second, "The outcome of a call of wire is unknown")
    assert url(first, "call", doubtful(first)) in page.links
    assert give(first, "unknown", evidence="").status_code == 400
    note = "the bank does not know either"
    says(give(first, "unknown", evidence=note), "Recorded: unknown. The doubt stays.")
    page = card(first, "superuser: unknown, 20", "Nobody has cleared it.", note)
    says(give(first, "occurred"), "lifted")
    assert "The outcome of a call of" not in look(second).text


def test_what_a_zombie_returned_is_evidence(world: World, effects: Effects) -> None:
    run, late, worker = doubts.zombie({"sent": [1, 2]})
    assert run.status == "orphaned"
    assert url(run, "resolve", doubtful(run)) in card(run).forms
    late.report()
    worker.join(LIMIT)
    page = card(
        run,
        "The tool returned after its worker had lost the run. This is evidence that it happened:",
        "stored exactly so, as a JSON object",
        "The tool returned without an error, so it did happen.",
    )
    assert page.text.count('{"sent": [1, 2]}') == 2
    assert page.disabled == ["ar-why-2"]
    with unchanged():
        says(give(run, "not_occurred"), "so it did happen", status=409)
    give(run, "occurred", result='{"sent": [1, 2]}')
    assert finish(run).status == "completed"
    assert payload(run, "tool_result")["content"] == {"sent": [1, 2]}
    assert effects.count() == 1


@pytest.mark.parametrize("returns", ["42", "null", None, True, "a\u202eb\nc", "", [1.5, "x" * 200]])
def test_what_is_left_as_it_was_filled_in_is_stored_exactly(world: World, returns: Any) -> None:
    run, late = doubts.timed_out(returns)
    late.report()
    card(run, "The tool returned after its time was over.")
    assert give(run, "occurred", result=doubts.textarea(run, "result")).status_code == 200
    stored = payload(run, "tool_result")["content"]
    assert (stored, type(stored)) == (returns, type(returns))


def test_a_late_error_forbids_nothing_and_is_seen_before_one_decides(world: World) -> None:
    run, late = doubts.timed_out(ValueError("no money"))
    seen = last(run, doubtful(run))
    late.report()
    told = "The tool raised an error, too late to count. It may have happened all the same."
    with unchanged():
        response = give(run, "not_occurred", seq=seen)
        says(response, "The call moved on since you looked.", told, "no money", status=409)
    assert card(run, told, "no money").disabled == []
    assert give(run, "not_occurred").status_code == 200


def test_it_is_not_run_again_before_its_time_is_over(world: World, effects: Effects) -> None:
    run, late, worker = doubts.zombie("sent", timeout=900)
    page = card(run, "with the same key, not before 20")
    assert "in 14\xa0minutes), when the time of this attempt is over" in page.text
    give(run, "not_occurred")
    finish(run)
    assert (run.status, effects.count()) == ("queued", 1)
    assert run.not_before is not None
    late.go.set()
    worker.join(LIMIT)
