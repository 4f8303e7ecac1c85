"""A name written from right to left stands where the sentence has it, as Chromium draws it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from playwright.sync_api import expect

from agentruns import Agent, approve, run_agent, tool
from agentruns.models import Approval, Run
from agentruns.services.api_tokens import create_token
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.people import user
from tests.browser.visitor import INDEX, QUEUE, RUNS, Visitor, Visitors, turn_path
from tests.shop.agents import call

GETS, ASKS, DECIDES = "ليلى", "محمد", "حسن"
# Texts that follow each other in a line that is read from left to right, and are not drawn so.
SWAPPED = """() => {
  const found = [];
  const block = (node) => {
    while (getComputedStyle(node).display === "inline") node = node.parentElement;
    return node;
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let before = null;
  for (let node; (node = walker.nextNode()); ) {
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()].filter(({ width }) => width > 1);
    if (!node.data.trim() || !boxes.length) continue;
    const [tops, bottoms] = [boxes.map(({ top }) => top), boxes.map(({ bottom }) => bottom)];
    const now = {
      text: node.data.trim(),
      block: block(node.parentElement),
      isLine: Math.max(...tops) < Math.min(...bottoms),
      top: Math.max(...tops),
      bottom: Math.min(...bottoms),
      left: Math.min(...boxes.map(({ left }) => left)),
      right: Math.max(...boxes.map(({ right }) => right)),
    };
    const isBeside = before?.block === now.block && before.top < now.bottom && now.top < before.bottom;
    if (isBeside && before.isLine && now.isLine && getComputedStyle(now.block).direction === "ltr")
      if (before.right > now.left + 1) found.push(`${before.text} | ${now.text}`);
    before = now;
  }
  return found;
}"""
# Where the first match of each pattern is drawn, by its left edge.
PLACES = """(box, patterns) => patterns.map((pattern) => {
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    const found = new RegExp(pattern).exec(node.data);
    if (!found) continue;
    const range = document.createRange();
    range.setStart(node, found.index);
    range.setEnd(node, found.index + found[0].length);
    return range.getBoundingClientRect().left;
  }
})"""


@tool(requires_approval=True, describe=lambda args: f"Voucher of 5.00 EUR to {args['to']}")
def voucher(to: str, cents: int) -> str:
    """Send a voucher."""
    return "sent"


@pytest.fixture
def runs(db: None) -> list[Run]:
    """Runs of one person: one whose call was made, and two that ask for the same."""
    users, found = get_user_model().objects, []
    person, decider = users.create_user(ASKS), users.create_superuser(DECIDES)
    for number in range(3):
        turns = [
            {"text": f"{GETS} 5", "tools": [call("voucher", to=GETS, cents=500 + number)]},
            {"text": GETS},
        ]
        model = ScriptedModel(turns)
        agent = Agent(f"وكيل {number}", instructions="Serve.", tools=[voucher], model=model)
        result = run_agent(agent, f"5.00 {GETS}", f"طلب {number}", actor=person)
        found.append(Run.objects.get(pk=result.run_id))
        if not number:
            approve(result.pending[0].pk, decider, reason=GETS)
            sweep(run_id=found[0].pk)
    return found


def assert_in_order(visitor: Visitor, *places: Any) -> None:
    """Open pages, and everything folded on them: nothing is drawn before what it follows."""
    for place in places:
        page = visitor.open(place)
        visitor.unfold()
        assert page.get_by_text(GETS).count(), place
        assert page.evaluate(SWAPPED) == [], place


@pytest.mark.parametrize("width", [1440, 390])
def test_pages_with_such_names(runs: list[Run], visit: Visitors, width: int) -> None:
    visitor = visit("superuser", size={"width": width, "height": 900})
    done, waits, _other = runs
    assert_in_order(visitor, INDEX, QUEUE, RUNS, waits.approvals.get(), turn_path(waits), waits, done)
    assert_in_order(visitor, QUEUE + "?status=all", f"{RUNS}{done.pk}/at/")
    visitor.open(QUEUE)
    visitor.select_all()
    visitor.act("Approve selected")
    visitor.wait_for("Approve these calls?")
    visitor.unfold()
    assert visitor.page.evaluate(SWAPPED) == []
    visitor.click(visitor.page.get_by_role("button", name="Approve all ticked"))
    visitor.wait_for("Outcome of each")
    assert visitor.page.evaluate(SWAPPED) == []


def test_the_inbox_to_copy(runs: list[Run], visit: Visitors) -> None:
    _token, text = create_token(user("superuser"), ["runs:read", "approvals:decide"])
    visitor = visit("anonymous")
    page = visitor.open("/inbox/index.html")
    page.get_by_label("API token").fill(text)
    page.get_by_role("button", name="Open").click()
    visitor.wait_for("2 waiting")
    about = page.locator(".about").first
    words = rf"requested by {ASKS} \(agent وكيل 2\), (just now|\d+ minutes ago)"
    expect(about).to_have_text(re.compile(words))
    assert page.locator("pre").first.inner_text() == f"cents: 502\nto: {GETS}"
    for one in Approval.objects.pending():
        approve(one.pk, get_user_model().objects.get(username=DECIDES))
    visitor.wait_for(f"It is approved by {DECIDES}, ")
    name, date = page.locator(".outcome").first.evaluate(PLACES, [DECIDES, r"\d"])
    assert name < date  # else it reads as if the date came first
    assert page.evaluate(SWAPPED) == []
