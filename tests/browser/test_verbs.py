"""Everything a person can do, each with scripts and without them."""

from __future__ import annotations

import re

import pytest

from agentruns.models import Approval
from agentruns.services.sweep import sweep
from tests.admin.world import World, status
from tests.browser.desk import CARD, MAIL, QUESTION, REFUND, TICKET, WHY, Desk
from tests.browser.visitor import QUEUE, REASON, Visitor, Visitors, call_path, decided, turn_path
from tests.effects import Effects

ANSWER = "Answer, told to the model"
RESULT, EVIDENCE, WHY_NOT = "Result, told to the model", "How you know", "Reason, kept in the journal"
APPROVED = "Approved. A worker runs the call."
# What is pressed and filled in -> what the page says, what the approval is then, what the model is told, and
# the refunds by their cents and reason.
HALF, BY_PHONE, REPAIR = {"cents": "10000", "reason": "Half"}, "Refunded by phone.", "Repair it, please."
DECISIONS = {
    "Approve": ({REASON: "He is right."}, APPROVED, "approved", "refunded 349.00 EUR", [(34900, WHY)]),
    "Edit and approve": (HALF, APPROVED, "approved", "refunded 100.00 EUR", [(10000, "Half")]),
    "Answer instead": ({ANSWER: BY_PHONE}, "Answered. The call is not run", "answered", BY_PHONE, []),
    "Deny": ({REASON: REPAIR}, "Denied. The call is not run", "denied", REPAIR, []),
}
# What is pressed and filled in -> what the page says, what the model is told, and how often the courier came.
BOOKED = {RESULT: "Booked as C-77", EVIDENCE: "He says so."}
VERDICTS = {
    "It happened": (BOOKED, "Recorded: it happened.", "Booked as C-77", 1),
    "It did not happen": ({EVIDENCE: "No booking."}, "Recorded: it did not happen.", "booked, collected", 2),
    "Unknown: tell the model": ({}, "Recorded: unknown.", '"unknown"', 1),
    "Cancel the run": ({WHY_NOT: "He collects it himself."}, "Cancelled.", "", 1),
}


@pytest.fixture(params=[True, False], ids=["scripts", "no-scripts"])
def visitor(visit: Visitors, request: pytest.FixtureRequest) -> Visitor:
    return visit(javascript=request.param)


def result_of(approval: Approval) -> str:
    """Find what the model was told of a call."""
    row = approval.run.messages.get(kind="tool_result", call_id=approval.call_id)
    return str(row.payload["content"])


def test_each_decision(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    for verb, (fields, said, becomes, told, refunds) in DECISIONS.items():
        approval, before = desk.one(), effects.count()
        visitor.open(approval)
        visitor.choose(verb, **fields)
        visitor.wait_for(said)
        assert decided(approval) == (becomes, "superuser")
        assert approval.reason == fields.get(REASON, approval.reason)
        assert sweep().completed == 1
        assert [(line["cents"], line["reason"]) for line in effects.lines()[before:]] == refunds
        assert told in result_of(approval)


def test_a_run_is_given_more_time_resumed_and_cancelled(desk: Desk, visitor: Visitor) -> None:
    approval, run = desk.one(CARD), World().paused()
    before = approval.expires_at
    visitor.open(approval)
    visitor.choose("Extend", **{"Extend by": "4 hours"})
    visitor.wait_for("Extended. It expires on")
    assert decided(approval) == ("pending", "")
    assert (approval.expires_at - before).total_seconds() == 4 * 3600
    visitor.open(run)
    visitor.choose("Resume")
    visitor.wait_for("Resumed. A worker picks it up.")
    assert status(run) == "queued"
    assert "It is queued: the next free worker takes it." in visitor.text
    assert "Reload" not in visitor.text, "without scripts the page stays as it is"
    visitor.choose("Cancel the run", **{WHY_NOT: "enough"})
    visitor.wait_for("Cancelled.")
    assert status(run) == "cancelled"


def test_answering_a_question(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(QUESTION)
    visitor.open(approval)
    assert "David would rather have a new machine than a repair. Do we send one?" in visitor.text
    for verb in ("Approve", "Edit and approve"):
        assert visitor.form(verb).count() == 0
    assert visitor.page.get_by_label(ANSWER).count() == 0
    visitor.click(visitor.button("No, repair it"))
    visitor.wait_for("Answered.")
    assert decided(approval) == ("answered", "superuser")
    assert sweep().completed == 1
    assert result_of(approval) == "No, repair it"


def test_all_calls_of_a_reply_on_one_page(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    refund, mail, ticket = desk.ask(REFUND, MAIL, TICKET)
    visitor.open(refund)
    visitor.click(visitor.link("Decide all of this reply on one page"))
    visitor.page.wait_for_url(f"**{turn_path(refund.run)}*")
    assert "3 calls" in visitor.text
    visitor.row(refund).get_by_role("checkbox").uncheck()
    visitor.page.get_by_label(REASON).fill("Call him.")
    visitor.click(visitor.button("Deny all ticked"))
    visitor.wait_for("1 call")
    assert [decided(one)[0] for one in (refund, mail, ticket)] == ["pending", "denied", "denied"]
    visitor.click(visitor.button("Approve all ticked"))
    visitor.wait_for("Nothing else waits for you.")
    assert sweep().completed == 1
    assert [line["tool"] for line in effects.lines()] == ["refund_order"]


def test_several_at_once(desk: Desk, visitor: Visitor) -> None:
    other = desk.one(TICKET)
    for verb, done, note in (("Approve", "approved", ""), ("Deny", "denied", "Not this month.")):
        refund, mail = desk.one(REFUND), desk.one(MAIL)
        visitor.open(QUEUE)
        for approval in (refund, mail):
            visitor.row(approval).get_by_role("checkbox").check()
        visitor.act(f"{verb} selected")
        visitor.wait_for(f"{verb} these calls?")
        for shown in (refund.title, mail.title, "349.00 EUR"):
            assert shown in visitor.text
        assert other.title not in visitor.text
        visitor.page.get_by_label(REASON).fill(note)
        late = desk.one(MAIL)  # asked while the page was open
        visitor.click(visitor.page.locator("#content").get_by_role("button", name=re.compile(f"^{verb}")))
        visitor.wait_for("Outcome of each")
        assert [decided(one)[0] for one in (refund, mail, other, late)] == [done, done, "pending", "pending"]


def test_each_verdict_on_a_call_in_doubt(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    for verb, (fields, said, told, times) in VERDICTS.items():
        effects.path.unlink(missing_ok=True)  # else the courier comes at once
        run, call_id = desk.in_doubt()
        (first,) = effects.lines()
        visitor.open(call_path(run, call_id))
        assert "It happened once or not at all." in visitor.text
        assert first["key"] in visitor.text
        visitor.choose(verb, **fields)
        visitor.wait_for(said)
        goes_on = verb != "Cancel the run"
        assert (status(run), sweep().completed) == (("queued", 1) if goes_on else ("cancelled", 0))
        assert [line["key"] for line in effects.lines()] == [first["key"]] * times
        if goes_on:
            payload = run.messages.get(kind="tool_result").payload
            assert told in f'{payload["content"]} "{payload["outcome"]}"'
