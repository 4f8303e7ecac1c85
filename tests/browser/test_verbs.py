"""Everything a person can do, each with scripts and without them."""

from __future__ import annotations

import re

import pytest

from agentruns.models import Approval
from agentruns.services.sweep import sweep
from tests.admin.world import World, status
from tests.browser.desk import CARD, MAIL, QUESTION, REFUND, TICKET, Desk
from tests.browser.visitor import QUEUE, REASON, Visitor, Visitors, call_path, decided, turn_path
from tests.effects import Effects
from tests.shop.agents import call

ANSWER = "Answer, told to the model"
EVIDENCE = "How you know"


@pytest.fixture(params=[True, False], ids=["scripts", "no-scripts"])
def visitor(visit: Visitors, request: pytest.FixtureRequest) -> Visitor:
    return visit(javascript=request.param)


def result_of(approval: Approval) -> str:
    """Return what the model was told of a call."""
    row = approval.run.messages.get(kind="tool_result", call_id=approval.call_id)
    return str(row.payload["content"])


def test_approve(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    approval = desk.one()
    visitor.open(approval)
    visitor.choose("Approve", **{"Note, kept in the journal": "He is right."})
    visitor.wait_for("Approved. A worker runs the call.")
    assert decided(approval) == ("approved", "superuser")
    assert approval.reason == "He is right."
    assert (sweep().completed, [line["cents"] for line in effects.lines()]) == (1, [34900])


def test_edit_and_approve(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    approval = desk.one()
    visitor.open(approval)
    visitor.choose("Edit and approve", cents="10000", reason="Goodwill, the half of it.")
    visitor.wait_for("Approved. A worker runs the call.")
    assert decided(approval) == ("approved", "superuser")
    assert sweep().completed == 1
    (line,) = effects.lines()
    assert (line["order"], line["cents"], line["reason"]) == ("1004", 10000, "Goodwill, the half of it.")
    assert result_of(approval) == "refunded 100.00 EUR"
    visitor.open(approval)
    assert "34900" in visitor.text  # what the model had proposed


def test_an_edit_that_does_not_validate(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(TICKET)
    visitor.open(approval)
    visitor.page.locator("form").evaluate_all("forms => forms.forEach(form => form.noValidate = true)")
    with visitor.refused(400):
        visitor.choose("Edit and approve", ticket="")
    visitor.wait_for("Nothing was decided. Correct the form below.")
    assert decided(approval) == ("pending", "")


def test_answer_instead(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    approval = desk.one()
    visitor.open(approval)
    visitor.choose("Answer instead", **{ANSWER: "He was refunded by phone, 349.00 EUR."})
    visitor.wait_for("Answered. The call is not run")
    assert decided(approval) == ("answered", "superuser")
    assert (sweep().completed, effects.count()) == (1, 0)
    assert "He was refunded by phone, 349.00 EUR." in result_of(approval)


def test_deny(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    approval = desk.one()
    visitor.open(approval)
    visitor.choose("Deny", **{REASON: "Repair it, please."})
    visitor.wait_for("Denied. The call is not run")
    assert decided(approval) == ("denied", "superuser")
    assert (sweep().completed, effects.count()) == (1, 0)
    assert "Repair it, please." in result_of(approval)


def test_extend(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(CARD)
    before = approval.expires_at
    visitor.open(approval)
    visitor.choose("Extend", **{"Extend by": "4 hours"})
    visitor.wait_for("Extended. It expires on")
    assert decided(approval) == ("pending", "")
    assert (approval.expires_at - before).total_seconds() == 4 * 3600


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


def test_answering_a_question_in_ones_own_words(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(call("ask_human", question="What now?", choices=["Repair"], free_text=True))
    visitor.open(approval)
    visitor.choose("Answer", **{ANSWER: "Send one from the outlet."})
    visitor.wait_for("Answered.")
    assert sweep().completed == 1
    assert result_of(approval) == "Send one from the outlet."


def test_denying_a_question(desk: Desk, visitor: Visitor) -> None:
    approval = desk.one(QUESTION)
    visitor.open(approval)
    visitor.choose("Deny", **{REASON: "Decide it yourself."})
    visitor.wait_for("Denied.")
    assert decided(approval) == ("denied", "superuser")


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


def test_a_reply_decided_in_part(desk: Desk, visitor: Visitor) -> None:
    refund, mail = desk.ask(REFUND, MAIL)
    visitor.open(turn_path(refund.run))
    visitor.row(refund).get_by_role("checkbox").uncheck()
    visitor.click(visitor.button("Approve all ticked"))
    visitor.wait_for("Approved. A worker runs the call.")
    assert [decided(one)[0] for one in (refund, mail)] == ["pending", "approved"]


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


def test_several_at_once_of_which_one_is_gone(desk: Desk, visitor: Visitor, visit: Visitors) -> None:
    refund, mail = desk.one(REFUND), desk.one(MAIL)
    visitor.open(QUEUE)
    visitor.select_all()
    visitor.act("Approve selected")
    visitor.wait_for("Approve these calls?")
    faster = visit("decider")
    faster.open(refund)
    faster.choose("Deny", **{REASON: "No."})
    faster.wait_for("Denied.")
    visitor.click(visitor.page.locator("#content").get_by_role("button", name=re.compile("^Approve")))
    visitor.wait_for("Outcome of each")
    assert "Denied by decider" in visitor.text
    assert [decided(one)[0] for one in (refund, mail)] == ["denied", "approved"]


def test_it_happened(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    run, call_id = desk.in_doubt()
    visitor.open(call_path(run, call_id))
    assert "It happened once or not at all." in visitor.text
    assert effects.lines()[0]["key"] in visitor.text
    visitor.choose(
        "It happened", **{"Result, told to the model": "Booked as C-77", EVIDENCE: "The courier says so."}
    )
    visitor.wait_for("Recorded: it happened.")
    assert (status(run), sweep().completed, effects.count()) == ("queued", 1, 1)
    assert run.messages.get(kind="tool_result").payload["content"] == "Booked as C-77"


def test_it_did_not_happen(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    run, call_id = desk.in_doubt()
    visitor.open(call_path(run, call_id))
    visitor.choose("It did not happen", **{EVIDENCE: "No booking of that day."})
    visitor.wait_for("Recorded: it did not happen.")
    assert (status(run), sweep().completed) == ("queued", 1)
    assert len({line["key"] for line in effects.lines()}) == 1
    assert "booked" in run.messages.get(kind="tool_result").payload["content"]


def test_nobody_can_know(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    run, call_id = desk.in_doubt()
    visitor.open(call_path(run, call_id))
    visitor.choose("Unknown: tell the model")
    visitor.wait_for("Recorded: unknown.")
    assert (status(run), sweep().completed, effects.count()) == ("queued", 1, 1)
    assert run.messages.get(kind="tool_result").payload["outcome"] == "unknown"


def test_cancelling_from_the_call_in_doubt(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    run, call_id = desk.in_doubt()
    visitor.open(call_path(run, call_id))
    visitor.choose("Cancel the run", **{"Reason, kept in the journal": "He collects it himself."})
    visitor.wait_for("Cancelled.")
    assert (status(run), effects.count()) == ("cancelled", 1)


def test_a_verdict_after_the_run_went_on(desk: Desk, visitor: Visitor) -> None:
    run, call_id = desk.in_doubt()
    visitor.open(call_path(run, call_id))
    visitor.choose("Unknown: tell the model")
    visitor.wait_for("Recorded: unknown.")
    sweep()
    visitor.open(call_path(run, call_id))
    visitor.choose("It happened", **{EVIDENCE: "The parcel is there."})
    visitor.wait_for("The doubt is lifted.")
    assert run.messages.filter(kind="orphan_resolved").count() == 2


def test_a_verdict_somebody_else_gave_first(desk: Desk, visitor: Visitor, visit: Visitors) -> None:
    run, call_id = desk.in_doubt()
    visitor.open(call_path(run, call_id))
    faster = visit("superuser")
    faster.open(call_path(run, call_id))
    faster.choose("Unknown: tell the model")
    faster.wait_for("Recorded: unknown.")
    with visitor.refused():
        visitor.choose("It did not happen", **{EVIDENCE: "No booking."})
    visitor.wait_for("superuser: unknown")
    assert run.messages.filter(kind="orphan_resolved").count() == 1


def test_resuming_and_cancelling_a_run(desk: Desk, visitor: Visitor) -> None:
    run = World().paused()
    visitor.open(run)
    visitor.choose("Resume")
    visitor.wait_for("Resumed. A worker picks it up.")
    assert status(run) == "queued"
    visitor.choose("Cancel the run", **{"Reason, kept in the journal": "enough"})
    visitor.wait_for("Cancelled.")
    assert status(run) == "cancelled"
