"""Takes the pictures of the console that the docs show: `python -m tests.browser.pictures [folder]`.

On the tests' host project and a database of its own, which is gone afterwards; the front page, and the pages
about rules, held calls and outsiders, are those of the demo, after its two weeks.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"

import django

django.setup()

from django.test import override_settings
from django.test.runner import DiscoverRunner
from pytest_django.live_server_helper import LiveServer

from agentruns import approve, deny
from agentruns.models import Run
from agentruns.services.sweep import sweep
from agentruns.testing import DatabaseClock, frozen_clock
from tests import effects
from tests.admin.people import user
from tests.browser import chromium
from tests.browser.desk import CARD, CREDIT, MAIL, QUESTION, REFUND, TICKET, Desk
from tests.browser.visitor import INDEX, LOGIN, QUEUE, RUNS, WIDE, Visitors, call_path
from tests.e2e.demo_project import Project, console
from tests.shop.agents import call

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
DAY = datetime(2026, 11, 3, 14, 5, tzinfo=UTC)
EARLIER = (
    ("1001", 2490, "The cup arrived broken.", ""),
    ("0987", 18900, "Sent back unopened, in time.", ""),
    ("0991", 64900, "Wants the price of the sale.", "The sale began after the purchase."),
)


@contextmanager
def server() -> Iterator[str]:
    """Serve the tests' host project with an empty database; yield its URL."""
    runner = DiscoverRunner(verbosity=0, interactive=False)
    runner.setup_test_environment()
    databases = runner.setup_databases()
    with override_settings(ALLOWED_HOSTS=["127.0.0.1"], TIME_ZONE="UTC"):
        live = LiveServer("127.0.0.1")
        yield live.url
        live.stop()
    runner.teardown_databases(databases)
    runner.teardown_test_environment()


def take_demo(visitors: Visitors, folder: Path) -> None:
    """Take the pictures of the demo: its front page, its cards about rules, held calls and outsiders."""
    visitor = visitors("anonymous", size={**WIDE, "height": 860})
    page = visitor.open(f"{LOGIN}?next={INDEX}")
    page.get_by_label("Username").fill("demo")
    page.get_by_label("Password").fill("demo")
    visitor.click(page.get_by_role("button", name="Log in"))
    page.locator(".ar-figure--none", has_text="worker, seen").wait_for()
    page.screenshot(path=folder / "dashboard.png", animations="disabled")
    for name, height, title in (
        ("held", 720, "Refund 349.00 EUR to Emilia Novak"),
        ("outsider", 1060, "Refund 95.00 EUR to Ben Okafor"),
        ("rule-suggested", 760, "Voucher of 10.00 EUR to Anna Keller"),
    ):
        visitor.resize({"width": 760, "height": height})  # too narrow for the sidebar
        visitor.open(QUEUE)
        visitor.click(page.get_by_role("link", name=title))
        page.locator("h1", has_text=title).wait_for()
        if name == "outsider":
            visitor.click(page.locator("summary", has_text="read mail"))
        page.screenshot(path=folder / f"{name}.png", animations="disabled")
    visitor.click(visitor.button("Draft a rule from them"))
    visitor.click(visitor.link("New version"))
    page.get_by_label("Value").first.fill("4000")  # two cards more, on which people decided otherwise
    visitor.click(visitor.button("Write the draft"))
    visitor.click(visitor.button("Try on the past"))
    visitor.wait_for("Would have approved")
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=folder / "rule.png", animations="disabled")


def main(folder: Path = FOLDER) -> None:
    """Take every picture, and keep them only if the browser had nothing to complain about."""
    with tempfile.TemporaryDirectory() as scratch, server() as url:
        os.environ[effects.VARIABLE] = str(Path(scratch) / "effects.jsonl")
        with chromium.running() as browser, frozen_clock() as clock:
            clock.now = DAY
            visitors = Visitors(browser, url)
            take(visitors, Path(scratch), *day(clock))
            with console(Project(Path(scratch) / "demo")) as (_child, port):
                guests = Visitors(browser, f"http://127.0.0.1:{port}")
                take_demo(guests, Path(scratch))
                if complaints := [*visitors.leave(), *guests.leave()]:
                    raise SystemExit("\n".join(complaints))
        folder.mkdir(parents=True, exist_ok=True)
        for picture in sorted(Path(scratch).glob("*.png")):
            shutil.copy(picture, folder)
            print(f"{picture.name}  {picture.stat().st_size // 1000} kB")


def take(visitors: Visitors, folder: Path, card: Any, doubt: Any) -> None:
    """Take the pictures, as Maria sees the console."""
    for name, where, scheme in (
        ("queue", QUEUE, "light"),
        ("card", card, "light"),
        ("card-dark", card, "dark"),
        ("orphan", call_path(*doubt), "light"),
    ):
        page = visitors("maria", scheme=scheme).open(where)
        page.screenshot(path=folder / f"{name}.png", full_page=True, animations="disabled")
    take_history(visitors, folder)


def take_history(visitors: Visitors, folder: Path) -> None:
    """Take the pictures of a run that has ended, from the list on."""
    run = Run.objects.get(session__key="order-0987")
    reply = run.messages.filter(kind="assistant").latest("seq").seq
    visitor = visitors("maria")
    for name, where in (
        ("runs", RUNS + "?q=order-0987"),
        ("run", run),
        ("moment", f"{RUNS}{run.pk}/at/?seq={reply}"),
        ("replay", f"{RUNS}{run.pk}/replay/"),
        ("verified", run),
    ):
        page = visitor.open(where)
        if name == "replay":
            visitor.click(visitor.button("Replay"))
        elif name == "verified":
            visitor.choose("Verify chain")
        page.screenshot(path=folder / f"{name}.png", full_page=name != "run", animations="disabled")


def day(clock: DatabaseClock) -> tuple[Any, Any]:
    """Let a day at the desk pass; return the card and the call in doubt to look at."""
    desk, maria, jonas, ines = Desk(), user("superuser"), user("decider"), user("operator")
    maria.username, jonas.username, ines.username = "maria", "jonas", "ines"
    for person in (maria, jonas, ines):
        person.save()

    for order, cents, reason, refusal in EARLIER:
        refund = call("refund_order", order=order, cents=cents, reason=reason)
        approval = desk.one(refund, session=f"order-{order}", actor=jonas)
        clock.forward(minutes=9)
        if refusal:
            deny(approval.pk, maria, refusal, digest=approval.digest)
        else:
            approve(approval.pk, maria, digest=approval.digest)
        sweep()
    for number, (what, actor) in enumerate([(TICKET, ines), (QUESTION, jonas), (CARD, ines)], start=5):
        desk.one(what, session=f"ticket-{number}", actor=actor)
        clock.forward(minutes=38)
    doubt = desk.in_doubt(session="ticket-9")
    desk.one(CREDIT, session="ticket-10", actor=ines)
    clock.forward(minutes=11)
    card, _mail = desk.ask(REFUND, MAIL, session="ticket-4", actor=jonas)
    clock.forward(minutes=6)
    return card, doubt


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
