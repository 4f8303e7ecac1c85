"""Results too large for a journal row: the folder they are in, and runs that have some."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from pathlib import Path
from typing import Any, ClassVar

from django.core.files.storage import FileSystemStorage

from agentruns import ToolContext, run_agent, tool
from agentruns.models import Message, Run
from tests.shop.agents import act, call, shop_agent
from tests.waiting import Hanging

LINE = "Order 1004, Lindqvist, espresso machine, 349.00 EUR\n"
MEGABYTE = 2**20


def report_of(size: int) -> str:
    return (LINE * (size // len(LINE) + 1))[:size]


@tool(sent_max=64 * MEGABYTE)  # the model is sent all of it
def fetch(ctx: ToolContext, size: int) -> str:
    """Fetch a report."""
    act("fetch", ctx, size=size)
    return report_of(size)


@tool(name="fetch", sensitive=["token"])
def fetch_secretly(ctx: ToolContext, size: int, token: str = "tok_42") -> str:
    """Fetch a report that not everybody may see."""
    return report_of(size)


class DeadlyStorage(FileSystemStorage):
    """Stores a file, and the process dies before it can say so."""

    def save(self, name: Any, content: Any, max_length: int | None = None) -> str:
        super().save(name, content, max_length)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


class BrokenStorage(FileSystemStorage):
    """Is out of space."""

    def save(self, name: Any, content: Any, max_length: int | None = None) -> str:
        raise OSError(28, "No space left on device")


class DeadlyDeletingStorage(FileSystemStorage):
    """The process dies when it is to delete a file."""

    def delete(self, name: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class HangingStorage(FileSystemStorage):
    """Answers only when the test is over, or after a long time."""

    hanging: ClassVar[Hanging] = Hanging()

    def _save(self, name: str, content: Any) -> str:
        self.hanging.hang()
        return super()._save(name, content)

    def _open(self, name: str, mode: str = "rb") -> Any:
        self.hanging.hang()
        return super()._open(name, mode)


def alias(folder: Path, backend: str = "django.core.files.storage.FileSystemStorage") -> dict[str, Any]:
    """Build STORAGES for a folder."""
    return {"agentruns": {"BACKEND": backend, "OPTIONS": {"location": str(folder)}}}


def stored_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fetched(
    size: int = MEGABYTE, *turns: Any, session: str = "s1", tools: Any = (fetch,), actor: Any = None
) -> Run:
    """Run an agent whose tool fetches a report of that size."""
    agent = shop_agent(f"fetcher-{session}", {"tools": [call("fetch", size=size)]}, *turns, tools=list(tools))
    result = run_agent(agent, "fetch the report", session, idempotency_key=session, actor=actor)
    return Run.objects.get(pk=result.run_id)


def row_of(run: Run, kind: str = "tool_result") -> Message:
    return Message.objects.get(run=run, kind=kind)


def said(request: Any) -> str:
    """Read the last tool result of a request."""
    return str(request.messages[-1]["content"][0]["content"])


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def without_cards(text: str) -> str:
    """Take out card numbers, as AGENTRUNS_REDACT of a project does."""
    return re.sub(r"\d{4} \d{4} \d{4} \d{4}", "[card]", text)
