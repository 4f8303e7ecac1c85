"""The run page: where a run stands, what to do about it, and the two buttons."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from agentruns import approve, run_agent, start_run
from agentruns.admin.runs.page import journal_rows
from agentruns.engine.leases import claim
from agentruns.models import Control, Run
from agentruns.providers.names import model_identity
from agentruns.services.control import cancel_run
from agentruns.services.sweep import sweep
from tests.admin.pages import page, read, snapshot, url
from tests.admin.people import browser, user
from tests.admin.world import ONCE, World, status
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("requests_commit")]


def press(run: Run, action: str, seen: int | None = None, **data: Any) -> Any:
    last = run.messages.order_by("-seq").first().seq
    data = {"seq": last if seen is None else seen, "reason": "at night", **data}
    return browser("superuser").post(url(run, action), data, follow=True)


@ONCE
def test_a_completed_run_has_nothing_to_do(world: World) -> None:
    run = world.completed()
    shown = page(run)
    assert "Completed. It waits for nobody." in shown.text
    assert shown.disabled == []
    for gone in ("Resume", "Pause", "Cancel the run", "It has ended"):
        assert gone not in shown.text
    for words in ("Run started", "Task given", "Model asked for 1 call", "Tool started", "Tool finished"):
        assert words in shown.text
    assert (
        shown.text.rindex("Task given")
        < shown.text.rindex("Tool started")
        < shown.text.rindex("Tool finished")
    )
    before = snapshot()
    for action in ("resume", "cancel"):
        response = press(run, action)
        assert response.status_code == 409
        assert "Nothing was changed." in read(response).text
        assert "completed" in read(response).text
    assert snapshot() == before


@ONCE
def test_the_cost_stands_beside_the_tokens(world: World, settings: Any) -> None:
    agent = shop_agent("priced", {"text": "done", "usage": {"input_tokens": 10, "output_tokens": 5}})
    settings.AGENTRUNS_PRICES = {model_identity(agent.model): {"input": 3, "output": 15}}
    run = Run.objects.get(pk=run_agent(agent, "do it", "s1", idempotency_key="k").run_id)
    assert "Tokensinput_tokens 10, output_tokens 5Cost0.000105" in page(run).text
    Run.objects.filter(pk=run.pk).update(usage={})
    assert "Tokens-Cost-" in page(run).text


def test_resuming_a_paused_run_queues_it(world: World, effects: Effects) -> None:
    run = world.paused()
    shown = page(run)
    assert "Paused: the bank is down" in shown.text
    assert "The pause ends." in shown.text
    shown = read(press(run, "resume"))
    assert "Resumed. A worker picks it up." in shown.text
    assert (status(run), effects.count()) == ("queued", 0)
    assert run.messages.get(kind="run_resumed").payload["actor"]["name"] == "superuser"
    assert sweep().completed == 1


def test_resuming_an_orphan_tells_the_model_and_says_so_before(world: World) -> None:
    run = world.orphaned()
    shown = page(run)
    assert "nobody knows whether a call happened" in shown.text
    assert "dies, attempt 1: MemoryError inside the tool. It happened once or not at all." in shown.text
    assert "The model is told that the outcome of dies is unknown, and decides what to do." in shown.text
    press(run, "resume")
    assert status(run) == "queued"
    result = run.messages.get(kind="tool_result")
    assert (result.payload["outcome"], result.payload["actor"]["name"]) == ("unknown", "superuser")
    assert sweep().completed == 1


def test_a_click_on_what_moved_on_meanwhile_changes_nothing(world: World) -> None:
    run = world.orphaned()
    seen = run.messages.order_by("-seq").first().seq - 1
    before = snapshot()
    for stale in (seen, 0, "", "x"):
        response = press(run, "resume", stale)
        assert response.status_code == 409
        assert "The run moved on since you looked." in read(response).text
    assert snapshot() == before


def test_a_double_click_on_resume_is_one_resume(world: World) -> None:
    run = world.paused()
    seen = run.messages.order_by("-seq").first().seq
    assert press(run, "resume", seen).status_code == 200
    assert press(run, "resume", seen).status_code == 409
    assert run.messages.filter(kind="run_resumed").count() == 1


def test_a_run_that_waits_for_approval_is_not_resumed_but_decided(world: World) -> None:
    approval = world.waiting()
    shown = page(approval.run)
    assert f"Waits for approval: {approval.title}" in shown.text
    assert url(approval) in shown.links
    assert url(approval.run, "resume") not in shown.forms
    before = snapshot()
    response = press(approval.run, "resume")
    assert response.status_code == 409
    assert "Approve or deny, and it goes on by itself." in read(response).text
    assert snapshot() == before


def test_a_live_run_is_not_resumed_and_is_asked_to_stop(world: World) -> None:
    run = world.queued()
    assert claim("default", run.pk)
    run.refresh_from_db()
    shown = page(run)
    assert "A worker is working on it." in shown.text
    assert "A worker is working on it, until" in read(press(run, "resume")).text
    shown = read(press(run, "cancel"))
    assert "Cancel requested. The worker stops before its next tool starts." in shown.text
    assert "superuser asked" in shown.text
    assert status(run) == "running"
    assert not {url(run, verb) for verb in ("resume", "pause", "cancel")} & shown.forms.keys()


def test_a_run_whose_worker_is_silent_can_be_resumed(world: World) -> None:
    run = world.queued()
    assert claim("default", run.pk)
    Run.objects.filter(pk=run.pk).update(lease_expires_at=timezone.now() - timedelta(minutes=7))
    shown = page(run)
    assert "Its worker has fallen silent." in shown.text
    assert "silent since" in shown.text
    assert "No worker has ever been seen here." in shown.text
    assert "If its worker was inside a tool, that call is repeated where the tool says" in shown.text
    assert press(run, "resume").status_code == 200
    assert status(run) == "queued"


def test_a_back_off_can_be_ended(world: World) -> None:
    run = world.queued()
    Run.objects.filter(pk=run.pk).update(not_before=timezone.now() + timedelta(minutes=4, seconds=30))
    shown = page(run)
    assert "The model failed; next attempt in 4\xa0minutes" in shown.text
    assert "The wait for the next attempt ends" in shown.text
    assert press(run, "resume").status_code == 200
    run.refresh_from_db()
    assert (run.status, run.not_before) == ("queued", None)


@ONCE
def test_when_a_run_was_started_stands_below_its_title(world: World) -> None:  # in Chicago
    run = world.queued()
    for started, steps, said in (
        (datetime(2025, 2, 3, 4, 5, tzinfo=UTC), 1, "started 2 Feb 2025, 22:05 1 reply"),
        (datetime(2026, 11, 30, 23, 59, tzinfo=UTC), 2, "started 30 Nov 2026, 17:59 2 replies"),
    ):
        Run.objects.filter(pk=run.pk).update(created_at=started, step=steps)
        assert said in " ".join(page(run).text.split())


@ONCE
def test_a_queued_run_says_whether_anybody_works(world: World) -> None:
    run = world.queued()
    assert "No worker has ever been seen here." in page(run).text
    Control.objects.create(name="resume_runs", seen_at=timezone.now() - timedelta(hours=2))
    assert "A worker was last seen 2\xa0hours ago." in page(run).text
    Control.objects.update(seen_at=timezone.now())
    assert "sweep" not in page(run).text
    assert press(run, "resume").status_code == 409


def test_cancelling_ends_a_run_that_nobody_drives(world: World) -> None:
    approval = world.waiting()
    shown = read(press(approval.run, "cancel", reason="She called it off."))
    assert "Cancelled." in shown.text
    assert "She called it off." in shown.text
    assert status(approval.run) == "cancelled"
    approval.refresh_from_db()
    assert approval.status == "cancelled"


def test_a_reason_that_is_too_long_is_refused_in_words(world: World) -> None:
    run, before = world.queued(), snapshot()
    response = press(run, "cancel", reason="x" * 2001)
    assert response.status_code == 409
    assert "at most 2000 characters" in read(response).text
    assert snapshot() == before


@ONCE
def test_a_failed_run_says_why(world: World) -> None:
    agent = shop_agent("spender", {"tools": [call("post", text="x")]}, max_steps=1)
    run = Run.objects.get(pk=run_agent(agent, "spend", "failed").run_id)
    shown = page(run)
    assert "Failed: max_steps: 1 of 1 replies used. (BudgetExceededError)" in shown.text
    assert f"/admin/agentruns/run/start/?agent=spender&task={run.pk}" in shown.links
    shop_agent("spender", {"text": "x"}, starters=None)
    assert "/start/" not in "".join(page(run, "viewer").links), "who may not start it"


@ONCE
def test_a_run_that_is_not_served_here_says_so(world: World) -> None:
    run = world.queued()
    Run.objects.filter(pk=run.pk).update(blocked_reason="Run cannot go on here: <no agent>")
    assert "Why it is blocked" in page(run).text
    assert "Run cannot go on here: <no agent>" in page(run).text


@ONCE
def test_the_journal_says_who_decided(world: World) -> None:
    approval = world.waiting(actor=user("decider"))
    approve(approval.pk, user("superuser"), digest=approval.digest, reason="Looks right.")
    sweep()
    shown = page(approval.run, query="?rows=full")
    for words in ("A person is asked", "Approved", "Looks right.", "superuser ·", "Open the approval"):
        assert words in shown.text
    assert url(approval) in shown.links


@ONCE
def test_the_journal_comes_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.admin.runs.page.journal_rows.__defaults__", (4,))
    run = world.completed()  # seven rows
    latest = page(run)
    assert "Rows 4 to 7" in latest.text
    assert "?after=0#ar-journal" in latest.links
    first = page(run, query="?after=0")
    assert "Rows 1 to 4" in first.text
    assert "?after=4#ar-journal" in first.links
    assert "?after=3#ar-journal" in first.links
    assert "Rows 5 to 7" in page(run, query="?after=4").text
    for odd in ("-1", "x", "9" * 30, "²"):
        assert "Rows 4 to 7" in page(run, query=f"?after={odd}").text
    assert "Steps, and what each took" in page(run, query="?after=99999").text
    kept = "_changelist_filters=status%3Dcompleted"
    filtered = page(run, query=f"?{kept}")
    assert f"?{kept}&after=0" in filtered.links, "Earlier in this run"


@ONCE
def test_a_page_takes_the_few_rows_that_are_left_over() -> None:
    turns = [{"tools": [call("post", text=str(one))]} for one in range(6)]
    run = Run.objects.get(pk=run_agent(shop_agent("longer", *turns, {"text": "done"}), "do it", "s1").run_id)
    assert run.messages.count() == 22
    for size, after, first, last, earlier, later in (
        (20, None, 1, 22, None, None),  # two are left over, a tenth
        (19, None, 4, 22, 0, None),
        (19, 0, 1, 19, None, 19),
        (19, 2, 3, 22, 0, None),
    ):
        found = journal_rows("default", run.pk, after, size)
        assert (found.rows[0].seq, found.rows[-1].seq) == (first, last), size
        assert (found.earlier, found.later) == (earlier, later), size


@ONCE
def test_a_long_result_is_cut_with_a_way_to_all_of_it(world: World) -> None:
    from agentruns import tool

    @tool
    def long() -> str:
        """Return a lot."""
        return "begin " + "x" * 50_000 + " end"

    agent = shop_agent("long", {"tools": [call("long")]}, tools=[long])
    run = Run.objects.get(pk=run_agent(agent, "go", "long").run_id)
    shown = page(run, query="?rows=full")
    row = run.messages.get(kind="tool_result")
    assert "Show all of it: 46010 characters more" in shown.text
    assert url(run, "row", row.seq) in shown.links
    whole = browser("superuser").get(url(run, "row", row.seq))
    assert whole["Content-Type"] == "text/plain; charset=utf-8"
    assert whole["X-Content-Type-Options"] == "nosniff"
    assert "x" * 50_000 + " end" in whole.content.decode()


@ONCE
def test_sensitive_arguments_are_masked_on_the_run_and_shown_on_the_card(world: World) -> None:
    from agentruns import tool

    @tool(requires_approval=True, sensitive=["token"])
    def charge_card(token: str, cents: int) -> str:
        """Charge."""
        return "charged"

    agent = shop_agent(
        "secret", {"tools": [call("charge_card", token="tok_42", cents=7)]}, tools=[charge_card]
    )
    approval = run_agent(agent, "charge", "secret").pending[0]
    client = browser("superuser")
    assert "tok_42" in read(client.post(url(approval, "reveal"))).text
    assert "tok_42" not in read(client.get(url(approval.run))).text
    for row in approval.run.messages.all():
        assert "tok_42" not in client.get(url(approval.run, "row", row.seq)).content.decode()


def test_a_cancel_that_raced_the_end_of_the_run_is_told(world: World) -> None:
    run = world.queued()
    cancel_run(run.pk, None)
    response = press(run, "cancel")
    assert response.status_code == 409
    assert "cancelled" in read(response).text


@ONCE
def test_two_runs_of_a_session_keep_their_rows_apart(world: World) -> None:
    first = world.completed("shared")
    agent = shop_agent("second", {"tools": [call("post", text="second")]})
    second = start_run(agent, "the second task", "shared")
    assert "the second task" not in page(first).text
    assert "Model asked" not in page(second).text
