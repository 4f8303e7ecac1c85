"""A standing rule from a card's suggestion to Stop now, as somebody with a browser sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentruns import Agent, ToolContext, approve, deny, run_agent, tool
from agentruns.models import Approval, ApprovalRule, Run
from agentruns.services import rules
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.people import user
from tests.browser.desk import TOOLS, record
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitor, Visitors, path_of
from tests.effects import Effects
from tests.shop.agents import call

RULES = "/admin/agentruns/approvalrule/"


class Ticket:
    """Makes the agent "closer" ask to close tickets; each in a session of its own."""

    def __init__(self, *tools: Any) -> None:
        self.count, self.tools = 0, tools or TOOLS

    def asked(self, ticket: int = 0) -> Approval:
        """Let the agent ask; return the card."""
        return Approval.objects.get(run=self.run(ticket))

    def run(self, ticket: int = 0) -> Run:
        self.count += 1
        asks = call("close_ticket", ticket=ticket or self.count)
        model = ScriptedModel([{"text": "It is solved.", "tools": [asks]}, {"text": "Closed."}])
        agent = Agent("closer", instructions="Close.", tools=self.tools, model=model)
        return Run.objects.get(pk=run_agent(agent, "Close it", f"closer-{self.count}").run_id)


def closed(effects: Effects) -> list[int]:
    return [line["ticket"] for line in effects.lines() if line["tool"] == "close_ticket"]


def test_from_a_suggestion_to_a_rule_that_decides_and_is_stopped(visitor: Visitor, effects: Effects) -> None:
    tickets, boss = Ticket(), user("superuser")
    for _number in range(6):
        approve(tickets.asked().pk, boss)
        sweep()
    denied = [tickets.asked(900), tickets.asked(890)]
    for each in denied:
        deny(each.pk, boss, "It is open.")
    card = tickets.asked(6)
    page = visitor.open(card)
    visitor.wait_for("6 calls like this one were approved, none denied.")
    visitor.click(visitor.button("Draft a rule from them"))
    page.locator("h1", has_text="Rule close_ticket-like-").wait_for()
    made = ApprovalRule.objects.get()
    assert (made.status, visitor.path) == ("draft", path_of(made))
    visitor.wait_for("Approve close_ticket if ticket is at most 6.")
    visitor.click(visitor.button("Try on the past"))
    visitor.wait_for("Would have approved 6 of 8 cards; people decided differently in 0.")

    visitor.open(path_of(made))
    visitor.click(visitor.link("New version"))
    page.get_by_label("Value").first.fill("900")
    page.get_by_label("At most").first.fill("100")
    page.get_by_label("In", exact=True).first.fill("1")
    visitor.click(visitor.button("Write the draft"))
    visitor.wait_for("Approve close_ticket if ticket is at most 900, at most 100 calls in a day.")
    visitor.click(visitor.button("Try on the past"))
    for each in denied:
        visitor.wait_for("Would have approved 8 of 8 cards; people decided differently in 2.")
        disagreement = page.locator("#content li", has_text="a person denied").filter(has_text=each.title)
        visitor.click(disagreement.get_by_role("link"))
        visitor.wait_until_at(each)
        visitor.open(ApprovalRule.objects.get(version=2))
        visitor.click(visitor.button("Try on the past"))

    visitor.click(visitor.button("Start dry run"))
    visitor.wait_for("It only records what it would decide")
    wide = ApprovalRule.objects.get(version=2)
    waits = [tickets.asked(700), tickets.asked(800)]
    visitor.open(waits[0])
    visitor.wait_for("is on a dry run and would approve this. It decides nothing.")
    visitor.click(visitor.button("Approve"))
    visitor.wait_for("Approved.")
    deny(waits[1].pk, boss, "Not yet.")
    sweep()
    visitor.open(wide)
    visitor.wait_for("Would have decided 1 as people did, 1 differently.")
    visitor.click(page.locator("#content section", has_text="Its dry run").get_by_role("link"))
    visitor.wait_until_at(waits[1])

    visitor.open(wide)
    visitor.choose("Activate")
    visitor.wait_for("It decides what its sentence says")
    run = tickets.run(750)
    assert (run.status, closed(effects)[-1]) == ("completed", 750)
    decided = run.approvals.get()
    assert decided.decided_by_name == f"rule:{wide}"
    visitor.open(decided)
    visitor.click(visitor.link(f"Decided by rule {wide}"))
    visitor.wait_until_at(wide)
    page.get_by_label("Why (optional)").first.fill("Too many.")
    visitor.click(visitor.button("Stop now"))
    visitor.wait_for("It decides nothing until somebody activates it again.")
    visitor.wait_for("Too many.")
    assert tickets.run(751).status == "awaiting-approval"
    assert closed(effects) == [1, 2, 3, 4, 5, 6, 700, 750]


def test_a_rule_for_a_high_risk_is_activated_by_another_person_with_a_password(
    visit: Visitors, effects: Effects, settings: Any
) -> None:
    settings.AGENTRUNS_REAUTH_SECONDS = 300

    @tool(requires_approval=True, risk="high", rules=True)
    def close_ticket(ctx: ToolContext, ticket: int) -> str:
        """Close a ticket."""
        record(ctx, "close_ticket", ticket=ticket)
        return "closed"

    tickets, boss = Ticket(close_ticket), user("superuser")
    boss.set_password("tea and coffee")
    boss.save()
    assert tickets.run().status == "awaiting-approval"
    small = {"path": "arguments.ticket", "op": "<=", "value": 5}
    made = rules.draft_rule(None, name="small", agent="closer", tool="close_ticket", conditions=[small])
    visitor = visit("superuser")
    visitor.open(made)
    with visitor.refused(403):
        visitor.choose("Activate", **{"Your password": "tea"})
        visitor.wait_for("password")
    assert tickets.run().status == "awaiting-approval"
    visitor.open(made)
    visitor.choose("Activate", **{"Your password": "tea and coffee"})
    visitor.wait_for("It decides what its sentence says")
    assert (tickets.run().status, closed(effects)) == ("completed", [3])
    assert tickets.run(6).status == "awaiting-approval"


def pages(visitor: Visitor) -> Iterator[str]:
    """Open each page about rules: the lists, empty and full, tools, forms, and a rule in each status."""
    visitor.open(RULES)
    yield "empty"
    tickets, boss = Ticket(), user("superuser")
    for _number in range(6):
        approve(tickets.asked().pk, boss)
    sweep()
    card = tickets.asked(-1)  # no call like an earlier one
    visitor.open(card)
    visitor.wait_for("6 calls like this one were approved, none denied.")
    yield "suggestion"
    deny(card.pk, boss, "no")
    about: dict[str, Any] = {"agent": "closer", "tool": "close_ticket", "name": "small-tickets"}
    conditions = [
        {"path": "arguments.ticket", "op": "<=", "value": 5000},
        {"path": "context.plan", "op": "in", "value": ["gold", "silver", "ليلى"]},
    ]
    caps = [
        {"of": "count", "most": "12", "seconds": 86400, "per": []},
        {"of": "arguments.ticket", "most": "90000", "seconds": 7200, "per": ["arguments.ticket"]},
    ]
    rules.retire_rule(rules.draft_rule(boss, conditions=conditions, caps=caps, **about).pk, boss, "Too wide.")
    made = rules.draft_rule(boss, conditions=conditions[:1], caps=caps, reason="Solved by us.", **about)
    visitor.open(made)
    visitor.unfold()
    yield "draft"
    visitor.click(visitor.button("Try on the past"))
    visitor.wait_for("Would have approved")
    yield "tried"
    visitor.open(f"{RULES}add/")
    yield "tools"
    visitor.open(f"{RULES}add/?rule={made.pk}")
    yield "form"
    visitor.page.get_by_label("Value").first.fill("many")
    with visitor.refused(400):
        visitor.click(visitor.button("Write the draft"))
    yield "refused"
    rules.try_rule(made.pk, boss)
    cards = [tickets.asked() for _number in range(4)]
    visitor.open(cards[0])
    yield "dry-card"
    approve(cards[0].pk, boss)
    deny(cards[1].pk, boss, "no")
    visitor.open(made)
    yield "dry"
    rules.activate_rule(made.pk, boss)
    run = tickets.run()
    visitor.open(made)
    visitor.unfold()
    yield "active"
    visitor.open(Approval.objects.filter(run=run).get())
    yield "decided-card"
    rules.stop_rule(made.pk, boss, "A call is in doubt.")
    visitor.open(made)
    yield "stopped"
    visitor.open(RULES)
    yield "list"


def test_everybody_can_use_the_pages_about_rules(visitor: Visitor) -> None:
    for _page in pages(visitor):
        assert_sound(visitor.page)
