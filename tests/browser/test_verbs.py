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
from tests.shop.agents import call

ANSWER = "Answer, told to the model"
RESULT, EVIDENCE, WHY_NOT = "Result, told to the model", "How you know", "Reason, kept in the journal"
APPROVED = "Approved. A worker runs the call."
# What is pressed and filled in -> what the page says, what the approval is then, what the model is told, and
# the refunds by their cents and reason.
DECISIONS = {
    "Approve": (
        {REASON: "He is right."}, APPROVED, "approved", "refunded 349.00 EUR", [(34900, WHY)],
    ),
    "Edit and approve": (
        {"cents": "10000", "reason": "Half"}, APPROVED, "approved", "refunded 100.00 EUR", [(10000, "Half")],
    ),
    "Answer instead": (
        {ANSWER: "Refunded by phone."}, "Answered. The call is not run", "answered", "Refunded by phone.", [],
    ),
    "Deny": (
        {REASON: "Repair it, please."}, "Denied. The call is not run", "denied", "Repair it, please.", [],
    ),
}  # fmt: skip
# What is pressed and filled in -> what the page says, what the model is told, and how often the courier came.
VERDICTS = {
    "It happened": (
        {RESULT: "Booked as C-77", EVIDENCE: "He says so."}, "Recorded: it happened.", "Booked as C-77", 1,
    ),
    "It did not happen": ({EVIDENCE: "No booking."}, "Recorded: it did not happen.", "booked, collected", 2),
    "Unknown: tell the model": ({}, "Recorded: unknown.", '"unknown"', 1),
    "Cancel the run": ({WHY_NOT: "He collects it himself."}, "Cancelled.", "", 1),
}  # fmt: skip


@pytest.fixture(params=[True, False], ids=["scripts", "no-scripts"])
def visitor(visit: Visitors, request: pytest.FixtureRequest) -> Visitor:
    return visit(javascript=request.param)


def result_of(approval: Approval) -> str:
    """Find what the model was told of a call."""
    row = approval.run.messages.get(kind="tool_result", call_id=approval.call_id)
    return str(row.payload["content"])


@pytest.mark.parametrize("verb", DECISIONS)
def test_a_decision(desk: Desk, visitor: Visitor, effects: Effects, verb: str) -> None:
    fields, said, becomes, told, refunds = DECISIONS[verb]
    approval = desk.one()
    visitor.open(approval)
    visitor.choose(verb, **fields)
    visitor.wait_for(said)
    assert decided(approval) == (becomes, "superuser")
    assert approval.reason == fields.get(REASON, approval.reason)
    assert sweep().completed == 1
    assert [(line["cents"], line["reason"]) for line in effects.lines()] == refunds
    assert told in result_of(approval)


def test_extend(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(CARD)
    before = approval.expires_at
    visitor.open(approval)
    visitor.choose("Extend", **{"Extend by": "4 hours"})
    visitor.wait_for("Extended. It expires on")
    assert decided(approval) == ("pending", "")
    assert (approval.expires_at - before).total_seconds() == 4 * 3600


def test_answering_a_question(desk: Desk, visitor: Visitor) -> None:
    choice, words = (
        desk.one(QUESTION),
        call("ask_human", question="What now?", choices=["Repair"], free_text=True),
    )
    visitor.open(choice)
    assert "David would rather have a new machine than a repair. Do we send one?" in visitor.text
    for verb in ("Approve", "Edit and approve"):
        assert visitor.form(verb).count() == 0
    assert visitor.page.get_by_label(ANSWER).count() == 0
    visitor.click(visitor.button("No, repair it"))
    visitor.wait_for("Answered.")
    own = desk.one(words)
    visitor.open(own)
    visitor.choose("Answer", **{ANSWER: "Send one from the outlet."})
    visitor.wait_for("Answered.")
    assert decided(choice) == ("answered", "superuser")
    assert sweep().completed == 2
    assert (result_of(choice), result_of(own)) == ("No, repair it", "Send one from the outlet.")


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


@pytest.mark.parametrize("verb", ["Approve", "Deny"])
def test_several_at_once(desk: Desk, visitor: Visitor, verb: str) -> None:
    refund, mail, other = desk.one(REFUND), desk.one(MAIL), desk.one(TICKET)
    visitor.open(QUEUE)
    for approval in (refund, mail):
        visitor.row(approval).get_by_role("checkbox").check()
    visitor.act(f"{verb} selected")
    visitor.wait_for(f"{verb} these calls?")
    for shown in (refund.title, mail.title, "349.00 EUR"):
        assert shown in visitor.text
    assert other.title not in visitor.text
    if verb == "Deny":
        visitor.page.get_by_label(REASON).fill("Not this month.")
    late = desk.one(MAIL)  # asked while the page was open
    visitor.click(visitor.page.locator("#content").get_by_role("button", name=re.compile(f"^{verb}")))
    visitor.wait_for("Outcome of each")
    done = {"Approve": "approved", "Deny": "denied"}[verb]
    assert [decided(one)[0] for one in (refund, mail, other, late)] == [done, done, "pending", "pending"]


@pytest.mark.parametrize("verb", VERDICTS)
def test_a_verdict_on_a_call_in_doubt(desk: Desk, visitor: Visitor, effects: Effects, verb: str) -> None:
    fields, said, told, times = VERDICTS[verb]
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


def test_resuming_and_cancelling_a_run(desk: Desk, visitor: Visitor) -> None:
    run = World().paused()
    visitor.open(run)
    visitor.choose("Resume")
    visitor.wait_for("Resumed. A worker picks it up.")
    assert status(run) == "queued"
    visitor.choose("Cancel the run", **{WHY_NOT: "enough"})
    visitor.wait_for("Cancelled.")
    assert status(run) == "cancelled"
