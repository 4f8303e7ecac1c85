"""The tools `wait_for_event` and `wait_until`, with which a model plans a wait of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import AwareDatetime, Field

from agentruns.exceptions import ToolRefused
from agentruns.tools.base import declared
from agentruns.tools.context import LONGEST_WAIT, Pending, ToolContext
from agentruns.tools.options import Options
from agentruns.utils.bounds import NAME_LENGTH, OWN_EVENTS

TIMER = f"{OWN_EVENTS}time"  # name of the event that `wait_until` waits for; nobody delivers it
TASK = f"{OWN_EVENTS}task"  # of the event that a task of an MCP server has ended; its key has both names

Name = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH)]


def _wait_for_event(
    name: Name,
    key: Name,
    timeout_seconds: Annotated[int, Field(ge=1, le=int(LONGEST_WAIT.total_seconds()))],
) -> Pending:
    """Wait until an event of the outside world is delivered. The result is what came with the event.

    If the time is over first, the result is {"timed_out": true}.

    Args:
        name: the kind of event, such as "delivery"
        key: which one of them, such as the number of an order
        timeout_seconds: how long to wait at most
    """
    if name.startswith(OWN_EVENTS):
        raise ToolRefused(f"{name!r} is no event to wait for: choose another name.")
    return Pending(key, timedelta(seconds=timeout_seconds), _name=name)


def _wait_until(ctx: ToolContext, at: AwareDatetime) -> Pending:
    """Wait until a time, and go on then. The result is the time at which the wait ended.

    Args:
        at: the time with its offset, such as "2027-03-01T09:00:00+01:00"
    """
    return Pending(_name=TIMER, _until=at)


WAITS = Options(safe_to_retry=True, parallel=True, only_waits=True)  # nothing can happen twice
wait_for_event = declared(_wait_for_event, "wait_for_event", None, WAITS, {})
wait_until = declared(_wait_until, "wait_until", None, WAITS, {})
