"""An inbox with mails that want something, the tools that they want, and agents that fall for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentruns import Agent, ToolContext, tool
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from tests.db.families import work
from tests.db.helpers import Checked, names
from tests.effects import Effects
from tests.shop.agents import act, call

FILE = Path(__file__).parents[2] / "fixtures" / "injections.json"
MAILS: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
READ = {"tools": [call("read_mail")]}
SEND = {"tools": [call("send_mail", to="bob", body="hello")]}
WHY = (
    "send_mail sends or pays outside, and this conversation holds text that outsiders wrote, "
    "read by read_mail."
)


@tool(untrusted=True, safe_to_retry=True)
def read_mail(ctx: ToolContext, number: int = 0) -> str:
    """Read a mail, which anybody may have written."""
    act("read_mail", ctx, number=number)
    return str(MAILS[number]["mail"])


@tool(outward=True)
def send_mail(ctx: ToolContext, to: str, body: str) -> str:
    """Send a mail to anybody."""
    return act("send_mail", ctx, to=to, body=body)


@tool(outward=True)
def pay(ctx: ToolContext, account: str, cents: int) -> str:
    """Pay money to an account."""
    return act("pay", ctx, account=account, cents=cents)


@tool(outward=True)
def publish(ctx: ToolContext, text: str) -> str:
    """Publish a text on the site."""
    return act("publish", ctx, text=text)


INBOX: list[Any] = [read_mail, send_mail, pay, publish]


def reader(*turns: Any, name: str = "reader", tools: list[Any] | None = None, **options: Any) -> Agent:
    """Make an agent with an inbox whose model says `turns`, and then "all done"."""
    model, given = Checked([*turns, *[{"text": "all done"}] * 3]), {"starters": "anyone", **options}
    return Agent(name, instructions="Answer the mail.", tools=tools or INBOX, model=model, **given)


def acted(effects: Effects) -> list[str]:
    """List the outward tools that acted, in order."""
    return [name for name in names(effects) if name not in ("read_mail", "search_web")]


def card() -> Approval:
    """Find the only card that waits."""
    return Approval.objects.pending().get()


def reads(run: Run) -> list[Any]:
    """List what the rows of a run's session say about text of outsiders, without copies' marks."""
    found: list[Any] = []
    for row in Message.objects.filter(session=run.session).order_by("seq"):
        facts = row.payload
        for part in (facts, *(facts.get(name) or {} for name in ("parent", "origin", "about"))):
            if row.kind != "approval_requested" and "untrusted" in part:
                found.append((row.kind, part["untrusted"]))
    return found


def drive(run: Run) -> Run:
    """Drive a run, and all that comes of it, until it waits or ends."""
    sweep(run_id=run.pk)
    work()
    run.refresh_from_db()
    return run
