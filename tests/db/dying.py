"""A death in this process, and what another process sees; tests/crash sends the real SIGKILL."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
from django.db import connections

import agentruns.engine.loop
import agentruns.engine.tool_calls
from agentruns import run_agent
from agentruns.agents.agent import Agent
from agentruns.engine.leases import Lease
from agentruns.models import Run
from tests.db.helpers import kill


class Death(BaseException):
    """Nothing in the package handles it: the drive stops where it stands, its lease is not given back."""


def die_at(point: str, agent: Agent, session: str = "s1", nth: int = 1) -> Run:
    """Run an agent until it dies the nth time it reaches a point, and let its lease run out."""
    left = [nth]

    def reached(at: str) -> None:
        left[0] -= at == point
        if at == point and left[0] == 0:
            raise Death(point)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agentruns.engine.loop, "reached", reached)
        patch.setattr(agentruns.engine.tool_calls, "reached", reached)
        patch.setattr(Lease, "release", lambda lease, **how: None)
        with pytest.raises(Death):
            run_agent(agent, "do it", session, idempotency_key=session)
    run = Run.objects.get(session__key=session)
    kill(run)
    return run


def elsewhere(ask: Callable[[], Any]) -> Any:
    """Return what another connection sees: only what is committed."""
    answers: list[Any] = []

    def look() -> None:
        try:
            answers.append(ask())
        finally:
            connections.close_all()

    thread = Thread(target=look)
    thread.start()
    thread.join()
    return answers[0]
