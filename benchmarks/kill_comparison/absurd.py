"""Absurd: a task whose claim has expired "becomes available for another worker to pick up"."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from absurd_sdk import Absurd, TaskContext

from benchmarks.kill_comparison import world
from benchmarks.systems.absurd import launch


def fulfil(params: dict[str, Any], context: TaskContext) -> str:
    """Go on until the model asks for no tool."""
    step = 0
    while name := context.step("model", lambda step=step: world.propose(step)):
        context.step(name, lambda name=name: world.act(name, f"{context.task_id}:{name}"))
        step += 1
    return "fulfilled"


def spawn(url: str) -> tuple[Absurd, str]:
    """Return a client and the id of the task, which is the same one each time."""
    app = launch(url)
    app.register_task("fulfil")(fulfil)
    return app, app.spawn("fulfil", {}, idempotency_key=world.ORDER)["task_id"]


def start(variant: str, url: str) -> None:
    """Spawn the task and work on it."""
    app, _ = spawn(url)
    app.work_batch(claim_timeout=world.LEASE_SECONDS)


def recover(variant: str, url: str) -> world.Outcome:
    """Work as another worker until the task has ended."""
    app, task = spawn(url)
    until = time.monotonic() + world.PATIENCE
    while True:
        app.work_batch(claim_timeout=world.LEASE_SECONDS)
        result = app.fetch_task_result(task)
        if result is not None and result.state in ("completed", "failed", "cancelled"):
            return world.Outcome(world.BY_ITSELF, _record(url, task), result.state)
        if time.monotonic() > until:
            raise world.NotRecovered(f"The task is still {result}.")
        time.sleep(0.1)


def _record(url: str, task: str) -> str:
    with psycopg.connect(url) as connection:
        runs = connection.execute(
            "SELECT state, failure_reason->>'name' FROM absurd.r_default WHERE task_id = %s ORDER BY attempt",
            [task],
        ).fetchall()
        [charges] = connection.execute(
            "SELECT count(*) FROM absurd.c_default WHERE task_id = %s AND checkpoint_name = %s",
            [task, "charge_card"],
        ).fetchone() or [0]
    attempts = ", ".join(f"{state} ({failure})" if failure else state for state, failure in runs)
    return f"{charges} checkpoint; attempts: {attempts}"
