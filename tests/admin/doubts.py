"""Calls of unknown outcome, and what staff do about them, for the console's tests."""

from __future__ import annotations

import threading
from html import unescape
from typing import Any

import pytest
from django.db import connections

from agentruns import ToolContext, resume_run, run_agent, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, says, url
from tests.admin.people import browser
from tests.db.helpers import kill, only_the_first_is_late
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent
from tests.waiting import LIMIT, wait_for

EVIDENCE = "the bank's statement of today"


@tool
def wire(ctx: ToolContext, text: str) -> str:
    """Send a wire. Of the first attempt nobody knows whether it went out."""
    Effects.from_environment().record(ctx.idempotency_key, tool="wire", attempt=ctx.attempt)
    if ctx.attempt == 1:
        raise ToolDurabilityError(f"no answer to {text}")
    return "wired"


def start(*turns: Any, session: str = "s1", key: str = "", tools: Any = (), **options: Any) -> Run:
    """A run driven as far as it goes."""
    key = key or session
    agent = shop_agent(f"agent-{key}", *turns, tools=[*TOOLS, wire, *tools], **options)
    result = run_agent(agent, "do it", session, idempotency_key=key)
    return Run.objects.get(pk=result.run_id)


def in_doubt(*later: Any, session: str = "s1", text: str = "x", **options: Any) -> Run:
    """A run whose wire is in doubt, and that waits for staff."""
    run = start({"tools": [call("wire", text=text), *later]}, session=session, **options)
    assert run.status == "orphaned"
    return run


def uncleared(session: str = "s1") -> Run:
    """A run that ended after its model was told that the outcome of a wire is unknown."""
    run = in_doubt(session=session)
    assert resume_run(run.pk).status == "completed"
    run.refresh_from_db()
    return run


def doubtful(run: Run) -> str:
    """The call in doubt, or what once was."""
    return str(run.messages.filter(kind="orphan_found").values_list("call_id", flat=True)[0])


def card(run: Run, *texts: str, role: str = "superuser") -> Page:
    """Read the card of the call in doubt as a role sees it, and check that it says these texts."""
    return says(browser(role).get(url(run, "call", doubtful(run))), *texts)


def last(run: Run, call_id: str) -> int:
    """The last row about a call: what a page rendered now carries."""
    return int(run.messages.filter(call_id=call_id).order_by("-seq").values_list("seq", flat=True)[0])


def give(run: Run, verdict: str, role: str = "superuser", call_id: str = "", **changed: Any) -> Any:
    """Press a verdict's button, of the call in doubt if none is named."""
    call_id = call_id or doubtful(run)
    data = {"seq": last(run, call_id), "verdict": verdict, "result": "", "evidence": EVIDENCE, **changed}
    return browser(role).post(url(run, "resolve", call_id), data, follow=True)


def payload(run: Run, kind: str, place: int = 0) -> dict[str, Any]:
    """The payload of a run's row of one kind."""
    return [row.payload for row in run.messages.filter(kind=kind).order_by("seq")][place]


def finish(run: Run) -> Run:
    """Let a worker take the run up, and check its journal."""
    sweep()
    run.refresh_from_db()
    assert problems(run.session_id) == []
    return run


class Late:
    """A tool whose handler returns after its time, or after its worker lost the run."""

    def __init__(self, returns: Any, timeout: float | None = None) -> None:
        self.go, self.entered, self.returns = threading.Event(), threading.Event(), returns
        self.tool = tool(name="slow", timeout=timeout)(self.slow)

    def slow(self, ctx: ToolContext) -> Any:
        """Take long."""
        Effects.from_environment().record(ctx.idempotency_key)
        self.entered.set()
        assert self.go.wait(LIMIT)
        if isinstance(self.returns, Exception):
            raise self.returns
        return self.returns

    def report(self) -> None:
        """Let the handler return, and wait until that is journaled."""
        self.go.set()
        wait_for(lambda: Message.objects.filter(kind="late_result").exists(), "the late result")


def timed_out(returns: Any) -> tuple[Run, Late]:
    """A run whose handler did not return in time, and will return when told to."""
    late = Late(returns, timeout=0.05)
    with pytest.MonkeyPatch.context() as patch:
        only_the_first_is_late(patch, late.entered.is_set)
        run = start({"tools": [call("slow")]}, tools=[late.tool])
    assert run.status == "orphaned"
    return run, late


def zombie(returns: Any, timeout: float | None = None) -> tuple[Run, Late, threading.Thread]:
    """A run that was taken from a worker which is still inside the handler."""
    late = Late(returns, timeout)
    agent = shop_agent("late", {"tools": [call("slow")]}, tools=[late.tool])

    def drive() -> None:
        try:
            run_agent(agent, "do it", "s1", idempotency_key="k")
        finally:
            connections.close_all()

    worker = threading.Thread(target=drive, daemon=True)
    worker.start()
    assert late.entered.wait(LIMIT)
    run = Run.objects.get()
    kill(run)
    return finish(run), late, worker


def textarea(run: Run, name: str) -> str:
    """What a browser would send of a field that was left as it was."""
    html = browser("superuser").get(url(run, "call", doubtful(run))).content.decode()
    inside = html.split(f'<textarea name="{name}"')[1].split("</textarea>")[0].partition(">")[2]
    return unescape(inside.removeprefix("\n")).replace("\n", "\r\n")
