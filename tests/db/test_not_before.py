"""Runs that start later: nobody takes them before their time by the database's clock."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from agentruns import adopt_definition, cancel_run, pause_run, resume_run, run_agent, start_run
from agentruns.models import Run
from agentruns.services.sweep import sweep
from agentruns.services.waiting import waits
from agentruns.testing import run_until_blocked
from tests.api.http import Api
from tests.db.failures import Flaky, failing
from tests.db.helpers import forget_backoff, payloads, user
from tests.shop.agents import shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

SOON = timedelta(hours=2)


def later(delay: timedelta = SOON) -> datetime:
    return datetime.now(UTC) + delay


def said(run: Run) -> list[str]:
    """Return the kinds of what a run waits for."""
    return [wait.kind for wait in waits("default", [Run.objects.get(pk=run.pk)]).get(run.pk, [])]


def test_it_is_driven_when_it_is_due() -> None:
    agent, due = shop_agent("later"), later()
    run = start_run(agent, "do it", "s1", not_before=due)
    assert (run.status, run.not_before, said(run)) == ("queued", due, ["scheduled"])
    assert payloads(run, "run_started")[0]["not_before"] == due.isoformat(timespec="microseconds")
    assert (sweep().found, run_agent(agent, "do it", "s1").status) == (0, "queued")
    forget_backoff(run)
    assert (said(run), sweep().completed) == ([], 1)
    past = agent.start("do it", "s2", not_before=later(-SOON))
    assert (sweep().completed, Run.objects.get(pk=past.pk).not_before) == (1, None)


def test_the_time_before_does_not_count_for_its_deadline() -> None:
    agent = shop_agent("quick", deadline=timedelta(minutes=1))
    run = start_run(agent, "do it", "s1", not_before=later())
    (result,) = run_until_blocked(run, fast_forward=True)
    assert result.status == "completed"
    early = start_run(agent, "do it", "s2", not_before=later())
    pause_run(early.pk)
    resume_run(early.pk, drive=False)
    state = waits("default", [Run.objects.get(pk=early.pk)])
    assert (state, sweep().completed) == ({}, 1)


def test_a_cancel_ends_it_at_once_and_a_resume_starts_it() -> None:
    agent = shop_agent("later")
    run = start_run(agent, "do it", "s1", not_before=later())
    assert cancel_run(run.pk).status == "cancelled"
    run = start_run(agent, "do it", "s1", not_before=later())
    assert resume_run(run.pk).status == "completed"


def test_an_adopted_definition_leaves_the_time_alone() -> None:
    run = start_run(shop_agent("later"), "do it", "s1", not_before=later())
    shop_agent("later", max_steps=3)
    adopted = adopt_definition(run.pk)
    assert (adopted.not_before, said(run), sweep().found) == (run.not_before, ["scheduled"], 0)


def test_a_back_off_is_none_of_it() -> None:
    agent = shop_agent("fails")
    agent.model = Flaky([failing("retry")], [])
    run = start_run(agent, "do it", "s1", not_before=later(-SOON))
    sweep()
    assert said(run) == ["back-off"]


def test_the_same_task_is_the_same_run_whatever_its_time() -> None:
    agent = shop_agent("later")
    run = start_run(agent, "do it", "s1", not_before=later())
    assert start_run(agent, "do it", "s1").pk == run.pk
    keyed = start_run(agent, "do it", "s2", not_before=later(), idempotency_key="k")
    assert start_run(agent, "do it", "s2", not_before=later(2 * SOON), idempotency_key="k").pk == keyed.pk


@pytest.mark.parametrize(
    ("moment", "error", "words"),
    [
        ("2030-01-01", TypeError, "must be a datetime, not '2030-01-01'"),
        (date(2030, 1, 1), TypeError, "must be a datetime"),
        (datetime(2030, 1, 1), ValueError, "must be aware"),
        (datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))), ValueError, "must be a time in UTC"),
    ],
)
def test_what_is_no_time_is_refused(moment: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        start_run(shop_agent("later"), "do it", "s1", not_before=moment)
    assert Run.objects.count() == 0


def test_who_drives_here_takes_none() -> None:
    agent: Any = shop_agent("later")
    for start in (agent.run, lambda *given, **options: run_agent(agent, *given, **options)):
        with pytest.raises(TypeError, match="not_before"):
            start("do it", "s1", not_before=later())


def test_the_doors_show_it(client: Client) -> None:
    boss = user("boss", "view_run", "resume_run", is_staff=True)
    shop_agent("later")
    api = Api(boss)
    body = {"agent": "later", "input": "do it", "session": "s1"}
    for wrong in ("2030-01-01T00:00:00", "tomorrow", 7.5e300, True):
        assert api.post("/runs", {**body, "not_before": wrong})[0] == 422, wrong
    status, run = api.post("/runs", {**body, "not_before": "2130-01-01T01:00:00+01:00"})
    assert (status, run["not_before"]) == (201, "2130-01-01T00:00:00.000000Z")
    client.force_login(boss)
    page = client.get(reverse("admin:agentruns_run_change", args=[run["id"]])).content.decode()
    listed = client.get(reverse("admin:agentruns_run_changelist")).content.decode()
    assert "It starts at 2129-12-31 18:00:00 CST." in page
    assert "It starts at once, before its time." in page
    assert "Starts at 2129-12-31 18:00:00 CST" in listed
    assert api.get("/health")[1]["oldest_queued_at"] is None
