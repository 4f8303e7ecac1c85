"""pydantic-ai made durable by DBOS: model calls are steps by themselves, the tool is declared one."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

from dbos import DBOS, SetWorkflowID
from pydantic_ai import Agent
from pydantic_ai.durable_exec.dbos import DBOSDurability
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.usage import UsageLimits

from benchmarks.systems.dbos import launch
from benchmarks.workload import Workload

VARIANTS = ("pydantic-ai-dbos-postgresql", "pydantic-ai-dbos-sqlite")

loop = asyncio.Runner()
workload: Workload
stamps: list[float]


async def instant(messages: Any, info: Any) -> ModelResponse:
    """Return the next reply."""
    stamps.append(time.perf_counter())
    text, calls = workload.reply(len(stamps) - 1)
    asked = [ToolCallPart("search", {"query": query}, tool_call_id=call) for call, query in calls]
    return ModelResponse(parts=[TextPart(text), *asked])


agent = Agent(FunctionModel(instant), name="bench", capabilities=[DBOSDurability()])


@agent.tool_plain
@DBOS.step()
async def search(query: str) -> str:
    """Return what the workload says."""
    return workload.result(int(query))


@DBOS.workflow()
async def answer(prompt: str) -> str:
    """Run the agent, without the limit of 50 requests that it has by default."""
    result = await agent.run(prompt, usage_limits=UsageLimits(request_limit=None))
    return result.output


def prepare(variant: str, url: str) -> None:
    """Start DBOS."""
    launch(url)


def run(given: Workload) -> list[float]:
    """Call the workflow and wait for it."""
    global workload, stamps
    workload, stamps = given, []

    async def call() -> None:
        with SetWorkflowID(str(uuid4())):
            await answer("Look it all up.")

    loop.run(call())
    return [*stamps, time.perf_counter()]
