"""Absurd: a task, and a step for each model call and each tool call; its worker runs in this process."""

from __future__ import annotations

import os
import time
from typing import Any

import absurdctl
import psycopg
from absurd_sdk import Absurd, TaskContext

from benchmarks.workload import Workload

VARIANTS = ("absurd-postgresql",)

app: Absurd
workload: Workload
stamps: list[float]


def ask_model() -> dict[str, Any]:
    """Return the next reply."""
    stamps.append(time.perf_counter())
    text, calls = workload.reply(len(stamps) - 1)
    return {"role": "assistant", "content": text, "calls": calls}


def converse(params: dict[str, Any], context: TaskContext) -> str:
    """Go on until the model asks for no tool."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": params["prompt"]}]
    while True:
        reply = context.step("model", ask_model)
        messages.append(reply)
        if not reply["calls"]:
            return reply["content"]
        for call, query in reply["calls"]:
            content = context.step("look_up", lambda query=query: workload.result(int(query)))
            messages.append({"role": "tool", "call": call, "content": content})


def launch(url: str, queue: str = "default") -> Absurd:
    """Return a client of a queue on a database, with the schema that `absurdctl init` makes."""
    with psycopg.connect(url) as connection:
        if connection.execute("SELECT to_regnamespace('absurd')").fetchone() == (None,):
            connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
    client = Absurd(url, queue)
    client.create_queue()
    return client


def prepare(variant: str, url: str) -> None:
    """Connect, and say what the task is; each process works on a queue of its own."""
    global app
    app = launch(url, f"bench{os.getpid()}")
    app.register_task("converse")(converse)


def run(given: Workload) -> list[float]:
    """Spawn the task and work on it: nothing waits for a worker to poll."""
    global workload, stamps
    workload, stamps = given, []
    task = app.spawn("converse", {"prompt": "Look it all up."})
    app.work_batch()
    result = app.fetch_task_result(task["task_id"])
    if result is None or result.state != "completed":
        raise RuntimeError(f"The task is not completed: {result}")
    return [*stamps, time.perf_counter()]
