"""DBOS: a workflow, and a step for each model call and each tool call."""

from __future__ import annotations

import os
import time
from typing import Any
from uuid import uuid4

from dbos import DBOS, DBOSConfig, SetWorkflowID

from benchmarks.workload import Workload

VARIANTS = ("dbos-postgresql", "dbos-sqlite")

workload: Workload
stamps: list[float]


@DBOS.step()
def ask_model() -> dict[str, Any]:
    """Return the next reply."""
    stamps.append(time.perf_counter())
    text, calls = workload.reply(len(stamps) - 1)
    return {"role": "assistant", "content": text, "calls": calls}


@DBOS.step()
def look_up(query: str) -> str:
    """Return what the workload says."""
    return workload.result(int(query))


@DBOS.workflow()
def converse(prompt: str) -> str:
    """Go on until the model asks for no tool."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    while True:
        reply = ask_model()
        messages.append(reply)
        if not reply["calls"]:
            return reply["content"]
        for call, query in reply["calls"]:
            messages.append({"role": "tool", "call": call, "content": look_up(query)})


def launch(url: str, executor: str = "local") -> None:
    """Start DBOS on a database, whose tables it makes, and resume what an executor of that name left."""
    place = url if url.startswith("postgres") else f"sqlite:///{url}"
    # A version of its own, as the documentation advises, saves it the hashing of the source.
    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": place,
        "application_version": "1",
        "executor_id": executor,
        "log_level": "WARNING",
    }
    DBOS(config=config)
    DBOS.launch()


def prepare(variant: str, url: str) -> None:
    """Start DBOS."""
    launch(url, f"bench{os.getpid()}")


def run(given: Workload) -> list[float]:
    """Call the workflow and wait for it, in this thread."""
    global workload, stamps
    workload, stamps = given, []
    with SetWorkflowID(str(uuid4())):
        converse("Look it all up.")
    return [*stamps, time.perf_counter()]
