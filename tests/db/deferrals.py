"""An agent whose refunds are deferred, and what became of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agentruns import Agent, ToolContext, start_run, tool
from agentruns.journal.verify import problems
from agentruns.models import Event, Message, Run, Session
from agentruns.services.sweep import sweep
from tests.db.helpers import Checked
from tests.shop.agents import TOOLS, act, call

REFUND = {"tools": [call("give_back", cents=5000)]}
SMALL = {"tools": [call("give_back", cents=5)]}
SAID = {"text": "A colleague looks at it."}
HEARD = {"text": "It is decided."}


@tool(requires_approval=lambda args, ctx: args["cents"] > 1000, deferred=True)
def give_back(ctx: ToolContext, cents: int) -> str:
    """Give money back."""
    return act("give_back", ctx, cents=cents, session=ctx.session_key)


class Talks(Checked):
    """Says its turns over all runs of a conversation."""

    def propose(self, request: Any) -> Any:
        said = sum(message["role"] == "assistant" for message in request.messages)
        return super().propose(replace(request, step=said))


def desk(*turns: object, name: str = "desk", tools: list[Any] | None = None, **options: Any) -> Agent:
    """Make an agent whose model says `turns`, and takes no conversation that Claude would refuse."""
    script = [*(turns or [REFUND, SAID, HEARD]), *[{"text": "all done"}] * 3]
    given: dict[str, Any] = {"instructions": "Serve the shop.", "starters": "anyone", **options}
    return Agent(name, tools=tools or [give_back, *TOOLS], model=Talks(script), **given)


def ask(agent: Agent, text: str = "my money", session: str = "s1", **options: Any) -> tuple[Run, Run]:
    """Start a run that defers a call; return both the run and the run of the call."""
    run = start_run(agent, text, session, **options)
    sweep(run_id=run.pk)
    run.refresh_from_db()
    return run, Run.objects.filter(parent=run).latest("created_at")


def told(session: str = "s1") -> list[dict[str, Any]]:
    """List the messages about deferred calls in a session."""
    rows = Message.objects.own().filter(session__key=session, kind="user").order_by("seq")
    return [row.payload for row in rows if "about" in row.payload]


def text_of(message: dict[str, Any]) -> str:
    """Read the text of a message, as the model does."""
    return f"{message['content'][0]['text']}\n{message['about']['detail']}"


def sound() -> None:
    """Check every journal, and that each deferred call was told once or is still to be told."""
    for session in Session.objects.all():
        assert problems(session.pk) == []


def due_now() -> None:
    """Let every wait be over."""
    Event.objects.unsettled().exclude(due_at=None).update(due_at="2020-01-01T00:00:00Z")
