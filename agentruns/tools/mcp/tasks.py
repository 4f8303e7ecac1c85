"""The protocol's tasks for the MCP SDK: a server answers a call with a task, and is polled for the result."""

from __future__ import annotations

from typing import Annotated, Literal

from mcp import types  # noqa: TID253 - imported by the first session
from pydantic import Field


class Task(types.Result):
    """A server's answer to a poll. The id fits into the key of an event, and into a header."""

    task_id: Annotated[str, Field(pattern="^[!-~]{1,150}$")]
    status: Literal["working", "completed", "failed", "cancelled", "input_required"]
    status_message: str | None = None
    poll_interval_ms: int | None = None
    result: types.CallToolResult | None = None
    error: types.ErrorData | None = None

    @property
    def pace(self) -> float:
        """The seconds until the next poll: as the server asks, from one second to an hour."""
        return min(max(self.poll_interval_ms or 5_000, 1_000), 3_600_000) / 1000


class Created(Task):
    """A server's answer to a call on which it goes on to work."""

    result_type: Literal["task"]


class GetTask(types.GetTaskRequest):
    """A poll. Over HTTP a header has the task's id, too, by which a gateway finds the server."""

    name_param = "taskId"
