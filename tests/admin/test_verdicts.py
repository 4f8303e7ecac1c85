"""Each verdict ends right: in the journal, in the effects and for the session's later calls."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry

from agentruns.engine.in_doubt import AFTER_UNKNOWN, UNKNOWN
from agentruns.services.sweep import sweep
from tests.admin.doubts import (
    EVIDENCE,
    card,
    doubtful,
    finish,
    give,
    in_doubt,
    payload,
    start,
    uncleared,
)
from tests.admin.pages import read, url
from tests.admin.people import browser
from tests.admin.world import ONCE, World
from tests.effects import Effects
from tests.shop.agents import call

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("requests_commit")]


def test_it_happened_stores_the_result_and_nothing_happens_again(world: World, effects: Effects) -> None:
    run = in_doubt()
    page = read(give(run, "occurred", result='{"wire": 7}'))
    assert (
        "Recorded: it happened. The result is stored as a JSON object. A worker picks up the run."
        in page.text
    )
    verdict = payload(run, "orphan_resolved")
    assert (verdict["actor"]["name"], verdict["evidence"]) == ("superuser", EVIDENCE)
    assert finish(run).status == "completed"
    result = payload(run, "tool_result")
    assert (result["outcome"], result["content"], result["is_error"]) == ("ok", {"wire": 7}, False)
    assert effects.count() == 1
    logged = LogEntry.objects.get(object_id=str(run.pk)).change_message
    assert "wire: occurred." in logged
    assert EVIDENCE in logged
    page = card(run)
    assert "In doubt since 20" in page.text
    assert re.search(rf"superuser: it happened, 20.+\. Evidence: {EVIDENCE}", page.text)
    assert "The model was told the result that superuser entered." in page.text
    assert "Tool finished" not in page.text, "nobody saw it finish"
    assert url(run, "resolve", doubtful(run)) not in page.forms


@ONCE
@pytest.mark.parametrize(
    ("typed", "stored"),
    [
        ("[1, 2]", [1, 2]),
        ("12.5", 12.5),
        ("went out at noon\r\nsays Ann", "went out at noon\nsays Ann"),
        ("true", "true"),
        ("NaN", "NaN"),
        ('"quoted"', '"quoted"'),
        ("[" * 5000, "[" * 5000),
        ("9" * 5000, "9" * 5000),
        ("<b>\u202e</b>", "<b>\u202e</b>"),
    ],
)
def test_what_is_typed_is_json_or_text(world: World, typed: str, stored: Any) -> None:
    run = in_doubt()
    assert give(run, "occurred", result=typed).status_code == 200
    assert payload(run, "tool_result")["content"] == stored


def test_it_did_not_happen_runs_it_once_more_with_the_same_key(world: World, effects: Effects) -> None:
    run = in_doubt()
    page = read(give(run, "not_occurred", "resolver"))
    assert "Recorded: it did not happen. A worker picks up the run." in page.text
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
    page = card(run)
    assert "superuser had its outcome told to the model as unknown" in page.text
    assert "Nobody has cleared it." in page.text
    assert "The run has ended and stays ended." in page.text


def test_cancelling_from_the_card_ends_the_run(world: World, effects: Effects) -> None:
    run = in_doubt()
    assert url(run, "cancel") in card(run).forms
    browser("superuser").post(url(run, "cancel"), {"reason": "enough"})
    run.refresh_from_db()
    assert run.status == "cancelled"
    page = card(run)
    assert "Its outcome was recorded as unknown" in page.text
    assert "The model was told so" not in page.text, "nobody asks it any more"
    assert "told to the model" not in read(browser("superuser").get(url(run))).text
    assert url(run, "cancel") not in page.forms
    assert effects.count() == 1


def test_a_paused_run_stays_paused_and_says_so(world: World) -> None:
    from agentruns import pause_run

    run = in_doubt()
    pause_run(run.pk, None, reason="audit")
    assert "The run stays paused until somebody resumes it." in card(run).text
    page = read(give(run, "occurred", result="sent"))
    assert "Recorded: it happened. The result is stored as text." in page.text
    assert "is stored as text. A worker takes" not in page.text
    assert finish(run).status == "paused"


@pytest.mark.parametrize("verdict", ["occurred", "not_occurred"])
def test_a_verdict_after_the_end_only_records_and_lifts_the_doubt(
    world: World, effects: Effects, verdict: str
) -> None:
    run = uncleared()
    assert "nothing runs, and what the model was told stays" in card(run).text
    shown = read(browser("superuser").get(url(run)))
    assert "Completed. Somebody still has to say what became of a call:" in shown.text
    assert "It waits for nobody" not in shown.text
    assert "The outcome of a call of wire is unknown; nobody has cleared it." in shown.text
    assert "Until then each further call of wire asks a person." in shown.text
    assert url(run, "call", doubtful(run)) in shown.links
    rows = run.messages.count()
    page = read(give(run, verdict))
    assert "The doubt is lifted." in page.text
    assert "nobody has cleared it" not in page.text
    assert "Completed. It waits for nobody." in page.text
    assert run.messages.count() == rows + 1
    assert finish(run).status == "completed"
    assert effects.count() == 1
    page = card(run)
    assert "The doubt is lifted." in page.text
    assert url(run, "resolve", doubtful(run)) not in page.forms
    again = start({"tools": [call("wire", text="y")]}, key="again")
    assert (again.approvals.count(), effects.count()) == (0, 2)


def test_still_unknown_keeps_a_note_and_the_doubt(world: World) -> None:
    run = uncleared()
    assert give(run, "unknown", evidence="").status_code == 400
    page = read(give(run, "unknown", evidence="the bank does not know either"))
    assert "Recorded: unknown. The doubt stays." in page.text
    page = card(run)
    assert "superuser: unknown, 20" in page.text
    assert "Nobody has cleared it." in page.text
    assert "the bank does not know either" in page.text
    assert "lifted" in read(give(run, "occurred")).text


def test_a_doubt_of_an_earlier_run_stands_on_the_later_one(world: World) -> None:
    first = uncleared()
    second = start({"tools": [call("post", text="hi")]}, key="second")
    assert second.pk != first.pk
    page = read(browser("superuser").get(url(second)))
    assert "The outcome of a call of wire is unknown" in page.text
    assert url(first, "call", doubtful(first)) in page.links
    give(first, "occurred")
    assert "The outcome of a call of" not in read(browser("superuser").get(url(second))).text
