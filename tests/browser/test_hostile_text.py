"""What a model, a tool or a caller wrote is shown as text: no script runs and nothing is loaded."""

from __future__ import annotations

from typing import Any

from agentruns import Agent, approve, deny, run_agent, tool
from agentruns.models import Approval, Run, Session
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.people import user
from tests.admin.texts import explode, write
from tests.browser.visitor import INDEX, QUEUE, RUNS, Visitor, call_path, turn_path
from tests.shop.agents import call

# Ends what it may stand in, and then is an element of each kind that acts or loads something.
HOSTILE = (
    "\"'></title></textarea></script><script>owned=1</script><img src=x onerror=owned=1>"
    "<a href=javascript:owned=1>x</a><base href=//e><style>*{display:none}</style>"
)
# The console's own drawings have a viewBox.
FOREIGN = "#content :is(script, style, iframe, object, base, svg:not([viewBox]))"


@tool
def vanish(text: str) -> str:
    """Die with the text."""
    raise MemoryError(text)


def started(*turns: dict[str, Any], session: str = "s1") -> Run:
    """Run an agent every text of which is hostile, for somebody with such a name."""
    person = user("viewer")
    person.first_name = person.last_name = HOSTILE[:150]
    person.username = f"viewer {session} {HOSTILE}"[:150]
    person.save()
    model = ScriptedModel([*turns, {"text": f"done {HOSTILE}"}])
    agent = Agent("hostile", instructions=HOSTILE, tools=[write, explode, vanish], model=model)
    result = run_agent(agent, f"do {HOSTILE}", session, actor=person)
    Session.objects.filter(key=session).update(key=f"{session} {HOSTILE}")
    Approval.objects.filter(run_id=result.run_id).update(why=HOSTILE)
    return Run.objects.get(pk=result.run_id)


def assert_is_text(visitor: Visitor, text: str = HOSTILE) -> None:
    """Raise unless the text is on the page that is open as text, and has done nothing."""
    page = visitor.page
    page.mouse.move(600, 300)
    assert page.evaluate("window.owned") is None, page.url
    assert page.locator(FOREIGN).count() == 0, page.url
    assert page.locator("a[href*=javascript i]").count() == 0, page.url
    assert "".join(text.split()) in "".join(page.inner_text("body").split()), page.url


def assert_harmless(visitor: Visitor, *places: Any, text: str = HOSTILE) -> None:
    """Open pages, and everything folded on them."""
    for place in places:
        visitor.open(place)
        visitor.unfold()
        assert_is_text(visitor, text)


def test_a_run_that_waits_and_one_in_doubt(visitor: Visitor) -> None:
    run = started(
        {"text": HOSTILE, "tools": [call("write", text=HOSTILE), call("write", text=HOSTILE + "!")]}
    )
    first, _second = run.approvals.order_by("requested_at", "id")
    assert_harmless(visitor, QUEUE, first, turn_path(run), run, RUNS, INDEX)
    visitor.open(QUEUE)
    visitor.select_all()
    visitor.act("Approve selected")
    visitor.wait_for("Approve these calls?")
    assert_is_text(visitor)
    visitor.open(first)
    visitor.choose("Approve")
    visitor.wait_for("Approved.")
    assert_is_text(visitor)
    # What was done lately names the tool, and repeats nothing that a model wrote.
    assert_harmless(visitor, INDEX, text=f"write {str(first.pk)[:13]}")
    run = started({"text": HOSTILE, "tools": [call("vanish", text=HOSTILE)]}, session="s2")
    assert run.status == "orphaned"
    assert_harmless(visitor, call_path(run, run.messages.get(kind="tool_started").call_id), run)


def test_a_run_that_ended(visitor: Visitor) -> None:
    run = started(
        {"text": HOSTILE, "tools": [call("write", text=HOSTILE), call("explode", text=HOSTILE)]},
        {"tools": [call("write", text=HOSTILE + "!")]},
    )
    decider = user("decider")
    decider.username = f"decider {HOSTILE}"
    decider.save()
    first = run.approvals.get()
    approve(first.pk, decider, digest=first.digest, reason=HOSTILE)
    sweep()
    second = run.approvals.get(status="pending")
    deny(second.pk, decider, HOSTILE, digest=second.digest)
    sweep()
    run.refresh_from_db()
    assert run.status == "completed"
    reply = run.messages.filter(kind="assistant").latest("seq").seq
    moment = f"{RUNS}{run.pk}/at/"
    assert_harmless(visitor, QUEUE + "?status=all", first, second, run, RUNS, f"{moment}?seq={reply}", moment)
    visitor.open(f"{RUNS}{run.pk}/replay/")
    visitor.click(visitor.button("Replay"))
    visitor.wait_for("Every request and every call would be the same")
    assert_is_text(visitor)
