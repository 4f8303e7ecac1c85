"""The run page: where a run stands, what to do about it, and the two buttons."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import override_settings
from django.utils import timezone

from agentruns import approve, run_agent, start_run, tool
from agentruns.admin.runs.page import journal_rows
from agentruns.engine.leases import claim
from agentruns.models import Control, Run
from agentruns.providers.names import model_identity
from agentruns.services.runs.control import cancel_run
from agentruns.services.sweep import sweep
from tests.admin.pages import listed, look, says, unchanged, url, words
from tests.admin.people import browser, user
from tests.admin.world import World, ran, status
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)
BUTTONS = ("resume", "pause", "cancel")


def press(run: Run, action: str, seen: object = None, **data: Any) -> Any:
    last = run.messages.latest("seq").seq
    data = {"seq": last if seen is None else seen, "reason": "at night", **data}
    return browser("superuser").post(url(run, action), data, follow=True)


def held(world: World) -> Run:
    """Make a run that a worker holds."""
    run = world.queued()
    assert claim("default", run.pk)
    run.refresh_from_db()
    return run


def test_a_completed_run_has_nothing_to_do(world: World) -> None:
    run = world.completed()
    page = look(run, "Completed. It waits for nobody.", "Run started", "Model asked for 1 call")
    assert page.disabled == []
    for gone in ("Resume", "Pause", "Cancel the run", "It has ended"):
        assert gone not in page.text
    places = [page.text.rindex(text) for text in ("Task given", "Tool started", "Tool finished")]
    assert places == sorted(places)
    second = start_run(shop_agent("second", {"tools": []}), "the second task", run.session.key)
    assert "the second task" not in look(run).text, "each has its own rows"
    assert "Model asked" not in look(second).text
    with unchanged():
        for action in ("resume", "cancel"):
            says(press(run, action), "Nothing was changed.", "completed", status=409)


def test_a_queued_run_says_why_it_waits_for_its_turn(world: World, settings: Any) -> None:
    first, second = world.queued("first"), world.queued("second")
    look(first, "It is queued: the next free worker takes it.")
    look(second, "Waits for its turn: 1 before it.")
    assert "Waits for its turn: 1 before it." in listed("run").text
    shop_agent(second.agent, max_concurrent=1)
    assert claim("default", start_run(second.agent, "x", "third").pk, second.agent)
    look(second, "Waits for its turn: the agent's limit of 1 runs at once is reached.")
    settings.AGENTRUNS_RATE = {"ScriptedModel": "1/d"}
    assert run_agent(first.agent, "x", "fourth").status == "queued"
    reason = "Waits for its turn: ScriptedModel is limited to 1/d."
    look(Run.objects.get(session__key="fourth"), reason)
    look(first, reason)
    assert reason in listed("run").text


def test_below_the_title_stand_the_start_the_cost_and_the_tokens(world: World, settings: Any) -> None:
    turn = {"text": "done", "usage": {"input_tokens": 10, "output_tokens": 5}}
    model = shop_agent("priced", turn).model
    settings.AGENTRUNS_PRICES = {model_identity(model): {"input": 3, "output": 15}}
    run = ran("priced", turn)
    look(run, "Tokensinput_tokens 10, output_tokens 5Cost0.000105")
    Run.objects.filter(pk=run.pk).update(usage={})
    look(run, "Tokens-Cost-")
    run = world.queued()
    for started, steps, said in (  # in Chicago
        (datetime(2025, 2, 3, 4, 5, tzinfo=UTC), 1, "started 2 Feb 2025, 22:05 1 reply"),
        (datetime(2026, 11, 30, 23, 59, tzinfo=UTC), 2, "started 30 Nov 2026, 17:59 2 replies"),
    ):
        Run.objects.filter(pk=run.pk).update(created_at=started, step=steps)
        assert said in words(look(run))


def test_resuming_a_paused_run_queues_it_once(world: World, effects: Effects) -> None:
    run = world.paused()
    seen = run.messages.latest("seq").seq
    look(run, "Paused: the bank is down", "The pause ends.")
    says(press(run, "resume", seen), "Resumed. A worker picks it up.")
    assert press(run, "resume", seen).status_code == 409, "a double click"
    assert (status(run), effects.count()) == ("queued", 0)
    assert run.messages.get(kind="run_resumed").payload["actor"]["name"] == "superuser"
    assert sweep().completed == 1


def test_resuming_an_orphan_tells_the_model_and_says_so_before(world: World, requests_commit: str) -> None:
    run = world.orphaned()
    look(
        run,
        "nobody knows whether a call happened",
        "dies, attempt 1: MemoryError inside the tool. It happened once or not at all.",
        "The model is told that the outcome of dies is unknown, and decides what to do.",
    )
    with unchanged():
        for stale in (run.messages.latest("seq").seq - 1, 0, "", "x"):
            says(press(run, "resume", stale), "The run moved on since you looked.", status=409)
    press(run, "resume")
    assert status(run) == "queued"
    result = run.messages.get(kind="tool_result")
    assert (result.payload["outcome"], result.payload["actor"]["name"]) == ("unknown", "superuser")
    assert sweep().completed == 1


def test_a_run_that_waits_for_approval_is_not_resumed_but_decided(world: World) -> None:
    approval = world.waiting()
    page = look(approval.run, f"Waits for approval: {approval.title}")
    assert url(approval) in page.links
    assert url(approval.run, "resume") not in page.forms
    with unchanged():
        told = "Approve or deny, and it goes on by itself."
        says(press(approval.run, "resume"), told, status=409)


def test_a_live_run_is_not_resumed_and_is_asked_to_stop(world: World) -> None:
    run = held(world)
    look(run, "A worker is working on it.")
    says(press(run, "resume"), "A worker is working on it, until", status=409)
    told = "Cancel requested. The worker stops before its next tool starts."
    page = says(press(run, "cancel"), told, "superuser asked")
    assert status(run) == "running"
    assert not {url(run, verb) for verb in BUTTONS} & page.forms.keys()


def test_a_run_whose_worker_is_silent_can_be_resumed_and_a_back_off_ended(world: World) -> None:
    run = held(world)
    assert "stalled" not in look(run).text
    over = timezone.now() - timedelta(minutes=6, seconds=30)
    Run.objects.filter(pk=run.pk).update(lease_expires_at=over)  # a lease is a minute
    page = look(
        run,
        "silent since",
        "No worker has ever been seen here.",
        "If its worker was inside a tool, that call is repeated where the tool says",
    )
    assert "stalled Its worker has fallen silent." in words(page)
    assert re.search("\\([78]\xa0minutes ago\\)", page.text.split("Worker last heard")[1])
    assert press(run, "resume").status_code == 200
    assert status(run) == "queued"
    Run.objects.filter(pk=run.pk).update(not_before=timezone.now() + timedelta(hours=4, minutes=30))
    look(run, "The model failed; next attempt in 4\xa0hours", "The wait for the next attempt ends")
    assert press(run, "resume").status_code == 200
    run.refresh_from_db()
    assert (run.status, run.not_before) == ("queued", None)


def test_a_queued_run_says_whether_anybody_works_and_why_it_is_blocked(world: World) -> None:
    run = world.queued()
    look(run, "No worker has ever been seen here.")
    Control.objects.create(name="resume_runs", seen_at=timezone.now() - timedelta(hours=2))
    look(run, "A worker was last seen 2\xa0hours ago.")
    Control.objects.update(seen_at=timezone.now())
    assert "sweep" not in look(run).text
    assert press(run, "resume").status_code == 409
    Run.objects.filter(pk=run.pk).update(blocked_reason="Run cannot go on here: <no agent>")
    look(run, "Why it is blocked", "Run cannot go on here: <no agent>")


def test_cancelling_ends_a_run_that_nobody_drives(world: World, requests_commit: str) -> None:
    approval, raced = world.waiting(), world.queued()
    with unchanged():
        says(press(raced, "cancel", reason="x" * 2001), "at most 2000 characters", status=409)
    says(press(approval.run, "cancel", reason="She called it off."), "Cancelled.", "She called it off.")
    assert status(approval.run) == "cancelled"
    approval.refresh_from_db()
    assert approval.status == "cancelled"
    cancel_run(raced.pk, None)
    says(press(raced, "cancel"), "cancelled", status=409)


def test_a_failed_run_says_why(world: World) -> None:
    turn = {"tools": [call("post", text="x")]}
    run = ran("spender", turn, max_steps=1, on_budget="fail")
    page = look(run, "Failed: max_steps: 1 of 1 replies used. (BudgetExceededError)")
    assert f"/admin/agentruns/run/start/?agent=spender&task={run.pk}" in page.links
    shop_agent("spender", {"text": "x"}, starters=None)
    assert "/start/" not in "".join(look(run, role="viewer").links), "who may not start it"


def test_the_journal_says_who_decided(world: World) -> None:
    approval = world.waiting(actor=user("decider"))
    approve(approval.pk, user("superuser"), digest=approval.digest, reason="Looks right.")
    sweep()
    told = ("A person is asked", "Approved", "Looks right.", "superuser ·", "Open the approval")
    assert url(approval) in look(approval.run, *told, query="?rows=full").links


def test_the_journal_comes_in_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.admin.runs.page.journal_rows.__defaults__", (4,))
    run = world.completed()  # seven rows
    assert "?after=0#ar-journal" in look(run, "Rows 4 to 7").links
    first = look(run, "Rows 1 to 4", query="?after=0")
    assert {"?after=4#ar-journal", "?after=3#ar-journal"} <= set(first.links)
    look(run, "Rows 5 to 7", query="?after=4")
    for odd in ("-1", "x", "9" * 30, "²"):
        look(run, "Rows 4 to 7", query=f"?after={odd}")
    look(run, "Steps, and what each took", query="?after=99999")
    kept = "?_changelist_filters=status%3Dcompleted"
    assert f"{kept}&after=0" in look(run, query=kept).links, "Earlier in this run"
    run = ran("longer", *({"tools": [call("post", text=str(one))]} for one in range(6)), {"text": "done"})
    assert run.messages.count() == 22
    for size, after, first, last, earlier, later in (
        (20, None, 1, 22, None, None),  # two are left over, a tenth: the page takes them
        (19, None, 4, 22, 0, None),
        (19, 0, 1, 19, None, 19),
        (19, 2, 3, 22, 0, None),
    ):
        found = journal_rows("default", run.pk, after, size)
        assert (found.rows[0].seq, found.rows[-1].seq) == (first, last), size
        assert (found.earlier, found.later) == (earlier, later), size


def test_a_long_result_is_cut_with_a_way_to_all_of_it(world: World) -> None:
    @tool
    def long() -> str:
        """Return a lot."""
        return "begin " + "x" * 50_000 + " end"

    run = ran("long", {"tools": [call("long")]}, tools=[long])
    row = url(run, "row", run.messages.get(kind="tool_result").seq)
    assert row in look(run, "Show all of it: 46010 characters more", query="?rows=full").links
    whole = browser("superuser").get(row)
    assert whole["Content-Type"] == "text/plain; charset=utf-8"
    assert whole["X-Content-Type-Options"] == "nosniff"
    assert "x" * 50_000 + " end" in whole.content.decode()


def test_the_times_of_an_approved_call_to_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world.waiting().run
    monkeypatch.setattr("agentruns.admin.runs.steps.NOTICED", timedelta(microseconds=1))

    def gaps_and_times(query: str = "") -> tuple[list[str], list[str]]:
        with override_settings(USE_THOUSAND_SEPARATOR=True):
            html = look(run, role="viewer", query=query).html
        return re.findall(r'class="ar-gap">([^<]*)<', html), re.findall(r"</svg>([^<]*)</span>", html)

    assert [len(found) for found in gaps_and_times()] == [0, 1]
    approve(run.approvals.get().pk, user("superuser"))
    sweep()
    gaps, times = gaps_and_times()
    assert [gap for gap in gaps if gap.endswith("for an approval")]
    assert len(times) == 3  # two requests and one tool
    decided = run.messages.get(kind="approval_decided").seq
    assert gaps_and_times(f"?after={decided - 1}")[0] == gaps  # though it began on an earlier page
