"""Helpers that most database tests use."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models.functions import Now
from django.utils import timezone

from agentruns import RunResult, ToolContext, run_agent, tool
from agentruns.engine import tool_calls
from agentruns.journal import events
from agentruns.journal.store import Batch
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.services.runs.write import write
from agentruns.testing import ScriptedModel, check_messages
from tests.effects import Effects
from tests.shop.agents import act, call, shop_agent
from tests.waiting import wait_for

# What a user says next, so that a conversation can be sent to a provider.
GO_ON = {"role": "user", "content": [{"type": "text", "text": "go on"}]}


class Checked(ScriptedModel):
    """Says its turns, and takes no conversation that Claude would refuse."""

    def propose(self, request: Any) -> Any:
        check_messages(request.messages)
        return super().propose(request)


def run_turns(*turns: object, text: str = "do it", session: str = "s1", **options: Any) -> RunResult:
    """Run a new agent whose model says `turns`, then "all done"."""
    agent = shop_agent(f"agent-{session}", *turns, **options)
    return run_agent(agent, text, session, idempotency_key=session)


def the_run(result: RunResult) -> Run:
    """Read the run of a result, and check its journal."""
    run = Run.objects.get(pk=result.run_id)
    assert problems(run.session_id) == []
    return run


def sound(run: Run) -> Run:
    """Read a run anew, and check its journal."""
    run.refresh_from_db()
    assert problems(run.session_id) == []
    return run


def only_the_first_is_late(
    patch: pytest.MonkeyPatch, is_at_work: Callable[[], object], times: int = 1
) -> None:
    """Let the time of a tool count for so many attempts, and from when each is at work in its handler.

    So on no slow machine an attempt is late before its handler was entered, nor the one after these.
    """
    waits = itertools.count()

    def wait(futures: Any, timeout: float | None = None, **how: Any) -> Any:
        is_timed = timeout is not None and next(waits) < times
        if is_timed:
            wait_for(is_at_work, "the handler")
        return concurrent.futures.wait(futures, timeout if is_timed else None, **how)

    patch.setattr(tool_calls, "wait", wait)


def payloads(run: Run, kind: str) -> list[dict[str, Any]]:
    """List the payloads of a run's rows of one kind."""
    rows = Message.objects.filter(run=run, kind=kind).order_by("seq")
    return [row.payload for row in rows]


def outcomes(run: Run) -> list[str]:
    """List the outcomes of a run's calls in the order they were settled."""
    return [payload["outcome"] for payload in payloads(run, "tool_result")]


def names(effects: Effects) -> list[str]:
    """List the tools that acted, in order."""
    return [line["tool"] for line in effects.lines()]


def user(name: str, *permissions: str, **fields: Any) -> User:
    """Make a user with agentruns permissions."""
    made = User.objects.create_user(name, password="secret", **fields)
    made.user_permissions.set(
        Permission.objects.filter(content_type__app_label="agentruns", codename__in=permissions)
    )
    return User.objects.get(pk=made.pk)


def forget_backoff(run: Run) -> None:
    """Let a run that waits for its provider be claimed now."""
    Run.objects.filter(pk=run.pk).update(not_before=Now() - timedelta(seconds=1))


def kill(run: Run) -> None:
    """Let the lease of a run look like that of a worker long dead."""
    Run.objects.filter(pk=run.pk).update(lease_expires_at=Now() - timedelta(seconds=1))


def run_out(approval: Approval, seconds: float = -1) -> None:
    """Let the time of a pending approval be over, or soon, for its row and its journal alike."""

    def change(run: Run, batch: Batch) -> None:
        end = events.timestamp(timezone.now() + timedelta(seconds=seconds))
        call = batch.state.run.calls[approval.call_id]
        batch.add(events.APPROVAL_EXTENDED, {"expires_at": end, "actor": None}, call=call)

    write(approval.run_id, change)


def everywhere() -> str:
    """Join every column of every table of the database to one text."""
    texts = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
            texts += [str(value) for row in cursor.fetchall() for value in row]
    return "\n".join(texts)


@tool(requires_approval=True, approvals=2)
def transfer(ctx: ToolContext, cents: int) -> str:
    """Transfer money once two people have approved it."""
    return act("transfer", ctx, cents=cents)


def transferring(**options: Any) -> tuple[RunResult, Approval]:
    """Run an agent until its transfer waits for two people; return the result and the card."""
    result = run_turns({"tools": [call("transfer", cents=5)]}, tools=[transfer], **options)
    return result, result.pending[0]
