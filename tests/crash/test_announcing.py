"""SIGKILL in a project's own code that a commit calls: no call counts as started that nobody entered."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import transaction

from agentruns import ToolContext, approve, signals, tool
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message
from agentruns.services.sweep import sweep
from tests.crash import child
from tests.crash.processes import die
from tests.db.helpers import names, outcomes
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def fall(*arguments: object, **facts: object) -> None:
    """Show outside that the project's code was reached, and end the process."""
    Effects.from_environment().record("told", tool="told")
    os.kill(os.getpid(), signal.SIGKILL)


class Listener:
    """A telemetry listener that is killed by a verdict."""

    def span(self, name: str, facts: dict[str, Any]) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self, name: str, facts: dict[str, Any]) -> None:
        if name == "verdict":
            fall()

    def carried(self) -> AbstractContextManager[object]:
        return nullcontext()


@tool(transactional=True)
def write(ctx: ToolContext) -> str:
    """Write, and tell others once it is committed."""
    if os.environ.get("TOLD") == "hook":
        transaction.on_commit(fall)
    return "written"


shop_agent("asks-after-a-post", {"tools": [call("post", text="hello"), call("refund", cents=5000)]})
shop_agent("charges-then-posts", {"tools": [call("charge", cents=500), call("post", text="hello")]})
shop_agent("writes-then-posts", {"tools": [call("write"), call("post", text="hello")]}, tools=[*TOOLS, write])


def perform(orders: child.Orders, pipe: Connection) -> None:
    """Do what is ordered, in a project that is told of commits as the variable TOLD says."""
    told = orders.environment["TOLD"]
    if told == "notifier":
        django_settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.fall"]
    elif told == "signal":
        signals.approval_requested.connect(fall)
    elif told == "telemetry":
        django_settings.AGENTRUNS_TELEMETRY = f"{__name__}.Listener"
    child.serve(orders, pipe)


@pytest.mark.parametrize("told", ["notifier", "signal"])
def test_a_card_is_told_of_before_the_call_beside_it_starts(told: str, effects: Effects) -> None:
    run = die("run", "asks-after-a-post", "s1", serve=perform, TOLD=told)
    assert names(effects) == ["told"]
    assert not Message.objects.filter(run=run, kind="tool_started").exists()
    sweep()
    run.refresh_from_db()
    assert (run.status, names(effects)) == ("awaiting-approval", ["told", "post"]), "nothing is in doubt"
    approve(Approval.objects.get().pk, None)
    assert sweep().completed == 1
    assert (outcomes(run), names(effects)) == (["ok", "ok"], ["told", "post", "refund"])
    assert problems(run.session_id) == []


def test_a_verdict_is_told_of_before_the_next_call_starts(effects: Effects) -> None:
    die("run", "charges-then-posts", "s1", at="charge:after", serve=perform, TOLD="nothing")
    run = die("sweep", serve=perform, TOLD="telemetry")
    assert names(effects) == ["charge", "told"]
    assert sweep().completed == 1
    assert (outcomes(run), names(effects)) == (["ok", "ok"], ["charge", "told", "post"])
    assert problems(run.session_id) == []


def test_a_handlers_own_hook_runs_before_the_next_call_starts(effects: Effects) -> None:
    run = die("run", "writes-then-posts", "s1", serve=perform, TOLD="hook")
    assert (outcomes(run), names(effects)) == (["ok"], ["told"])
    assert sweep().completed == 1
    assert (outcomes(run), names(effects)) == (["ok", "ok"], ["told", "post"])
    assert problems(run.session_id) == []
