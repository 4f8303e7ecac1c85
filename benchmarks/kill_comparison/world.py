"""The order that every system fulfils in three steps, and the world outside, which no database rolls back."""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from agentruns.testing import EffectsLedger

ORDER = "order-7"
TOOLS = ("find_order", "charge_card", "send_receipt")
LEASE_SECONDS = 2  # where a system waits for a dead worker; by default that takes minutes
PATIENCE = 30  # seconds within which a system has to recover
DIES = "KILL_COMPARISON_DIES"
BY_ITSELF = "by itself"


class Outcome(NamedTuple):
    """What a recovery came to: how it went on, what the system's own record says of the charge, the end."""

    went_on: str
    record: str
    ended: str


class NotRecovered(Exception):
    """A run did not end, and nobody was asked, within PATIENCE."""


def propose(step: int) -> str | None:
    """Return the tool that the model asks for in a step; None when it is done."""
    return TOOLS[step] if step < len(TOOLS) else None


def act(tool: str, key: str) -> str:
    """Do outside what a tool is for. The first process dies when the card is charged and nobody knows yet."""
    EffectsLedger.from_environment().record(tool, idempotency_key=key)
    if tool == "charge_card" and os.environ.get(DIES):
        os.kill(os.getpid(), signal.SIGKILL)
    return told(tool)


def told(tool: str) -> str:
    """Return what a tool says when it is done."""
    return f"{tool}: done"


def happened(tool: str, key: str) -> bool:
    """Return whether the world outside knows of an idempotency key."""
    lines = EffectsLedger.from_environment().lines()
    return any(line["key"] == tool and line["idempotency_key"] == key for line in lines)
