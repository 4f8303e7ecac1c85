"""Runs in every state that a person meets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from agentruns import ToolContext, run_agent, start_run, tool
from agentruns.agents.agent import get_agent
from agentruns.models import Approval, Run, Session
from agentruns.services.runs.control import pause_run
from tests.admin.people import user
from tests.shop.agents import TOOLS, act, call, shop_agent

TURN = {"tools": [call("post", text="hi")]}


@tool(name="refund", requires_approval=True, expires_in=timedelta(hours=1))
def timed(ctx: ToolContext, cents: int) -> str:
    """Refund, if somebody says so within an hour."""
    return act("refund", ctx, cents=cents)


@tool(name="refund", requires_approval=True, sensitive=["iban"])
def secretive(ctx: ToolContext, cents: int, iban: str = "DE02-secret") -> str:
    """Refund to an account that not everybody may see."""
    return act("refund", ctx, cents=cents, iban=iban)


class World:
    """Makes runs; every agent is over the shop's tools."""

    def waiting(
        self, session: str = "waiting", cents: int = 5000, actor: Any = None, tools: Any = None
    ) -> Approval:
        """A run that waits for a refund to be approved; by another tool of that name, if one is given."""
        given = {"tools": tools} if tools else {}
        agent = shop_agent(f"gated-{session}", {"tools": [call("refund", cents=cents)]}, **given)
        result = run_agent(agent, "refund the lamp", session, actor=actor, idempotency_key=session)
        assert result.status == "awaiting-approval", result
        return result.pending[0]

    def orphaned(self, session: str = "orphaned") -> Run:
        """A run with a call that nobody knows the outcome of."""
        agent = shop_agent(f"orphan-{session}", {"tools": [call("dies")]}, tools=[dying()])
        return self._run(run_agent(agent, "post it", session), "orphaned")

    def paused(self, session: str = "paused") -> Run:
        """A run that somebody paused."""
        agent = shop_agent(f"paused-{session}", TURN)
        run = start_run(agent, "post it", session, actor=user("superuser"))
        return pause_run(run.pk, None, reason="the bank is down")

    def queued(self, session: str = "queued") -> Run:
        """A run that waits for a worker."""
        agent = shop_agent(f"queued-{session}", TURN)
        return start_run(agent, "post it", session)

    def blocked(self, session: str = "blocked") -> Run:
        """A run whose agent has changed since, before any worker saw the run."""
        run = self.queued(session)
        shop_agent(run.agent, TURN, max_steps=7)
        return run

    def completed(self, session: str = "completed") -> Run:
        """A run that did one thing and ended."""
        agent = shop_agent(f"completed-{session}", TURN)
        return self._run(run_agent(agent, "post it", session), "completed")

    def _run(self, result: Any, status: str) -> Run:
        assert result.status == status, result
        return Run.objects.get(pk=result.run_id)


def ran(
    name: str, *turns: Any, text: str = "do it", session: str = "s1", actor: Any = None, **options: Any
) -> Run:
    """Run an agent whose model says these turns."""
    agent = shop_agent(name, *turns, **options)
    return Run.objects.get(pk=run_agent(agent, text, session, actor=actor).run_id)


def asked(*calls: Any, name: str = "asking", tools: Any = TOOLS, actor: Any = None) -> list[Approval]:
    """Run an agent that makes these calls in one reply, and list what waits for a decision."""
    agent = shop_agent(name, {"tools": [*calls]}, tools=tools)
    return run_agent(agent, "go", name, actor=actor).pending


def many(run: Run, count: int) -> None:
    """Put copies of an ended run into the list."""
    sessions = [Session(key=f"copy-{number}") for number in range(count)]
    Session.objects.bulk_create(sessions)
    names = {field.attname for field in Run._meta.concrete_fields} - {"id", "session_id"}
    columns = {name: getattr(run, name) for name in names}
    Run.objects.bulk_create(Run(session=session, **columns) for session in sessions)


def waiting(name: str, agent: str = "", hours: int = 0, actor: Any = None, **options: Any) -> Approval:
    """A call of a tool of this name and of these options, which expires after so many hours."""

    def act(number: int = 1) -> str:
        """Act."""
        return "acted"

    lifetime = timedelta(hours=hours) if hours else None
    made = tool(name=name, requires_approval=True, expires_in=lifetime, **options)(act)
    return asked(call(name), name=f"agent-{agent or name}", tools=[made], actor=actor)[0]


def dying() -> Any:
    """A tool whose worker is gone before it returns."""

    @tool
    def dies() -> str:
        """Act, and die before saying so."""
        raise MemoryError("killed")

    return dies


def drifted(world: World, **options: Any) -> Run:
    """A queued run whose agent is another one by now."""
    run = world.queued()
    shop_agent(run.agent, TURN, **(options or {"max_steps": 7}))
    return run


def seen(run: Run) -> dict[str, Any]:
    """Build the hidden values of the form to adopt a definition, for a page that is opened now."""
    return {"hash": get_agent(run.agent).definition_hash, "seq": run.messages.latest("seq").seq}


def status(run: Run) -> str:
    """Read the status of a run anew."""
    run.refresh_from_db()
    return run.status
