"""A call that failed and may have happened: its page, its run, and the card of the next call."""

from __future__ import annotations

import pytest

from agentruns import ToolContext, approve, tool
from agentruns.journal.masking import NOTHING
from agentruns.journal.read import run_rows
from agentruns.management.timeline import line
from agentruns.models import Approval, Run
from agentruns.services.history import record, state_at
from agentruns.services.sweep import sweep
from tests.admin.doubts import EVIDENCE, last, start
from tests.admin.pages import Page, read, url
from tests.admin.people import browser, user
from tests.admin.world import ONCE, World
from tests.db.helpers import payloads
from tests.shop.agents import call

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("requests_commit")]

ERROR = "ConnectionError: reset by peer"


@tool
def pay(ctx: ToolContext, cents: int) -> str:
    """Pay; of the first call nobody knows whether it was done."""
    if cents == 1:
        raise ConnectionError("reset by peer")
    return "paid"


def failed() -> tuple[Run, str]:
    """A run whose first call failed in doubt and whose second one waits, and that first call."""
    run = start({"tools": [call("pay", cents=1)]}, {"tools": [call("pay", cents=2)]}, tools=[pay])
    assert run.status == "awaiting-approval"
    first = run.messages.filter(kind="tool_result").get()
    return run, first.call_id


def page_of(target: str) -> Page:
    return read(browser("superuser").get(target))


@ONCE
def test_the_card_of_the_next_call_shows_the_failed_one(world: World) -> None:
    _run, call_id = failed()
    page = page_of(url(Approval.objects.get()))
    assert f"raised an error and may have happened. Approving settles it. {ERROR}" in page.text
    assert call_id in page.text, "why it is asked"


@ONCE
def test_the_run_leads_to_the_failed_call_and_that_takes_a_verdict(world: World) -> None:
    run, call_id = failed()
    page = page_of(url(run))
    assert "A call of pay raised an error and is in doubt; nobody has cleared it." in page.text
    assert "Until then each further call of pay asks a person." in page.text
    assert url(run, "call", call_id) in page.links
    assert "Say what became of it" in page.text
    assert "Say what became of it" not in read(browser("viewer").get(url(run))).text
    page = page_of(url(run, "call", call_id))
    for text in ("It happened once or not at all.", "The tool raised an error on", ERROR):
        assert text in page.text
    assert url(run, "resolve", call_id) in page.forms
    data = {"seq": last(run, call_id), "verdict": "not_occurred", "result": "", "evidence": EVIDENCE}
    said = browser("superuser").post(url(run, "resolve", call_id), data, follow=True)
    assert "The doubt is lifted." in read(said).text
    page = page_of(url(run, "call", call_id))
    assert ("The doubt is lifted." in page.text, page.forms.get(url(run, "resolve", call_id))) == (True, None)


@ONCE
def test_an_approval_of_the_next_call_stands_on_the_page_of_the_failed_one(world: World) -> None:
    run, call_id = failed()
    approve(Approval.objects.get().pk, user("decider"))
    sweep()
    page = page_of(url(run, "call", call_id))
    assert "decider, knowing of it, approved the tool's next call on" in page.text
    assert "The doubt is lifted." in page.text
    assert url(run, "resolve", call_id) not in page.forms
    page = page_of(url(run) + "?rows=full")
    assert "nobody has cleared it" not in page.text
    assert payloads(run, "approval_decided")[0]["settles"] == [call_id]
    assert "Settles the doubt about" in page.text
    assert "Tool gave an error, in doubt: it may have happened" in page.text


@ONCE
def test_the_timeline_and_the_state_say_it(world: World) -> None:
    run, call_id = failed()
    row = run.messages.filter(kind="tool_result").get()
    (shown,) = [one for one in record(state_at(run.pk, row.seq), NOTHING)["calls"] if one["id"] == call_id]
    assert (shown["outcome"], shown["in_doubt"]) == ("error", True)
    approve(Approval.objects.get().pk, user("decider"))
    lines = [line(one) for one in run_rows("default", run.pk)]
    assert sum(f"error, in doubt: {ERROR}" in one for one in lines) == 1
    assert sum("which settles the doubt about" in one for one in lines) == 1
