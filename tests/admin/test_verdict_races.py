"""Who comes too late, clicks twice, or leaves something out."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils.html import escape

from agentruns import cancel_run, resume_run
from tests.admin.doubts import EVIDENCE, card, doubtful, finish, give, in_doubt, last, payload
from tests.admin.pages import says, unchanged, url
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.db.racing import at_once
from tests.effects import Effects

pytestmark = pytest.mark.django_db(transaction=True)


def test_two_people_at_once_are_one_verdict(world: World, effects: Effects, requests_commit: str) -> None:
    run = in_doubt()
    target, seen = url(run, "resolve", doubtful(run)), last(run, doubtful(run))
    clients = {"occurred": browser("resolver"), "not_occurred": browser("superuser")}

    def click(verdict: str) -> Any:
        data = {"seq": seen, "verdict": verdict, "result": "sent", "evidence": EVIDENCE}
        return clients[verdict].post(target, data)

    answers = dict(zip(clients, at_once(*(partial(click, verdict) for verdict in clients)), strict=True))
    assert sorted(answer.status_code for answer in answers.values()) == [302, 409]
    won = next(verdict for verdict, answer in answers.items() if answer.status_code == 302)
    lost = next(answer for answer in answers.values() if answer.status_code == 409)
    assert payload(run, "orphan_resolved")["verdict"] == won
    assert run.messages.filter(kind="orphan_resolved").count() == 1
    name = {"occurred": "resolver", "not_occurred": "superuser"}[won]
    said = {"occurred": "it happened", "not_occurred": "it did not happen"}[won]
    told = f"Your verdict was not recorded. {name}: {said}, 20"
    says(lost, told, f"Evidence: {EVIDENCE}", status=409)
    assert finish(run).status == "completed"
    assert effects.count() == {"occurred": 1, "not_occurred": 2}[won]


@pytest.mark.parametrize("verdict", ["occurred", "not_occurred", "unknown"])
@pytest.mark.parametrize("driven", [False, True])
def test_a_double_click_is_told_so(world: World, verdict: str, driven: bool, requests_commit: str) -> None:
    run = in_doubt()
    seen = last(run, doubtful(run))
    give(run, verdict, seq=seen, result='{"a": 1}')
    if driven:
        finish(run)
    with unchanged():
        response = give(run, verdict, seq=seen, result='{"a": 1}')
        says(response, "Your verdict was recorded already. superuser: ")
        for other in (
            {"evidence": "another"},
            {"verdict": "occurred" if verdict == "unknown" else "unknown"},
        ):
            changed = {"seq": seen, "result": '{"a": 1}', **other}
            response = give(run, changed.pop("verdict", verdict), **changed)
            says(response, "Your verdict was not recorded. superuser: ", status=409)
        if verdict == "occurred":
            assert give(run, verdict, seq=seen, result="other").status_code == 409
        assert give(run, verdict, "resolver", seq=seen, result='{"a": 1}').status_code == 409
    assert LogEntry.objects.count() == 1


def test_somebody_resumed_or_cancelled_meanwhile(world: World, requests_commit: str) -> None:
    first, second = in_doubt(), in_doubt(session="s2")
    seen = {run.pk: last(run, doubtful(run)) for run in (first, second)}
    resume_run(first.pk, user("superuser"))
    cancel_run(second.pk, user("superuser"))
    for run in (first, second):
        with unchanged():
            response = give(run, "not_occurred", "resolver", seq=seen[run.pk])
            says(response, "The call moved on since you looked.", status=409)


def test_what_is_missing_is_said_and_what_was_typed_is_kept(world: World) -> None:
    run = in_doubt()
    html = card(run).html
    areas = [area for area in re.findall(r"<textarea[^>]*>", html) if "cancel" not in area]
    assert [re.findall(r'name="(\w+)"', area)[0] for area in areas] == ["evidence", "result"]
    assert not [area for area in areas if " required" in area], "unknown needs none"
    wrong: list[tuple[str, dict[str, str], str]] = [
        ("occurred", {"evidence": " \n", "result": "sent"}, "Say how you know it"),
        ("not_occurred", {"evidence": ""}, "Say how you know it"),
        ("occurred", {"result": " "}, "Say what the tool should have returned"),
        ("not_occurred", {"evidence": "x" * 2001}, "at most 2000 characters"),
        ("occurred", {"result": "x" * 100_001}, "at most 100000 characters"),
        ("occurred", {"result": "a\x00b"}, "Null characters are not allowed"),
        ("maybe", {}, "Nothing was decided"),
        ("", {}, "Nothing was decided"),
    ]
    with unchanged():
        for verdict, changed, said in wrong:
            typed = {"evidence": "I asked Ann", "result": "sent", **changed}
            response = give(run, verdict, **typed)
            html = response.content.decode()
            assert (response.status_code, said in html) == (400, True), said
            kept = [text for text in typed.values() if text.strip() and "\x00" not in text]
            assert verdict != "occurred" or all(escape(text) in html for text in kept)
        for seen in (0, -1, "", "x", "٣", 10**30):  # of a page that is out of date
            response = give(run, "occurred", seq=seen, result="sent")
            says(response, "The call moved on since you looked.", status=409)
