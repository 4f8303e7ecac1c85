"""A death in this process, and what another process sees; tests/crash sends the real SIGKILL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections

from agentruns import run_agent
from agentruns.agents.agent import Agent
from agentruns.models import Run
from agentruns.testing import crashing_at
from tests.db.helpers import kill


def die_at(point: str, agent: Agent, session: str = "s1", nth: int = 1) -> Run:
    """Run an agent until its process dies the nth time it reaches a point; let its lease run out."""
    with crashing_at(f"{point}:{nth}"):
        run_agent(agent, "do it", session, idempotency_key=session)
    run = Run.objects.get(session__key=session)
    kill(run)
    return run


def elsewhere(ask: Callable[[], Any]) -> Any:
    """Ask over another connection, which sees only what is committed."""

    def look() -> Any:
        try:
            return ask()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(look).result()
