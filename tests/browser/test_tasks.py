"""What people do in the console stays within its goals: clicks, words, pixels, lines and kilobytes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connections
from playwright.sync_api import Locator

from agentruns import Agent, approve, run_agent, start_run
from agentruns.models import Run
from agentruns.services.runs.lifecycle import resume_run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.people import user
from tests.browser.desk import MAIL, REFUND, TOOLS, Desk, Writer
from tests.browser.visitor import INDEX, LINES, QUEUE, RUNS, Visitor, Visitors, call_path, decided
from tests.effects import Effects
from tests.shop.agents import call

DESK: dict[str, Any] = {"width": 1440, "height": 900}
PHONE: dict[str, Any] = {"width": 390, "height": 844}
# The words that a reader meets before a button: the text laid out before it in the content of the page.
WORDS_BEFORE = """button => {
    const walker = document.createTreeWalker(document.querySelector("#content"), NodeFilter.SHOW_TEXT);
    let text = "";
    for (let node = walker.nextNode(); node && !button.contains(node); node = walker.nextNode())
        if (node.parentElement.checkVisibility()) text += ` ${node.textContent}`;
    return text.split(/\\s+/).filter(word => /[\\p{L}\\p{N}]/u.test(word)).length;
}"""


def bottom(element: Locator) -> float:
    """Find where an element ends, in pixels from the top of the window."""
    box = element.bounding_box()
    assert box is not None, "it is not laid out"
    return box["y"] + box["height"]


def screens(visitor: Visitor) -> float:
    """Measure the height of the whole page in windows of a desk."""
    return float(visitor.page.evaluate("document.documentElement.scrollHeight")) / DESK["height"]


def is_in_window(visitor: Visitor, element: Locator) -> bool:
    """Tell whether all of an element is in sight, at the top of the page and at its end."""
    size = visitor.page.viewport_size["height"]
    for place in ("document.documentElement.scrollHeight", "0"):
        visitor.page.evaluate(f"window.scrollTo(0, {place})")
        if not element.bounding_box()["y"] >= 0 or bottom(element) > size:
            return False
    return True


def looked_up(steps: int, calls: int) -> Run:
    """Run an agent that looks up so many orders in each of its steps."""
    turns: list[Any] = [
        {
            "text": f"I look at orders from {4000 + step}.",
            "tools": [call("look_up_order", order=f"{4000 + step}-{number}") for number in range(calls)],
        }
        for step in range(steps)
    ]
    model = ScriptedModel([*turns, {"text": "All orders are fine."}])
    agent = Agent("checks", instructions="Serve.", tools=TOOLS, model=model, max_steps=500)
    return Run.objects.get(pk=run_agent(agent, "Check the orders of today", "checks").run_id)


@pytest.mark.usefixtures("_letters")
def test_decide_a_pending_refund(desk: Desk, visit: Visitors) -> None:
    first, second = desk.kettle(), desk.kettle()
    visitor = visit(size=DESK)
    page = visitor.open(first)
    button = visitor.button("Approve")
    for size in (PHONE, DESK):
        visitor.resize(size)
        assert is_in_window(visitor, button)
        assert button.evaluate(WORDS_BEFORE) < 60
        assert "DE02" not in page.content()
        for shown in (
            "Refund 192.90 EUR, order 4107", "3.90 EUR more than was paid", "Please refund the broken kettle",
            "189.00 EUR",
        ):  # fmt: skip
            assert size is PHONE or bottom(page.locator("#content").get_by_text(shown).first) < 500, shown
    visitor.open(QUEUE)
    visitor.click(page.locator("#result_list tbody th a").first)
    visitor.click(visitor.button("Approve"))
    visitor.wait_for("Approved. A worker runs the call.")
    assert visitor.clicks == 2
    last = second if decided(first)[0] == "approved" else first
    visitor.wait_until_at(last)
    visitor.press("a", "Enter")
    visitor.wait_for("Approved.")
    assert decided(last)[0] == "approved"


def test_was_the_customer_charged_twice(desk: Desk, visitor: Visitor) -> None:
    for _time in range(2):
        approval = desk.one(REFUND, session="ticket-1004")
        approve(approval.pk, user("superuser"), digest=approval.digest)
        sweep()
        page = visitor.open(approval.run)
    flag = page.locator(".ar-flag", has_text="refund_order ran 2 times with equal arguments")
    assert bottom(flag) < DESK["height"]
    colour = flag.evaluate("line => getComputedStyle(line).borderLeftColor")
    red, green, blue = (int(part) for part in colour.strip("rgba()").split(",")[:3])
    assert red > 2 * max(green, blue)


@pytest.mark.usefixtures("_letters")
def test_resolve_a_call_in_doubt(desk: Desk, visit: Visitors, effects: Effects) -> None:
    doubts = []
    for number in range(2):
        doubts.append(desk.in_doubt(session=f"doubt-{number}"))
        effects.path.unlink()  # else the courier comes at once
    visitor = visit(size=DESK)
    page = visitor.open(call_path(*doubts[0]))
    for size in (PHONE, DESK):
        visitor.resize(size)
        assert bottom(visitor.button("It happened")) <= size["height"]
    visitor.open(f"{RUNS}in-doubt/")
    visitor.click(page.locator(".ar-queue th a").first)
    (other,) = {call_path(*one) for one in doubts} - {visitor.path}
    page.get_by_label("How you know, kept in the journal").fill("The courier's list has it.")
    page.get_by_label("Result, told to the model if it happened").fill("booked")
    visitor.click(visitor.button("It happened"))
    visitor.wait_until_at(other)
    assert visitor.clicks == 2


def test_cancel_22_runs(visit: Visitors) -> None:
    mailer = Agent("mailer", instructions="Serve.", model=ScriptedModel([{"text": "x"}]))
    for number in range(22):
        start_run(mailer, f"Write to customer {number}", f"mail-{number}")
    visitor = visit(size=DESK)
    page = visitor.open(f"{RUNS}?agent=mailer")
    visitor.click(page.locator("#action-toggle"))
    visitor.act("Cancel selected")
    visitor.wait_for("Cancel these 22 runs")
    assert max(page.locator(".ar-lines > li:has(a)").evaluate_all(f"all => all.map({LINES})")) == 1
    assert screens(visitor) <= 1.55
    visitor.click(visitor.button("Cancel these 22 runs"))
    visitor.wait_for("22 were done.")
    assert visitor.clicks == 3, "and the choice of the action"
    assert Run.objects.filter(status="cancelled").count() == 22


@pytest.mark.usefixtures("_letters")
def test_what_was_the_customer_told(desk: Desk, visit: Visitors) -> None:
    free = "It is free. " * 60
    body = f"Hello David,\n\na courier collects the machine tomorrow.\n\n{free}\n\nKettle & Cup"
    approval = desk.one(call("send_mail", **{**MAIL["input"], "body": body}))  # type: ignore[dict-item]
    approve(approval.pk, user("superuser"), digest=approval.digest)
    sweep()
    visitor = visit(size=DESK)
    page = visitor.open(approval.run)
    for size in (DESK, PHONE):
        visitor.resize(size)
        assert bottom(page.locator(".ar-say--agent").last) <= size["height"]
    visitor.click(page.locator(".ar-line", has_text="Mail to david").locator("summary"))
    letter = page.locator(".ar-line pre", has_text="Hello David").inner_text()
    assert letter.strip() == body, "the whole mail as it was written"


def test_start_a_run_watch_it_write_and_answer_in_the_same_session(visit: Visitors) -> None:
    model = Writer("I look at order 4107, and write to him then.", stops=[5])
    Agent("writer", version="1", instructions="Write.", model=model, starters="anyone")
    visitor = visit(size=DESK)
    page = visitor.open(INDEX)
    visitor.click(page.get_by_role("link", name="Start a run", exact=True))
    page.get_by_label("Agent:").select_option("writer")
    page.get_by_label("Task:").fill("Where is order 4107?")
    visitor.click(visitor.button("Start"))
    visitor.wait_for("Started. A worker picks it up.")
    assert visitor.clicks == 2
    run = Run.objects.get()
    page.get_by_label("Reply to this agent").fill("And one thing m")
    worker = threading.Thread(target=lambda: (resume_run(run.pk), connections.close_all()), daemon=True)
    worker.start()
    page.locator(".ar-draft .ar-say", has_text="I look at order 4107,").wait_for()
    assert not run.messages.filter(kind="assistant").exists(), "words before the reply is stored"
    model.go_on()
    worker.join()
    page.locator(".ar-say--agent", has_text="and write to him then.").wait_for()
    assert page.get_by_label("Reply to this agent").input_value() == "And one thing m"
    page.get_by_label("Reply to this agent").fill("Thank you. And order 4108?")
    visitor.click(visitor.button("Send"))
    visitor.wait_for("Sent. The agent reads it next.")
    after = Run.objects.latest("id")
    assert (after.session_id, after.input) == (run.session_id, "Thank you. And order 4108?")


@pytest.mark.parametrize(
    ("steps", "calls", "rows", "most", "size"),
    [(25, 1, 75, 3, 119_000), (10, 50, 1000, 4, 150_000)],
    ids=["25 steps", "1,000 rows"],
)
def test_a_long_run(visit: Visitors, steps: int, calls: int, rows: int, most: float, size: int) -> None:
    run, visitor = looked_up(steps, calls), visit(size=DESK)
    assert run.messages.count() > rows
    with visitor.page.expect_response(lambda answer: answer.url.endswith("/change/")) as answer:
        page = visitor.open(run)
    assert len(answer.value.body()) <= size
    assert screens(visitor) <= most
    visitor.click(page.locator("#ar-journal > summary"))
    lines = page.locator("#ar-journal li.ar-step > div").evaluate_all(f"all => all.map({LINES})")
    assert {*lines} == {1}
