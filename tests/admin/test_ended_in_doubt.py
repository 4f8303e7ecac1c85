"""What ended runs left in doubt: counted on the front page, listed, and in the queue of calls in doubt."""

from __future__ import annotations

from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from agentruns import ToolContext, approve, cancel_run, fork_run, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.models import Approval, Run, Session
from agentruns.services import waiting
from tests.admin.doubts import EVIDENCE, doubtful, finish, give, in_doubt, last, start, uncleared
from tests.admin.pages import Page, read, url
from tests.admin.people import browser
from tests.admin.world import ONCE, World
from tests.rows import write_raw
from tests.shop.agents import call

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("requests_commit")]

QUEUE = reverse("admin:agentruns_run_in_doubt")
FIGURE = "ended in doubt in the last 7 days"


@tool
def ship(order: int) -> str:
    """Ship an order; the answer of the carrier is lost."""
    raise ConnectionError("reset by peer")


def shipped(session: str = "s1") -> tuple[Run, str]:
    """A run that ended although its call may have happened, and that call."""
    run = start({"tools": [call("ship", order=4)]}, tools=[ship], session=session)
    assert run.status == "completed"
    return run, run.messages.get(kind="tool_result").call_id


def front(role: str = "superuser") -> Page:
    return read(browser(role).get("/admin/"))


@ONCE
@pytest.mark.parametrize("how", ["raised", "surfaced"])
def test_it_is_counted_listed_and_decided_and_gone_after(world: World, how: str) -> None:
    run, call_id = shipped() if how == "raised" else ((ended := uncleared()), doubtful(ended))
    start(session="harmless")
    page = front()
    assert f"1 {FIGURE}" in page.text
    (link,) = (one for one in page.links if "ended-in-doubt" in one)
    listed = read(browser("viewer").get(unescape(link)))
    assert [one.split("?")[0] for one in listed.links if "/change/" in one] == [url(run)]
    queue = read(browser("resolver").get(QUEUE))
    assert url(run, "call", call_id) in queue.links
    assert "Its run has ended." in queue.text
    data = {"seq": last(run, call_id), "verdict": "not_occurred", "result": "", "evidence": EVIDENCE}
    browser("resolver").post(url(run, "resolve", call_id), data)
    assert FIGURE not in front().text
    assert "No call in doubt waits for you." in read(browser("resolver").get(QUEUE)).text


@ONCE
def test_what_a_person_said_to_be_unknown_is_not_asked_again(world: World) -> None:
    run, call_id = shipped()
    data = {"seq": last(run, call_id), "verdict": "unknown", "result": "", "evidence": EVIDENCE}
    assert browser("resolver").post(url(run, "resolve", call_id), data).status_code == 302
    assert FIGURE not in front().text


@ONCE
def test_it_is_the_next_one_after_those_that_runs_wait_for(world: World) -> None:
    ended, call_id = shipped("ended")
    waits, other = in_doubt(session="waits"), shipped("other")
    client = browser("resolver")
    data = {"seq": last(waits, doubtful(waits)), "verdict": "occurred", "result": "x", "evidence": EVIDENCE}
    sent = client.post(url(waits, "resolve", doubtful(waits)), data)
    assert sent.url == url(ended, "call", call_id)
    data |= {"seq": last(ended, call_id)}
    assert client.post(url(ended, "resolve", call_id), data).url == url(other[0], "call", other[1])


@ONCE
def test_neither_old_ones_nor_records_nor_those_of_others_nor_of_runs_that_go_on(world: World) -> None:
    run, _call = shipped()
    in_doubt(session="waits")

    def found(**which: Any) -> list[Any]:
        return [wait.run_id for wait in waiting.ended_in_doubt("default", Run.objects.filter(**which))]

    assert found() == [run.pk]
    assert found(session__key="waits") == []
    Run.objects.update(updated_at=F("updated_at") - timedelta(days=8))
    assert found() == []
    Run.objects.update(updated_at=F("updated_at") + timedelta(days=8))
    Session.objects.filter(pk=run.session_id).update(imported_at=F("created_at"))
    assert found() == []


@ONCE
def test_many_cost_no_more_queries_and_no_contents_are_read(world: World) -> None:
    def queries() -> list[str]:
        with CaptureQueriesContext(connection) as captured:
            waiting.ended_in_doubt("default", Run.objects.all())
        return [one["sql"] for one in captured]

    shipped()
    alone = queries()
    for number in range(3):
        shipped(f"s-{number}")
    assert len(queries()) == len(alone) <= 3
    assert not any('"agentruns_message"."content",' in one for one in alone)


@tool
def knock(ctx: ToolContext) -> str:
    """Knock; nobody ever knows whether it was heard."""
    raise ToolDurabilityError("no answer")


@ONCE
def test_a_verdict_on_an_earlier_attempt_is_none_on_the_next(world: World) -> None:
    run = start({"tools": [call("knock")]}, tools=[knock])
    give(run, "not_occurred")
    assert finish(run).status == "orphaned", "it ran again"
    cancel_run(run.pk)
    assert f"1 {FIGURE}" in front().text
    assert url(run, "call", doubtful(run)) in read(browser("resolver").get(QUEUE)).links
    give(run, "unknown")
    assert FIGURE not in front().text


@ONCE
def test_a_fork_counts_no_call_of_its_origin_again(world: World) -> None:
    run, call_id = shipped()
    fork = finish(fork_run(run.pk, run.messages.get(kind="tool_result").seq))
    assert fork.status == "completed"
    assert [wait.run_id for wait in waiting.ended_in_doubt("default", Run.objects.all())] == [run.pk]
    data = {"seq": last(run, call_id), "verdict": "occurred", "result": "", "evidence": EVIDENCE}
    browser("resolver").post(url(run, "resolve", call_id), data)
    assert FIGURE not in front().text


@ONCE
def test_an_approval_in_a_later_run_of_the_session_settles_it(world: World) -> None:
    shipped()
    later = start({"tools": [call("ship", order=5)]}, tools=[ship], key="later")
    assert f"1 {FIGURE}" in front().text
    approve(Approval.objects.get().pk, None)
    assert FIGURE not in front().text
    finish(later)
    assert [wait.run_id for wait in waiting.ended_in_doubt("default", Run.objects.all())] == [later.pk]


@ONCE
@pytest.mark.parametrize("text", ['{"in_doubt":true', '["in_doubt":true]', '{"in_doubt":true}', "{", "[]"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_damaged_row_closes_no_list(world: World, ended: bool, text: str) -> None:
    """Not for the week in which the front page looks at it, nor while its run waits."""
    intact, call_id = shipped("intact")
    if ended:
        row = shipped("damaged")[0].messages.get(kind="tool_result")
    else:
        row = in_doubt(session="damaged").messages.get(kind="orphan_found")
    write_raw("agentruns_message", "facts", text, "id", row.pk)
    assert f"1 {FIGURE}" in front().text
    for path in (reverse("admin:agentruns_run_changelist"), url(intact, "call", call_id)):
        assert browser("superuser").get(path).status_code == 200
    listed = read(
        browser("superuser").get(reverse("admin:agentruns_run_changelist") + "?status=ended-in-doubt")
    )
    assert [one.split("?")[0] for one in listed.links if "/change/" in one] == [url(intact)]
    assert url(intact, "call", call_id) in read(browser("superuser").get(QUEUE)).links


@ONCE
@pytest.mark.parametrize("text", ["{", "[]", '{"v":1}'])
def test_a_damaged_verdict_is_none(world: World, text: str) -> None:
    run, call_id = shipped()
    data = {"seq": last(run, call_id), "verdict": "occurred", "result": "", "evidence": EVIDENCE}
    browser("resolver").post(url(run, "resolve", call_id), data)
    assert FIGURE not in front().text
    write_raw("agentruns_message", "facts", text, "id", run.messages.get(kind="orphan_resolved").pk)
    assert f"1 {FIGURE}" in front().text
