"""Measures what people do in the console: `python -m tests.browser.tasks`; ends with 1 if a goal is missed.

On the tests' host project and a database of its own. Each task is a function that acts as a person would and
returns what it measured, each measure with its bound.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from playwright.sync_api import Locator

    from agentruns import Agent
    from agentruns.models import Run
    from tests.browser.desk import Desk
    from tests.browser.visitor import Visitor, Visitors

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


class Measure(NamedTuple):
    """One measured value in words, and whether it is within its bound."""

    text: str
    is_met: bool


class People:
    """The person who acts, and what is there to act on."""

    def __init__(self, visit: Visitors, desk: Desk) -> None:
        self.visit, self.desk = visit, desk

    def at(self, size: dict[str, Any] = DESK) -> Visitor:
        """Return somebody who may do everything, at a screen."""
        return self.visit(size=size)


Doing = Callable[[People], list[Measure]]


@dataclass(frozen=True)
class Task:
    """A row of the table: what is done, how it was, how it shall be, and how that is measured."""

    name: str
    before: str
    goal: str
    measure: Doing
    is_long: bool = False


TASKS: list[Task] = []


def task(name: str, before: str, goal: str, *, is_long: bool = False) -> Callable[[Doing], Doing]:
    """Let a function be the measure of a task."""

    def register(measure: Doing) -> Doing:
        TASKS.append(Task(name, before, goal, measure, is_long))
        return measure

    return register


def at_most(value: float, most: float, text: str) -> Measure:
    """Return a number with its bound; `{}` in the text is the number."""
    return Measure(text.format(round(value)), value <= most)


def there(found: bool, text: str) -> Measure:
    """Return something that is there, or is missed."""
    return Measure(text if found else f"NOT: {text}", found)


def bottom(element: Locator) -> float:
    """Return where an element ends, in pixels from the top of the window."""
    box = element.bounding_box()
    assert box is not None, "it is not laid out"
    return box["y"] + box["height"]


def height(visitor: Visitor) -> int:
    """Return the height of the whole page in pixels."""
    return int(visitor.page.evaluate("document.documentElement.scrollHeight"))


def is_in_window(visitor: Visitor, element: Locator) -> bool:
    """Tell whether all of an element is in sight, at the top of the page and at its end."""
    size = visitor.options["viewport"]["height"]
    seen = []
    for place in (0, height(visitor)):
        visitor.page.evaluate("place => window.scrollTo(0, place)", place)
        box = element.bounding_box()
        seen.append(box is not None and box["y"] >= 0 and box["y"] + box["height"] <= size)
    visitor.page.evaluate("window.scrollTo(0, 0)")
    return all(seen)


def agent(name: str, *turns: Any, **options: Any) -> Agent:
    """Return an agent over the desk's tools that says `turns`."""
    from agentruns import Agent
    from agentruns.testing import ScriptedModel
    from tests.browser.desk import TOOLS

    given = {"version": "1", "tools": TOOLS, "starters": "anyone", "max_steps": 500, **options}
    return Agent(name, instructions="Serve.", model=ScriptedModel(list(turns)), **given)


def ran(name: str, *turns: Any, task: str, session: str) -> Run:
    """Return a run of an agent that says `turns`, driven as far as it goes."""
    from agentruns import run_agent
    from agentruns.models import Run

    return Run.objects.get(pk=run_agent(agent(name, *turns), task, session).run_id)


@task(
    "decide a pending refund",
    "147 words before Approve, at y = 911 of 900; request and order's cost not on the card",
    "sentence, amount, request, evidence in 500 px; buttons always visible, at 390 px too; "
    "2 clicks or A Enter; under 60 words before the button",
)
def decide(people: People) -> list[Measure]:
    from tests.browser.visitor import QUEUE, decided

    first, second = people.desk.kettle(), people.desk.kettle()
    found = []
    for name, size in (("1440", DESK), ("390", PHONE)):
        visitor = people.at(size)
        page = visitor.open(first)
        button = visitor.button("Approve")
        found.append(there(is_in_window(visitor, button), f"button in sight wherever one is, {name} px wide"))
        words = button.evaluate(WORDS_BEFORE)
        found.append(at_most(words, 59, f"{{}} words before it at {name}"))
        if size is DESK:
            content = page.locator("#content")
            told = ("Refund 192.90 EUR, order 4107", "Please refund the broken kettle", "189.00 EUR")
            lowest = max(bottom(content.get_by_text(text).first) for text in told)
            found.append(at_most(lowest, 500, "sentence, amount, request and evidence end at {} px"))
    visitor = people.at()
    visitor.open(QUEUE)
    visitor.click(visitor.page.locator("#result_list tbody th a").first)
    visitor.click(visitor.button("Approve"))
    visitor.wait_for("Approved. A worker runs the call.")
    found.append(at_most(visitor.clicks, 2, "{} clicks from the queue"))
    last = second if decided(first)[0] == "approved" else first
    visitor.wait_until_at(last)
    visitor.press("a", "Enter")
    visitor.wait_for("Approved.")
    return [*found, there(decided(last)[0] == "approved", "the next by A Enter")]


@task(
    "why did run X stop",
    'the list says "failed"; six failures are six page visits',
    "the list's second line says why",
)
def why(people: People) -> list[Measure]:
    from agentruns.models import Run
    from tests.browser.visitor import RUNS

    for number in range(6):
        run = ran(f"why-{number}", {"text": "x"}, task=f"Look at parcel {number}", session=f"why-{number}")
        error = f"ValueError: parcel {number} has no label"
        Run.objects.filter(pk=run.pk).update(status="failed", error=error)
    visitor = people.at()
    page = visitor.open(f"{RUNS}?status=failed")
    lines = page.locator("#result_list .field-task .ar-second").all_inner_texts()
    told = sum(f"parcel {number} has no label" in " ".join(lines) for number in range(6))
    return [there(told == 6, "all six errors on the list, 1 page visit")]


@task(
    "was the customer charged twice",
    '"No call was started twice" while two equal charges ran; search by customer or order finds nothing',
    "a red line wherever equal arguments ran twice in the session; search finds it",
)
def twice(people: People) -> list[Measure]:
    from agentruns import approve
    from agentruns.services.sweep import sweep
    from tests.admin.people import user
    from tests.browser.desk import REFUND
    from tests.browser.visitor import QUEUE, RUNS

    runs = []
    for _time in range(2):
        approval = people.desk.one(REFUND, session="ticket-1004")
        approve(approval.pk, user("superuser"), digest=approval.digest)
        sweep()
        runs.append(approval.run)
    waiting = people.desk.kettle(session="a-customer")
    visitor, found = people.at(), []
    for number, run in enumerate(runs, start=1):
        page = visitor.open(run)
        flag = page.locator(".ar-flag", has_text="refund_order ran 2 times with equal arguments")
        found.append(there(flag.count() == 1 and bottom(flag) < DESK["height"], f"red line in run {number}"))
    colour = flag.evaluate("line => getComputedStyle(line).borderLeftColor")
    red, green, blue = (int(part) for part in colour.strip("rgba()").split(",")[:3])
    found.append(there(red > 2 * max(green, blue), "it is red"))
    for what, where, count in (
        ("Lindqvist", RUNS, 2),
        ("1004", RUNS, 2),
        ("192.90", QUEUE, 1),
        ("4107", RUNS, 1),
        ("4107", QUEUE, 1),
    ):
        page = visitor.open(f"{where}?q={what}")
        rows = page.locator("#result_list tbody tr").count()
        place = "runs" if where == RUNS else "approvals"
        found.append(there(rows >= count, f"{what} found in {place}"))
    for where, one in ((RUNS, waiting.run), (QUEUE, waiting)):
        links = visitor.open(f"{where}?q=4107").locator(f"#result_list a[href*='{one.pk}']")
        found.append(there(links.count() > 0, "the very one among them"))
    return found


@task(
    "resolve a call in doubt",
    "3 clicks and 2 texts; the button at y = 1179; then the next is looked for",
    "verdict in the first screen; the next one opens by itself",
)
def doubt(people: People) -> list[Measure]:
    from tests.browser.visitor import RUNS, call_path
    from tests.effects import Effects

    doubts = []
    for number in range(2):
        doubts.append(people.desk.in_doubt(session=f"doubt-{number}"))
        Effects.from_environment().path.unlink()  # else the courier comes at once
    found = []
    for name, size in (("1440x900", DESK), ("390x844", PHONE)):
        visitor = people.at(size)
        visitor.open(call_path(*doubts[0]))
        end = bottom(visitor.button("It happened"))
        found.append(at_most(end, size["height"], f"verdict ends at {{}} px of {name}"))
    visitor = people.at()
    visitor.open(f"{RUNS}in-doubt/")
    visitor.click(visitor.page.locator(".ar-queue th a").first)
    (other,) = {call_path(*one) for one in doubts} - {visitor.path}
    visitor.page.get_by_label("How you know, kept in the journal").fill("The courier's list has it.")
    visitor.page.get_by_label("Result, told to the model if it happened").fill("booked")
    visitor.click(visitor.button("It happened"))
    visitor.wait_until_at(other)
    return [*found, at_most(visitor.clicks, 2, "{} clicks and 2 texts, then the next one is open")]


@task("cancel 22 runs", "4 clicks, confirmation 2,600 px", "the same, confirmation one line per run")
def cancel(people: People) -> list[Measure]:
    from agentruns import start_run
    from agentruns.models import Run
    from tests.browser.visitor import LINES, RUNS

    for number in range(22):
        start_run(agent("mailer", {"text": "x"}), f"Write to customer {number}", f"mail-{number}")
    visitor = people.at()
    page = visitor.open(f"{RUNS}?agent=mailer")
    visitor.click(page.locator("#action-toggle"))
    visitor.clicks += 1  # the choice of the action
    visitor.act("Cancel selected")
    visitor.wait_for("Cancel these 22 runs")
    lines = page.locator(".ar-lines > li:has(a)")
    most = max(line.evaluate(LINES) for line in lines.all())
    screens = height(visitor) / DESK["height"]
    visitor.click(visitor.button("Cancel these 22 runs"))
    visitor.wait_for("22 were done.")
    left = Run.objects.filter(agent="mailer").exclude(status="cancelled").count()
    return [
        at_most(visitor.clicks, 4, "{} clicks"),
        at_most(most, 1, "a run takes {} line"),
        Measure(f"confirmation {screens:.1f} screens", screens <= 1.55),
        there(left == 0, "all cancelled"),
    ]


@task("dearest runs, cost per agent and day", "impossible", "a page and a chart")
def costs(people: People) -> list[Measure]:
    from agentruns.models import Run
    from tests.browser.visitor import INDEX, RUNS

    for number in range(3):
        run = ran(f"dear-{number}", {"text": "x"}, task=f"Think {number}", session=f"dear-{number}")
        Run.objects.filter(pk=run.pk).update(
            usage={"input_tokens": 900, "cost": f"{number}.50"}, cost=f"{number}.50", tokens=900
        )
    visitor = people.at()
    page = visitor.open(INDEX)
    visitor.click(page.locator("#content a[href*='/costs/']").first)
    page.locator(".ar-costs").wait_for()
    agents = page.locator(".ar-costs tbody tr")
    found = [
        there(agents.count() >= 3, f"per agent after {visitor.clicks} click"),
        there(page.locator(".ar-costs svg rect").count() >= 3, "with a chart"),
    ]
    page.get_by_label("by").select_option("day")
    visitor.click(visitor.button("Show"))
    page.wait_for_url("**by=day*")
    found.append(there(page.locator(".ar-costs tbody tr").count() >= 1, "per day"))
    visitor.open(RUNS)
    visitor.click(page.locator("th.column-used_cost .text a").first)
    page.wait_for_url("**o=*")
    rows = page.locator("#result_list tbody tr .field-used_cost").all_inner_texts()
    return [*found, there(rows[0].strip().startswith("2.5"), "the dearest run first, 1 click")]


@task(
    "what was the customer told",
    r"2 scrolls; the mail is JSON with \n, cut at 300 characters",
    "the conversation is the first thing on the run's page; a mail reads as a mail",
)
def told(people: People) -> list[Measure]:
    from agentruns import approve
    from agentruns.services.sweep import sweep
    from tests.admin.people import user
    from tests.browser.desk import MAIL

    body = (
        "Hello David,\n\na courier collects the machine tomorrow.\n\n"
        + "It is free. " * 60
        + "\n\nKettle & Cup"
    )
    mail = {"name": "send_mail", "input": {**MAIL["input"], "body": body}}  # type: ignore[dict-item]
    approval = people.desk.one(mail)
    approve(approval.pk, user("superuser"), digest=approval.digest)
    sweep()
    found = []
    for name, size in (("1440x900", DESK), ("390x844", PHONE)):
        visitor = people.at(size)
        page = visitor.open(approval.run)
        answer = page.locator(".ar-say--agent").last
        found.append(at_most(bottom(answer), size["height"], f"the last answer ends at {{}} px of {name}"))
    visitor.click(page.locator(".ar-line", has_text="Mail to david").locator("summary"))
    letter = page.locator(".ar-line pre", has_text="Hello David")
    reads = letter.inner_text().strip() == body.strip() and r"\n" not in letter.inner_text()
    return [
        *found,
        there(reads, f"the whole mail as it was written, {visitor.clicks} click, no scroll before it"),
    ]


def work(run_id: Any) -> threading.Thread:
    """Start a worker for one run; it ends with the run."""
    from django.db import connections

    from agentruns.services.runs import resume_run

    def drive() -> None:
        resume_run(run_id)
        connections.close_all()

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    return thread


@task(
    "start a run, watch it write; answer in the same session",
    "impossible; impossible",
    "Start a run on the front page, words appear as they are written; a reply box under the conversation",
)
def start(people: People) -> list[Measure]:
    from agentruns import Agent
    from agentruns.models import Run
    from tests.browser.desk import Writer
    from tests.browser.visitor import INDEX

    model = Writer("I look at order 4107, and write to him then.", stops=[5])
    Agent("writer", version="1", instructions="Write.", model=model, starters="anyone")
    visitor = people.at()
    page = visitor.open(INDEX)
    visitor.click(page.get_by_role("link", name="Start a run", exact=True))
    page.get_by_label("Agent:").select_option("writer")
    page.get_by_label("Task:").fill("Where is order 4107?")
    visitor.click(visitor.button("Start"))
    visitor.wait_for("Started. A worker picks it up.")
    clicks, run = visitor.clicks, Run.objects.get(agent="writer")
    page.get_by_label("Reply to this agent").fill("And one thing m")
    thread = work(run.pk)
    words = page.locator(".ar-draft .ar-say", has_text="I look at order 4107,")
    words.wait_for()
    is_early = not run.messages.filter(kind="assistant").exists()
    model.go_on()
    thread.join()
    page.locator(".ar-say--agent", has_text="and write to him then.").wait_for()
    kept = page.get_by_label("Reply to this agent").input_value()
    page.get_by_label("Reply to this agent").fill("Thank you. And order 4108?")
    visitor.click(visitor.button("Send"))
    visitor.wait_for("Sent. The agent reads it next.")
    after = Run.objects.filter(agent="writer").latest("id")
    same = after.session_id == run.session_id and after.input == "Thank you. And order 4108?"
    return [
        at_most(clicks, 2, "{} clicks to start"),
        there(is_early, "words on the page before the reply is stored"),
        there(kept == "And one thing m", "what is typed meanwhile stays"),
        there(same, f"a reply goes on in the session, {visitor.clicks - clicks} click"),
    ]


@task(
    "rate, note, assign", "impossible", "thumb, note, assignee on a run (their own table, never the journal)"
)
def review(people: People) -> list[Measure]:
    from agentruns.models import Review
    from tests.admin.people import user

    user("viewer")
    run = ran("rated", {"text": "x"}, task="Mend the lamp", session="rated")
    rows = run.messages.count()
    visitor = people.at()
    page = visitor.open(run)
    visitor.click(page.locator("summary", has_text="Rate, note, assign"))
    page.get_by_label("good", exact=True).check()
    page.get_by_label("Assigned to (username)").fill("viewer")
    page.get_by_label("Note, for colleagues").fill("Well done.")
    visitor.click(visitor.button("Save"))
    visitor.wait_for("The review is saved.")
    kept = Review.objects.get(run=run)
    is_kept = (kept.rating, kept.assignee_name, kept.note) == (1, "viewer", "Well done.")
    return [
        there(is_kept, f"rated, noted, assigned, {visitor.clicks + 1} clicks"),
        there(run.messages.count() == rows, "the journal has no row more"),
    ]


def looked_up(steps: int) -> Run:
    """Return a run of that many calls."""
    from tests.shop.agents import call

    turns = [
        {"text": f"I look at order {4000 + one}.", "tools": [call("look_up_order", order=str(4000 + one))]}
        for one in range(steps)
    ]
    said = {"text": "All orders are fine."}
    return ran(f"checks-{steps}", *turns, said, task="Check the orders of today", session=f"check-{steps}")


@task(
    "a run of 25 steps",
    "43 screens, 405 kB",
    "at most 3 screens folded, under 120 kB; each step one line",
)
def steps(people: People) -> list[Measure]:
    from tests.browser.visitor import LINES

    run = looked_up(25)
    visitor = people.at()
    page = visitor.page
    with page.expect_response(lambda answer: answer.url.endswith("/change/")) as answer:
        visitor.open(run)
    size, screens = len(answer.value.body()), height(visitor) / DESK["height"]
    visitor.click(page.locator("#ar-journal > summary"))
    lines = page.locator("#ar-journal li.ar-step").all()
    most = max(line.locator("> div").evaluate(LINES) for line in lines)
    return [
        Measure(f"{screens:.1f} screens", screens <= 3),
        at_most(size / 1000, 119, "{} kB"),
        at_most(most, 1, f"each of {len(lines)} rows {{}} line"),
    ]


@task(
    "a run of 1,000 rows",
    "(not measured)",
    "quick: at most 2.5 times a run of 25 steps, 150 kB, 4 screens",
    is_long=True,
)
def rows(people: People) -> list[Measure]:
    from tests.admin.pages import url
    from tests.admin.people import browser

    client, times = browser("superuser"), []
    for count in (25, 340):
        run = looked_up(count)
        spent = []
        for _time in range(5):
            began = time.process_time()  # waits: for nothing; compared with each other
            answer = client.get(url(run), headers={"host": "127.0.0.1"})
            spent.append(time.process_time() - began)  # waits: the same
        assert answer.status_code == 200
        times.append(min(spent))
    visitor = people.at()
    visitor.open(run)
    ratio, number = times[1] / times[0], run.messages.count()
    return [
        there(number >= 1000, "1,000 rows"),
        Measure(f"{1000 * times[1]:.0f} ms of CPU, {ratio:.1f} times", ratio <= 2.5),
        at_most(len(answer.content) / 1000, 150, "{} kB"),
        Measure(f"{height(visitor) / DESK['height']:.1f} screens", height(visitor) <= 4 * DESK["height"]),
    ]


def main() -> int:
    """Measure every task, print the table, and return 1 if a goal is missed."""
    from tests.browser.pictures import server

    with tempfile.TemporaryDirectory() as scratch, server() as url:
        from tests import effects
        from tests.browser import chromium
        from tests.browser.desk import Desk
        from tests.browser.visitor import Visitors

        os.environ[effects.VARIABLE] = str(Path(scratch) / "effects.jsonl")
        print("| task | before | goal | measured | |\n|---|---|---|---|---|")
        missed, complaints = 0, []
        with chromium.running() as browser:
            for one in TASKS:
                if len(sys.argv) > 1 and one.measure.__name__ not in sys.argv:
                    continue
                visitors = Visitors(browser, url)
                found = one.measure(People(visitors, Desk(one.measure.__name__)))
                missed += sum(not each.is_met for each in found)
                measured = "; ".join(each.text if each.is_met else f"**{each.text}**" for each in found)
                verdict = "met" if all(each.is_met for each in found) else "missed"
                print(f"| {one.name} | {one.before} | {one.goal} | {measured} | {verdict} |", flush=True)
                complaints += visitors.leave()
        print("\n".join(complaints))
    return int(bool(missed or complaints))


if __name__ == "__main__":
    sys.exit(main())
