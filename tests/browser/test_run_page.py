"""The page of a run: what it did, looking back at any row, a fork from there, and a replay."""

from __future__ import annotations

from agentruns import approve
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.browser.desk import REFUND, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import RUNS, Visitor
from tests.effects import Effects


def test_she_says_she_was_charged_twice(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    approval = desk.one(REFUND, session="ticket-4", actor=user("operator"))
    approve(approval.pk, user("decider"), digest=approval.digest)
    sweep()
    page = visitor.open(f"{RUNS}?q=ticket-4")
    visitor.click(page.locator("#result_list tbody th a").first)
    visitor.wait_for("No effect of this session ran twice with equal arguments.")
    assert "decider: Approved" in page.locator(".ar-line").inner_text()
    visitor.click(page.locator("summary", has_text="Steps"))
    assert "decider" in page.locator("li.ar-step", has_text="Approved").first.inner_text()
    visitor.click(page.locator("summary", has_text="More…"))
    visitor.click(visitor.link("Look back, or fork from a row"))
    reply = Message.objects.filter(run=approval.run, kind="assistant").latest("seq")
    page.get_by_label("Row", exact=True).evaluate(
        "(range, to) => { range.value = to; range.dispatchEvent(new Event('input')); "
        "range.dispatchEvent(new Event('change')); }",
        str(reply.seq),
    )
    visitor.wait_for("What the model was sent for this reply")
    assert page.url.endswith(f"seq={reply.seq}")
    visitor.wait_for("its fingerprint is the one in this row")
    visitor.click(visitor.link("Previous row"))
    visitor.wait_for("The conversation, as the model would get it next")
    visitor.unfold()
    assert_sound(page)
    visitor.choose("Fork", **{"Next message to the agent": "Was it charged twice?"})
    visitor.wait_for("A worker picks it up.")
    assert str(Run.objects.get(origin=approval.run).pk) in page.url
    visitor.open(approval.run)
    visitor.click(page.locator("summary", has_text="More…"))
    visitor.click(page.get_by_role("link", name="Replay", exact=True))
    visitor.click(visitor.button("Replay"))
    visitor.wait_for("Every request and every call would be the same.")
    assert_sound(page)
    assert effects.count() == 1
