"""agentruns itself: with prepared statements, as recommended, and as Django connects by default."""

from __future__ import annotations

import os
import time
from typing import Any
from uuid import uuid4

import django

from benchmarks.workload import Workload

VARIANTS = (
    "agentruns-postgresql",
    "agentruns-postgresql-unprepared",
    "agentruns-sqlite",
    "agentruns-sqlite-memory",
)

agent: Any = None
model: Any = None


class Instant:
    """A model that answers at once with what the workload says."""

    workload: Workload
    stamps: list[float]

    def propose(self, request: Any) -> Any:
        """Return the reply of a step."""
        from agentruns import ModelReply

        self.stamps.append(time.perf_counter())
        text, calls = self.workload.reply(request.step)
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        content += [
            {"type": "tool_use", "id": call, "name": "lookup", "input": {"query": query}}
            for call, query in calls
        ]
        return ModelReply(content, "tool_use" if calls else "end_turn", model="instant")


def prepare(variant: str, url: str) -> None:
    """Set Django up, make the tables, declare the agent."""
    global agent, model
    os.environ["BENCHMARK_DATABASE"] = url
    os.environ["BENCHMARK_PREPARED"] = "1" if variant == "agentruns-postgresql" else ""
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    django.setup()
    from django.core.management import call_command

    from agentruns import Agent, tool

    call_command("migrate", verbosity=0)

    @tool
    def lookup(query: str) -> str:
        """Return what the workload says."""
        return model.workload.result(int(query))

    model = Instant()
    agent = Agent("bench", instructions="Look things up.", tools=[lookup], model=model, max_steps=10**6)


def run(workload: Workload) -> list[float]:
    """Drive one run in a session of its own."""
    model.workload, model.stamps = workload, []
    result = agent.run("Look it all up.", f"bench-{uuid4()}")
    if result.status != "completed":
        raise RuntimeError(f"The run is {result.status}: {result}")
    return [*model.stamps, time.perf_counter()]
