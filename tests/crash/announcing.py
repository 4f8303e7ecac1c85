"""A process whose project never comes back from being told of a commit: it is killed in its own code."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

import django

django.setup()

from django.conf import settings
from django.db import transaction
from django.db.models.signals import post_save

from agentruns import ToolContext, signals, tool
from agentruns.models import Approval
from tests.crash.child import Orders, serve
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent


def die(*arguments: object, **facts: object) -> None:
    """Show outside that the project's code was reached, and end the process."""
    Effects.from_environment().record("told", tool="told")
    os.kill(os.getpid(), signal.SIGKILL)


class Listener:
    """A telemetry listener that is killed by a verdict."""

    def span(self, name: str, facts: dict[str, Any]) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self, name: str, facts: dict[str, Any]) -> None:
        if name == "verdict":
            die()

    def carried(self) -> AbstractContextManager[object]:
        return nullcontext()


@tool(transactional=True)
def write(ctx: ToolContext) -> str:
    """Write, and tell others once it is committed."""
    if os.environ.get("TOLD") == "hook":
        transaction.on_commit(die)
    return "written"


def later(sender: type, **facts: object) -> None:
    """Do something once what was saved is committed, as a project's receivers do."""
    transaction.on_commit(die)


shop_agent("asks-after-a-post", {"tools": [call("post", text="hello"), call("refund", cents=5000)]})
shop_agent("charges-then-posts", {"tools": [call("charge", cents=500), call("post", text="hello")]})
shop_agent("writes-then-posts", {"tools": [call("write"), call("post", text="hello")]}, tools=[*TOOLS, write])


def perform(orders: Orders, pipe: Connection) -> None:
    """Do what is ordered, in a project that is told of commits as the variable TOLD says."""
    told = orders.environment["TOLD"]
    if told == "notifier":
        settings.AGENTRUNS_NOTIFIERS = [f"{__name__}.die"]
    elif told == "signal":
        signals.approval_requested.connect(die)
    elif told == "model signal":
        post_save.connect(later, sender=Approval)
    elif told == "telemetry":
        settings.AGENTRUNS_TELEMETRY = f"{__name__}.Listener"
    serve(orders, pipe)
