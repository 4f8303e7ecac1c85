"""Pause, Adopt and Verify chain: whose clicks count, what is said of limits, and of an altered journal."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.template.loader import render_to_string
from django.utils import timezone

from agentruns import Agent, start_run
from agentruns.admin.runs import actions
from agentruns.admin.runs.limits import Drift, adopt, judgement, meters
from agentruns.conf import settings as ours
from agentruns.engine.budgets import exceeded
from agentruns.engine.leases import Lease, claim
from agentruns.engine.loop import drive_run
from agentruns.engine.worker import agent_for
from agentruns.journal.fold import RunState
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session, triggers
from agentruns.providers.names import model_identity
from agentruns.services.runs.control import cancel_run
from agentruns.services.runs.waiting import APPROVAL, ORPHAN, Wait
from agentruns.services.sweep import sweep
from agentruns.testing import DatabaseClock
from tests.admin.pages import look, read, says, snapshot, text, unchanged, url, words
from tests.admin.people import browser
from tests.admin.world import TURN, World, drifted, ran, seen, status
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.rows import change, write_raw
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

PEOPLE = {
    "superuser": {"verify": 200, "adopt": 302, "pause": 302},
    "reader": {"verify": 200, "adopt": 403, "pause": 403},
    "pauser": {"verify": 200, "adopt": 403, "pause": 302},
    "adopter": {"verify": 200, "adopt": 302, "pause": 403},
    "blind": {"verify": 403, "adopt": 403, "pause": 403},
    "customer": {},
    "anonymous": {},
}


def press(run: Run, action: str, **data: Any) -> Any:
    return browser("superuser").post(url(run, action), {"reason": "at night", **data}, follow=True)


@pytest.mark.parametrize("name", PEOPLE)
def test_whose_clicks_count(world: World, name: str) -> None:
    run, client, allowed = drifted(world), browser(name), PEOPLE[name]
    before = snapshot()
    for action in ("verify", "adopt", "pause"):
        if allowed.get("verify") == 200:
            assert client.get(url(run, action)).url == url(run)
        response = client.post(url(run, action), {**seen(run), "reason": "at night"})
        assert response.status_code == allowed.get(action, 302), action
        if not allowed:
            assert response.url.startswith("/admin/login/")
        changed = action != "verify" and allowed.get(action) == 302
        assert (snapshot() != before) == changed, action
        if changed:
            row = run.messages.latest("seq")
            assert (row.payload["actor"]["name"], row.payload["reason"]) == (name, "at night")
            assert LogEntry.objects.get().object_id == str(run.pk)
            LogEntry.objects.all().delete()
        assert LogEntry.objects.count() == 0
        before = snapshot()
    assert status(run) == ("paused" if allowed.get("pause") == 302 else "queued")


def test_an_ended_run_stays_as_it_is(world: World) -> None:
    done, told = world.completed(), "Nothing was changed. It has ended: completed."
    with unchanged():
        for action in ("adopt", "pause"):
            response = press(done, action, hash="0" * 64, seq=done.messages.latest("seq").seq)
            says(response, told, status=409)
        assert press(done, "pause", reason="x" * 2001).status_code == 409
    assert not {url(done, verb) for verb in ("resume", "pause", "cancel")} & set(look(done).forms)


def test_a_pause_waits_for_the_worker_and_ends_with_resume(world: World, effects: Effects) -> None:
    run = world.queued()
    lease = claim("default", run.pk)
    assert isinstance(lease, Lease)
    told = "The worker pauses it before its next tool starts."
    assert told in look(run).text
    says(press(run, "pause"), f"Pause requested. {told}", "superuser asked", "It is being paused.")
    with unchanged():
        assert press(run, "pause").status_code == 409
    run.refresh_from_db()
    drive_run(run, agent_for(run, "default"), lease)
    assert (status(run), effects.count()) == ("paused", 0)
    assert "It is paused already." in look(run).text
    assert press(run, "pause").status_code == 409
    press(run, "resume", seq=run.messages.latest("seq").seq)
    assert url(run, "pause") in look(run).forms
    says(press(run, "pause"), "Paused. It goes on when somebody resumes it.")
    cancel_run(run.pk, None)
    assert press(run, "pause").status_code == 409


def test_verify_says_up_to_which_head_all_is_intact_and_names_an_altered_row(world: World) -> None:
    run = world.completed()
    session, rows = Session.objects.get(pk=run.session_id), run.messages.count()
    with unchanged():
        told = f"The journal of this session is intact: all {rows} rows"
        shown = says(press(run, "verify"), told, session.head)
        assert f"Headrow {rows}" in "".join(shown.text.split("\n")).replace("  ", "")
        assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d", shown.text.split("Checked")[1])
    assert LogEntry.objects.count() == 0
    Run.objects.filter(pk=run.pk).update(step=99)
    told = "The journal itself is intact, but runs or approvals are not shown as it says:"
    says(press(run, "verify"), told, "step is '99', the journal says '2'.")
    row = run.messages.get(kind="tool_result")
    with triggers.lifted(connection):
        change(row, content="nothing\u202e happened")
    shown = says(press(run, "verify"), f"seq {row.seq} (tool_result) was altered.")
    assert url(run, "row", row.seq) in shown.links
    assert "was altered" not in look(run).text, "only who asks is told"


def columns() -> Any:
    """Return what a page could have changed, without what cannot be read."""
    rows = Message.objects.order_by("pk").values_list("pk", "seq", "hash")
    return list(rows), list(Run.objects.order_by("pk").values())


@pytest.mark.parametrize("damage", ["{", "[]", ""])
def test_the_page_opens_when_the_journal_cannot_be_read(world: World, damage: str) -> None:
    run = world.orphaned()
    row = run.messages.get(kind="orphan_found")
    write_raw("agentruns_message", "facts", damage, "id", row.pk)
    before = columns()
    says(browser("superuser").get(url(run)), "post it", "Its journal cannot be read.")
    shown = read(press(run, "verify"))
    assert f"seq {row.seq} (orphan_found) was altered." in shown.text
    assert url(run, "row", row.seq) in shown.links
    raw = browser("superuser").get(url(run, "row", row.seq))
    assert (raw.status_code, "orphan_found" in raw.content.decode()) == (200, True)
    last = run.messages.order_by("-seq").values_list("seq", flat=True)[0]
    for action in ("resume", "pause", "cancel"):
        assert press(run, action, seq=last).status_code == 409, action
    assert columns() == before
    assert problems(run.session_id) == [f"Session orphaned: seq {row.seq} (orphan_found) was altered."]


BUDGETS = {"max_steps": 10, "token_budget": 1000, "cost_budget": "2.5", "deadline": 3600.0}


@pytest.mark.parametrize(
    ("step", "tokens", "cost", "seconds", "percents"),
    [
        (0, 0, "0", 0, [0, 0, 0, 0]),
        (3, 999, "2.4999", 3599, [30, 99, 99, 99]),
        (10, 0, "0", 0, [100, 0, 0, 0]),
        (1, 1000, "0.1", 60, [10, 100, 4, 1]),
        (1, 10, "2.5", 60, [10, 1, 100, 1]),
        (1, 10, "0.1", 7200, [10, 1, 4, 100]),
        (1, 10, "0.1", -5, [10, 1, 4, 0]),
    ],
)
def test_the_meters_judge_as_the_engine_does(
    step: int, tokens: int, cost: str, seconds: float, percents: list[int]
) -> None:
    usage = {"input_tokens": tokens, "other": 5, "cost": cost}
    spent = timedelta(seconds=seconds)
    found = meters(BUDGETS, step, usage, spent)
    assert [each.percent for each in found] == percents
    state = RunState(run_id=None, step=step, usage=usage)  # type: ignore[arg-type]
    now = datetime.now(UTC)
    state.started_at = now - spent
    error = exceeded(BUDGETS, state, lambda: now)
    used_up = [each.name for each in found if each.is_used_up]
    assert used_up[:1] == ([error.name] if error else [])
    assert judgement(found, ended=False).startswith("Used up: ") == bool(error)
    if error:
        stopped = judgement(found, ended=True, error=f"BudgetExceededError: {error}")
        assert stopped.startswith("It was stopped by this limit: ")
    assert judgement(found, ended=True, error="ValueError: max_steps") == ""


def test_a_budget_is_raised_on_the_page_of_the_run_that_it_pauses(world: World, effects: Effects) -> None:
    limits = {"max_steps": 1, "deadline": timedelta(hours=1)}
    run = ran("spender", {"tools": [call("post", text="x")]}, **limits)
    shown = look(
        run,
        "a budget is used up. It goes on when somebody raises it.",
        "Model replies, new limit (now 1 of 1)",
    )
    lacks = "It goes on when somebody raises it. You lack the permission agentruns.raise_budget."
    assert lacks in words(look(run, role="operator"))
    assert "You lack" not in shown.text
    assert {"max_steps", "deadline", "reason"} <= shown.forms[url(run, "raise")].keys()
    assert not {"token_budget", "cost_budget"} & shown.forms[url(run, "raise")].keys()
    assert "The run is paused again at once, unless its budget was raised." in shown.text
    assert url(run, "raise") not in look(run, role="reader").forms
    with unchanged():
        assert browser("reader").post(url(run, "raise"), {"max_steps": "9"}).status_code == 403
        says(press(run, "raise", max_steps="1"), "max_steps: 1 of 1 replies used. Give a limit", status=409)
        says(press(run, "raise", max_steps="x"), "Enter a whole number", status=409)
        says(press(run, "raise"), "Name one of these to raise it.", status=409)
    says(press(run, "raise", max_steps="9", deadline="120"), "The budget is raised.", "at night", "1 of 9")
    assert LogEntry.objects.filter(change_message__contains="Budget raised").exists()
    assert status(run) == "queued"
    assert url(run, "raise") in look(run, "new limit in minutes").forms, (
        "among the limits of a run that goes on"
    )
    sweep()
    assert (status(run), effects.count()) == ("completed", 1)
    assert url(run, "raise") not in look(run, "Budget raised").forms
    with unchanged():
        says(press(run, "raise", max_steps="10"), "It has ended: completed.", status=409)


def test_the_page_shows_how_much_of_each_budget_is_used(
    world: World, settings: Any, database_clock: DatabaseClock
) -> None:
    usage = {"input_tokens": 1500, "output_tokens": 500}
    turn = {"tools": [call("refund", cents=5000)], "usage": usage}
    model = shop_agent("priced", turn).model
    settings.AGENTRUNS_PRICES = {model_identity(model): {"input": 300, "output": 300}}
    limits = {"max_steps": 4, "token_budget": 10_000, "cost_budget": 1, "deadline": timedelta(hours=2)}
    run = ran("priced", turn, **limits)
    database_clock.forward(hours=5)  # it waits for a person: that is free
    shown = look(run)
    assert 'aria-valuenow="60" aria-valuetext="0.6 of 1"' in shown.html
    with isolated_registry():
        unknown = look(run)
    assert "This web server does not know agent priced" in unknown.text
    for page in (shown, unknown):
        for said in (
            "Model replies 1 of 4",
            "Tokens 2,000 of 10,000",
            "Cost 0.6 of 1",
            "Time, without waiting for people 0 s of 2 h",
            "Closest limit: Cost, 60 % used.",
        ):
            assert said in words(page).replace("\xa0", " ")
    Run.objects.filter(pk=run.pk).update(step=4)
    assert "Used up: Model replies. No further request is made to the model." in look(run).text
    run = ran("spender", TURN, session="s2", max_steps=1, on_budget="fail")
    look(run, "It was stopped by this limit: Model replies.", "No limit is set for: tokens, cost, time.")
    shop_agent("spender", TURN, max_steps=9)
    assert "Another definition" not in text(run), "of a run that has ended"


def test_what_was_adopted_is_what_was_shown(world: World) -> None:
    run = drifted(world)
    assert sweep().blocked == 1
    shown = look(run)
    assert shown.cells("ar-drift") == [["max_steps", "50", "7"]]
    assert "Workers that know only the new one leave the run alone." in shown.text
    assert "#ar-definition" in shown.links
    form = shown.forms[url(run, "adopt")]
    assert {name: form[name] for name in ("hash", "seq")} == {k: str(v) for k, v in seen(run).items()}
    shop_agent(run.agent, TURN, max_steps=8)  # deployed meanwhile
    with unchanged():
        for stale in (form, {**seen(run), "seq": 1}, {"hash": seen(run)["hash"]}, {"hash": "", "seq": "x"}):
            says(press(run, "adopt", **stale), "since you looked. This is how it is now.", status=409)
    old, fresh = run.definition_id, look(run).forms[url(run, "adopt")]
    says(press(run, "adopt", **fresh), "Adopted. The run now follows the definition of version 1.")
    row = run.messages.get(kind="run_adopted").payload
    assert (row["old"], row["new"], row["actor"]["name"]) == (old, fresh["hash"], "superuser")
    assert url(run, "adopt") not in look(run).forms
    assert press(run, "adopt", **fresh).status_code == 409, "a double click"
    assert sweep().completed == 1
    live = drifted(world)
    assert claim("default", live.pk)
    assert "Pause it first." in look(live).text
    with unchanged():
        assert press(live, "adopt", **seen(live)).status_code == 409


def test_a_version_that_is_still_served_just_goes_on(world: World) -> None:
    with isolated_registry():
        run = start_run(shop_agent("two", TURN), "do it", "s1")
        shop_agent("two", TURN, version="2", max_steps=7)
        shown = look(run, "Version 1, which this run was started with, is still registered as it was")
        assert shown.cells("ar-drift") == [["max_steps", "50", "7"], ["version", "1", "2"]]
        assert url(run, "adopt") not in shown.forms
        assert press(run, "adopt", **seen(run)).status_code == 409
    with isolated_registry():
        form = {"hash": "", "seq": run.messages.latest("seq").seq}
        assert press(run, "adopt", **form).status_code == 409, "unknown"
        shop_agent("two", TURN, version="2", max_steps=7)
        shown = look(run)
        told = "Version 1 of two, which the run follows, is not registered here any more; version 2 is."
        assert told in shown.text
        press(run, "adopt", **shown.forms[url(run, "adopt")])
        run.refresh_from_db()
        assert run.version == "2"


def test_long_and_hostile_parts_are_cut_around_what_differs(world: World) -> None:
    model = shop_agent("model").model
    start, rule = "Be kind. " * 300, "<script>alert(1)</script>\u202eNever refund."
    run = start_run(Agent("long", instructions=start, tools=TOOLS, model=model), "do it", "s1")
    Agent("long", instructions=start + rule, tools=TOOLS[1:], model=model)
    (name, before, now), (tool, policy, gone) = look(run).cells("ar-drift")
    assert (name, tool, gone) == ("instructions", "tools.post (removed)", "not there")
    assert before.startswith("…")
    assert "Show all of it: 2700 characters" in before
    first, rest = now.split("Show all of it:")
    assert first.startswith("…")
    assert "<script>alert(1)</script>U+202ENever refund." in first
    assert start in rest
    assert '"description"' in policy


def situation(status: str, lease_expires_at: Any = None, **known: Any) -> actions.Situation:
    """Describe a run that is stored nowhere, and asks no database for its times."""
    run = Run(status=status, created_at=None, updated_at=None, lease_expires_at=lease_expires_at)
    return actions.Situation(**{"run": run, "waits": [], **known})


def rendered(template: str, stands: actions.Situation, **context: str) -> str:
    return render_to_string(f"agentruns/admin/{template}.html", {"situation": stands, **context})


@pytest.mark.parametrize(("leases", "offered"), [(0.5, False), (1.5, True)])
def test_a_second_cancel_is_offered_after_a_lease(leases: float, offered: bool) -> None:
    now = timezone.now()
    asked = ("ann", now - timedelta(seconds=ours.LEASE_SECONDS * leases))
    live = now + timedelta(seconds=30)
    stands = situation("running", live, cancel_requested=asked, may=["cancel"])
    assert (not actions.cancel(stands).why_not) == offered
    assert ("kept as evidence" in rendered("run_effects", stands, verb="cancel")) == offered


def test_notes_name_each_call_in_doubt_and_what_is_left_to_do_after_the_end() -> None:
    run = UUID(int=2)
    doubts = [
        Wait(kind=ORPHAN, run_id=run, call_id=name, tool=name, attempt=1, text="It died.") for name in "ab"
    ]
    other = Wait(kind=APPROVAL, run_id=run, approval_id=UUID(int=1), call_id="c")
    notes = rendered("run_notes", situation("orphaned", waits=[*doubts, other]))
    assert re.findall("<p>(.{20})", re.sub("[\u2066-\u2069]", "", notes)) == [
        "a, attempt 1: It die",
        "b, attempt 1: It die",
    ]
    for ended, uncleared, said in (
        ("completed", 0, "Completed. It waits for nobody."),
        ("completed", 1, "Completed. Somebody still has to say what became of a call:"),
        ("cancelled", 2, "Cancelled. Somebody still has to say what became of 2 calls:"),
    ):
        assert actions.headline(situation(ended, uncleared=uncleared)) == said


def test_why_a_run_cannot_be_paused_and_that_adopting_ends_no_pause() -> None:
    for stands, known, why in (
        ("paused", {"is_paused": True}, "It is paused already."),
        ("orphaned", {"is_paused": True}, "It is paused already."),
        ("failed", {}, "It has ended: failed."),
        ("paused", {"cancel_requested": ("ann", timezone.now())}, "It is being cancelled."),
        ("paused", {"may": []}, "You lack the permission agentruns.pause_run."),
        ("paused", {}, ""),
    ):
        action = actions.pause(situation(stands, **{"may": ["pause"], **known}))
        assert (action.why_not, action.forbidden) == (why, known.get("may") == [])
    stands = situation("paused", is_paused=True, drift=Drift(None, is_served=False, parts=[]))
    assert "It stays paused until somebody resumes it." in rendered("run_effects", stands, verb="adopt")
    assert adopt(stands).why_not == "This web server does not know the agent: there is nothing to adopt."
