"""What a model, a tool or a caller wrote is shown as text: no script runs and nothing is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import Agent, approve, deny, run_agent, tool
from agentruns.models import Approval, Run, Session
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.people import user
from tests.admin.texts import explode, write
from tests.browser.desk import Desk
from tests.browser.visitor import INDEX, QUEUE, RUNS, Visitor, call_path, turn_path
from tests.shop.agents import call

HOSTILE = {
    "elements": "<script>window.owned = 1; alert(1)</script><img src=x onerror='window.owned = 1; alert(1)'>",
    "attributes": "\"'><svg onload='window.owned = 1; alert(1)'><a href=\"javascript:window.owned=1\">x</a>",
    "ends": "</textarea></title></pre></script><style>* { display: none }</style><base href=//evil.example>",
}


# The console's own drawings have a viewBox.
FOREIGN = "#content :is(script, style, iframe, object, base, svg:not([viewBox]))"


@tool
def vanish(text: str) -> str:
    """Die with the text."""
    raise MemoryError(text)


@pytest.fixture(params=list(HOSTILE))
def hostile(request: pytest.FixtureRequest) -> str:
    return HOSTILE[request.param]


def started(text: str, *turns: dict[str, Any], session: str) -> Run:
    """Return a run whose every text is hostile."""
    person = user("viewer")
    person.first_name = person.last_name = text[:150]
    person.username = f"viewer {text}"[:150]
    person.save()
    agent = Agent(
        f"hostile-{session}",
        instructions=text,
        tools=[write, explode, vanish],
        model=ScriptedModel([*turns, {"text": f"done {text}"}]),
    )
    result = run_agent(agent, f"do {text}", session, actor=person)
    Session.objects.filter(key=session).update(key=f"{session} {text}")
    Approval.objects.filter(run_id=result.run_id).update(why=text)
    return Run.objects.get(pk=result.run_id)


def assert_harmless(visitor: Visitor, text: str, *places: Any) -> None:
    """Open pages, everything folded on them too: the text is there as text, and has done nothing."""
    for place in places:
        page = visitor.open(place)
        visitor.unfold()
        page.mouse.move(600, 300)
        assert page.evaluate("window.owned") is None, place
        assert page.locator(FOREIGN).count() == 0, place
        assert page.locator("a[href*=javascript i]").count() == 0, place
        assert "".join(text.split()) in "".join(page.inner_text("#content").split()), place


def test_a_run_that_waits(desk: Desk, visitor: Visitor, hostile: str) -> None:
    turn = {"text": hostile, "tools": [call("write", text=hostile), call("write", text=hostile + "!")]}
    run = started(hostile, turn, session="s1")
    first, _second = run.approvals.order_by("requested_at", "id")
    assert_harmless(visitor, hostile, QUEUE, first, turn_path(run), run, RUNS, INDEX)


def test_a_page_of_confirmation(desk: Desk, visitor: Visitor, hostile: str) -> None:
    started(hostile, {"text": hostile, "tools": [call("write", text=hostile)]}, session="s1")
    visitor.open(QUEUE)
    visitor.select_all()
    visitor.act("Approve selected")
    visitor.wait_for("Approve these calls?")
    assert "".join(hostile.split()) in "".join(visitor.text.split())
    assert visitor.page.evaluate("window.owned") is None


def test_a_run_that_ended(desk: Desk, visitor: Visitor, hostile: str) -> None:
    turns = [
        {"text": hostile, "tools": [call("write", text=hostile), call("explode", text=hostile)]},
        {"tools": [call("write", text=hostile + "!")]},
    ]
    run = started(hostile, *turns, session="s1")
    decider = user("decider")
    decider.username = f"decider {hostile}"
    decider.save()
    first = run.approvals.get()
    approve(first.pk, decider, digest=first.digest, reason=hostile)
    sweep()
    second = run.approvals.get(status="pending")
    deny(second.pk, decider, hostile, digest=second.digest)
    sweep()
    run.refresh_from_db()
    assert run.status == "completed"
    assert_harmless(visitor, hostile, QUEUE + "?status=all", first, second, run, RUNS)
    reply = run.messages.filter(kind="assistant").latest("seq").seq
    assert_harmless(visitor, hostile, f"{RUNS}{run.pk}/at/?seq={reply}", f"{RUNS}{run.pk}/at/")
    visitor.open(f"{RUNS}{run.pk}/replay/")
    visitor.click(visitor.button("Replay"))
    visitor.wait_for("Every request and every call would be the same")
    assert "".join(hostile.split()) in "".join(visitor.text.split())
    assert visitor.page.evaluate("window.owned") is None


def test_a_call_in_doubt(desk: Desk, visitor: Visitor, hostile: str) -> None:
    run = started(hostile, {"text": hostile, "tools": [call("vanish", text=hostile)]}, session="s1")
    assert run.status == "orphaned"
    call_id = run.messages.get(kind="tool_started").call_id
    assert_harmless(visitor, hostile, call_path(run, call_id), run)


def test_what_was_typed_and_refused_is_text_too(desk: Desk, visitor: Visitor, hostile: str) -> None:
    approval = desk.one()
    visitor.open(approval)
    deny(approval.pk, user("decider"), hostile)
    with visitor.refused():
        visitor.choose("Approve", **{"Note, kept in the journal": hostile})
    assert visitor.page.evaluate("window.owned") is None
    assert "".join(hostile.split()) in "".join(visitor.text.split())


def test_a_message_about_a_hostile_card(desk: Desk, visitor: Visitor, hostile: str) -> None:
    run = started(hostile, {"text": hostile, "tools": [call("write", text=hostile)]}, session="s1")
    visitor.open(run.approvals.get())
    visitor.choose("Approve")
    visitor.wait_for("Approved. A worker runs the call.")
    assert "".join(hostile.split()) in "".join(visitor.text.split())
    assert visitor.page.evaluate("window.owned") is None
    # What was done lately names the tool, and repeats nothing that a model wrote.
    assert_harmless(visitor, f"write {str(run.approvals.get().pk)[:13]}", INDEX)
