"""Several runs at once: what is listed, and only that, each by itself, and nothing is driven."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import DatabaseError, connection
from django.urls import reverse

from agentruns import Policy
from agentruns.engine.leases import claim
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.runs.control import cancel_run
from agentruns.services.runs.lifecycle import resume_run
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, read, says, snapshot, unchanged, words
from tests.admin.people import browser, user
from tests.admin.world import TURN, World
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import shop_agent

pytestmark = pytest.mark.django_db(transaction=True)
LIST = reverse("admin:agentruns_run_changelist")


def select(verb: str, *runs: Any, role: str = "superuser", **data: Any) -> Any:
    chosen = {"action": f"{verb}_selected", "_selected_action": [str(run.pk) for run in runs], **data}
    return browser(role).post(LIST, chosen)


def confirm(verb: str, page: Page, *runs: Run, role: str = "superuser", **data: Any) -> Page:
    """Send what a page held."""
    form = {name: value for name, value in page.forms[LIST].items() if name.startswith("seen-")}
    return read(select(verb, *runs, role=role, confirmed="1", **form, **data))


def statuses(*runs: Run) -> list[str]:
    found = Run.objects.in_bulk([run.pk for run in runs])
    return [found[run.pk].status for run in runs]


def test_a_selection_is_listed_then_resumed_and_a_worker_drives(world: World, effects: Effects) -> None:
    runs = [world.paused("a"), world.paused("b"), world.orphaned("c")]
    skipped, other = [world.completed("d"), world.waiting("e").run], world.paused("other")
    acted = effects.count()
    with unchanged():
        page = says(
            select("resume", *runs, *skipped, select_across="1", index="0"),
            "Resume these 3 runs", "The pause ends.",
            "The model is told that the outcome of dies is unknown",
            "Left out: It has ended: completed.", "Left out: It waits for a decision.", "2 are left out",
            "Only what was on the page is acted on: 5.",
        )  # fmt: skip
    assert other.session.key not in page.text
    page = confirm("resume", page, *runs, *skipped, other)
    assert statuses(*runs, other) == ["queued", "queued", "queued", "paused"]
    for text in ("3 were done.", "3 were not.", "Resumed. A worker picks it up.", "It was not on the page."):
        assert text in page.text, text
    assert effects.count() == acted
    assert LogEntry.objects.count() == 3
    assert "Resumed from the console." in LogEntry.objects.latest("pk").get_change_message()
    assert sweep().completed == 3
    assert all(problems(run.session_id) == [] for run in runs)


def test_the_reason_goes_into_the_journal_of_each(world: World) -> None:
    runs = [world.paused("a"), world.queued("b"), world.waiting("c").run]
    page = says(select("cancel", *runs), "The run ends now. It cannot be resumed afterwards.")
    assert "3 were done." in confirm("cancel", page, *runs, reason="the bank is down").text
    assert statuses(*runs) == ["cancelled"] * 3
    rows = [row.payload for row in Message.objects.filter(kind="run_cancel_requested")]
    assert [(row["reason"], row["actor"]["name"]) for row in rows] == [("the bank is down", "superuser")] * 3
    entries = [entry.get_change_message() for entry in LogEntry.objects.all()]
    assert entries == ["Cancel requested in the console. the bank is down"] * 3


def test_pausing_stops_what_is_at_work_however_far_it_came(world: World) -> None:
    live, queued, paused = world.queued("live"), world.queued("queued"), world.paused("paused")
    assert claim("default", live.pk)
    page = says(
        select("pause", live, queued, paused),
        "Pause these 2 runs", "The worker pauses it before its next tool starts.", "The run is paused now.",
        "Left out: It is paused already.",
    )  # fmt: skip
    row = live.messages.latest("seq")
    type(live.session).objects.filter(pk=live.session_id).update(next_seq=row.seq + 1)  # as it was
    page = confirm("pause", page, live, queued, paused, reason="")
    assert "Pause requested." in page.text
    assert "Paused. It goes on when somebody resumes it." in page.text
    assert statuses(live, queued, paused) == ["running", "paused", "paused"]
    assert live.messages.latest("seq").kind == "run_pause_requested"


def test_a_run_that_moved_on_since_it_was_shown_is_skipped(world: World, requests_commit: str) -> None:
    moved, ended, still = world.paused("moved"), world.paused("ended"), world.paused("still")
    page = read(select("resume", moved, ended, still))
    resume_run(moved.pk, drive=False)
    cancel_run(ended.pk)
    before = moved.messages.count()
    page = confirm("resume", page, moved, ended, still)
    assert page.text.count("Skipped: It moved on since you looked.") == 2
    assert "1 was done." in page.text
    assert statuses(moved, ended, still) == ["queued", "cancelled", "queued"]
    assert moved.messages.count() == before


def test_one_that_fails_stops_no_other(
    world: World, requests_commit: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [world.paused("a"), world.paused("b"), world.paused("c")]
    page, failing = read(select("cancel", *runs)), str(runs[1].pk)

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        wanted = {failing, failing.replace("-", "")}
        if sql.startswith('UPDATE "agentruns_run"') and wanted & set(map(str, params or ())):
            raise DatabaseError("disk full")
        return execute(sql, params, many, context)

    with (
        connection.execute_wrapper(fail),
        caplog.at_level(logging.ERROR, logger="agentruns.admin.runs.actions"),
    ):
        page = confirm("cancel", page, *runs, reason="")
    assert "Refused: The database failed; the log says how." in words(page)
    assert failing in caplog.text
    assert statuses(*runs) == ["cancelled", "paused", "cancelled"]
    assert LogEntry.objects.count() == 2
    assert all(problems(run.session_id) == [] for run in runs)


@pytest.mark.parametrize("verb", ["resume", "pause", "cancel"])
def test_who_may(world: World, verb: str) -> None:
    make = world.paused if verb == "resume" else world.queued
    refused, is_pause = make("refused"), verb == "pause"
    for role, may, status in (
        ("anonymous", False, 302), ("outsider", False, 302), ("staff", False, 403), ("viewer", False, 200),
        ("operator", not is_pause, 302 if is_pause else 200), ("superuser", True, 200),
    ):  # fmt: skip
        run = make(role) if may else refused
        before, seen = snapshot(), {f"seen-{run.pk}": str(run.messages.latest("seq").seq)}
        response = select(verb, run, role=role, confirmed="1", reason="no", **seen)
        assert ((snapshot() != before), response.status_code) == (may, status), role
        if may:
            assert Message.objects.latest("pk").payload["actor"]["name"] == role


class ButOne(Policy):
    """Lets nobody adopt for the run of one session."""

    def can(self, user: Any, action: str, obj: Any = None) -> bool:
        is_one = action == "adopt" and obj is not None and obj.session.key == "kept"
        return not is_one and super().can(user, action, obj)


def test_a_selection_adopts_each_by_itself_what_the_page_has_shown(world: World, settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.ButOne"
    runs = [world.blocked(key) for key in ("a", "b", "live", "kept", "moved")]
    same, gone = world.queued("same"), world.queued("gone")
    first, second, live, kept, moved = runs
    assert claim("default", live.pk)
    with isolated_registry():
        for run in runs:
            shop_agent(run.agent, TURN, max_steps=7)
        shop_agent(same.agent, TURN)
        with unchanged():
            page = says(
                select("adopt", *runs, same, gone),
                "Let these runs adopt the present definition?", "Adopt for these 3 runs",
                "The run goes on with version 1. What differs: max_steps.",
                "Left out: A worker that has the old definition is working on it.",
                "Left out: You lack the permission agentruns.adopt_definition.",
                "Left out: Its own definition is registered",
                "Left out: This web server does not know the agent",
            )  # fmt: skip
        assert page.text.count("What differs: max_steps.") == 1, "what is the same for all is said once"
        shop_agent(moved.agent, TURN, max_steps=8)
        page = confirm("adopt", page, *runs, same, gone, reason="a new limit")
    for text in (
        "2 were done.",
        "5 were not.",
        "Adopted. The run now follows",
        "It moved on since you looked.",
    ):
        assert text in page.text, text
    rows = Message.objects.filter(kind="run_adopted")
    assert {(row.run_id, row.payload["reason"]) for row in rows} == {
        (run.pk, "a new limit") for run in (first, second)
    }
    assert LogEntry.objects.count() == 2
    assert all(problems(run.session_id) == [] for run in runs)
    assert "adopt_selected" not in read(browser("viewer").get(LIST)).text
    assert "adopt_selected" in read(browser("superuser").get(LIST)).html
    assert [line.pk for line in (kept, live) if line.messages.filter(kind="run_adopted").exists()] == []


def test_nonsense_too_much_and_an_owner_without_the_permission_change_nothing(world: World) -> None:
    run, client = world.paused(), browser("superuser")
    too_many = [f"00000000-0000-7000-8000-{number:012}" for number in range(101)]
    own = world.waiting(actor=user("viewer")).run
    with unchanged():
        for sent, told in (
            (["nonsense"], "choose from the list"),
            ([str(run.pk), "x"], "choose from the list"),
            (too_many, "Choose at most 100"),
        ):
            data = {"action": "cancel_selected", "_selected_action": sent, "confirmed": "1"}
            says(client.post(LIST, data, follow=True), told)
        seen = read(select("cancel", run)).forms[LIST][f"seen-{run.pk}"]
        data = {f"seen-{run.pk}": seen, "reason": "x" * 2001}
        response = select("cancel", run, confirmed="1", **data)
        says(response, "Nothing was done. Correct the form below.", status=400)
        strict = browser("superuser", enforce_csrf_checks=True)
        assert strict.post(LIST, {"action": "cancel_selected", **data}).status_code == 403
        select("cancel", own, role="viewer", confirmed="1", reason="", **{f"seen-{own.pk}": "3"})
