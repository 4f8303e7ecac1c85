"""agentruns: `resume_runs` takes over; what it does with a call in doubt is the tool's declaration."""

from __future__ import annotations

import os
import time
from typing import Any

import django

from benchmarks.kill_comparison import world

WENT_ON = {"held": "by asking a person", "reconcile": "by asking the ledger"}


def declare(variant: str, url: str) -> Any:
    """Set Django up and return the agent."""
    os.environ["BENCHMARK_DATABASE"] = url
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.kill_comparison.settings"
    django.setup()
    from agentruns import Agent, NotOccurred, Occurred, ToolContext, tool
    from agentruns.providers.scripted import ScriptedModel

    def ask(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
        known = world.happened(ctx.tool_name, ctx.idempotency_key)
        return Occurred(world.told(ctx.tool_name)) if known else NotOccurred()

    @tool
    def find_order(ctx: ToolContext) -> str:
        """Find the order."""
        return world.act("find_order", ctx.idempotency_key)

    @tool(reconcile=ask if variant.endswith("reconcile") else None)
    def charge_card(ctx: ToolContext) -> str:
        """Charge the card."""
        return world.act("charge_card", ctx.idempotency_key)

    @tool
    def send_receipt(ctx: ToolContext) -> str:
        """Send the receipt."""
        return world.act("send_receipt", ctx.idempotency_key)

    turns = [{"tools": [{"name": name, "input": {}}]} for name in world.TOOLS]
    model = ScriptedModel([*turns, {"text": "fulfilled"}])
    return Agent("fulfil", instructions="", tools=[find_order, charge_card, send_receipt], model=model)


def start(variant: str, url: str) -> None:
    """Run the agent."""
    from django.core.management import call_command

    agent = declare(variant, url)
    call_command("migrate", verbosity=0)
    agent.run(world.ORDER, world.ORDER, idempotency_key=world.ORDER)


def recover(variant: str, url: str) -> world.Outcome:
    """Sweep as `manage.py resume_runs` does; a person who is asked looks into the ledger and says so."""
    declare(variant, url)
    from agentruns import resolve_orphan
    from agentruns.models import Message, Run

    run = swept()
    [doubt] = Message.objects.filter(run=run, kind="orphan_found")
    action, ended = doubt.payload["action"], run.status
    if ended == Run.Status.ORPHANED:
        resolve_orphan(run.pk, doubt.call_id, "occurred", None, result=world.told(doubt.tool_name))
        ended += f"; once told 'it happened': {swept().status}"
    return world.Outcome(WENT_ON[action], f"orphan of {doubt.tool_name}: {action}", ended)


def swept() -> Any:
    """Return the run once it has ended or waits for a person."""
    from agentruns.models import Run
    from agentruns.services.sweep import sweep

    until = time.monotonic() + world.PATIENCE
    while time.monotonic() < until:
        sweep()
        run = Run.objects.get()
        if run.status not in (Run.Status.QUEUED, Run.Status.RUNNING):
            return run
        time.sleep(0.1)
    raise world.NotRecovered(f"The run is still {run.status}.")
