"""What an agent's own functions raise at the start of a run is shown by no door, and logged masked."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from django.test import Client

from agentruns import Agent, RunContext, approve, run_agent, tool
from agentruns.models import Approval, Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.tools import InvalidArguments
from tests.api.http import make_user
from tests.registry import isolated_registry

pytestmark = pytest.mark.django_db(transaction=True)

PIN = "ZQ4711X"
MAY = ("view_run", "fork_run", "start_run", "adopt_definition")


@tool(sensitive=["pin"], requires_approval=True)
def check(pin: str) -> str:
    """Check."""
    return "ok"


def told(run: RunContext) -> str:
    """Tell what is said of the run."""
    return f"Serve {run.context.get('note', 'nobody')}."


def fails(run: RunContext) -> str:
    """Fail, and say why."""
    raise ValueError(f"cannot serve {run.context}")


def misfits(run: RunContext) -> str:
    """Fail by an exception of ours that doors show elsewhere."""
    raise InvalidArguments(f"cannot serve {run.context}")


def read(response: Any) -> str:
    return (b"".join(response.streaming_content) if response.streaming else response.content).decode()


@pytest.mark.parametrize("instructions", [fails, misfits])
@pytest.mark.parametrize("door", ["again", "fork", "adopt", "api", "api messages", "api runs"])
def test_what_a_function_of_an_agent_raises_is_masked(
    caplog: pytest.LogCaptureFixture, door: str, instructions: Any
) -> None:
    turn = {"tools": [{"name": "check", "input": {"pin": PIN}}]}
    model = ScriptedModel([turn, turn] if door == "adopt" else [turn, {"text": "done"}])
    options: dict[str, Any] = {"tools": [check], "model": model, "starters": "anyone"}
    user = make_user("vv", *MAY, is_staff=True)
    plain = "Serve." if door == "adopt" else told
    Agent("pins", instructions=plain, **options)
    run = run_agent("pins", "check it", "s1", actor=user, context={"note": PIN}).run_id
    approve(Approval.objects.get().pk, make_user("boss", is_superuser=True))
    sweep()
    client = Client(raise_request_exception=False)
    client.force_login(user)
    page = f"/admin/agentruns/run/{run}/"
    assert PIN not in read(client.get(f"{page}change/"))
    caplog.clear()
    with isolated_registry():
        agent = Agent("pins", instructions=instructions, **options)
        body: dict[str, Any] = {"at": 2, "text": "x"}
        if door.startswith("api"):
            paths = {"api": f"runs/{run}/fork", "api messages": "sessions/s1/messages", "api runs": "runs"}
            if door == "api messages":
                body = {"content": "x"}
            elif door == "api runs":
                body = {"agent": "pins", "input": "x", "session": "s1"}
            shown = client.post(f"/api/{paths[door]}", json.dumps(body), content_type="application/json")
            assert (shown.status_code, shown.json()["type"]) == (500, "urn:agentruns:rendering")
        else:
            if door == "adopt":
                seq = Message.objects.filter(run_id=run).latest("seq").seq
                body = {"hash": agent.definition_hash, "seq": seq, "reason": "newer"}
            started = Message.objects.filter(run_id=run, kind="tool_started")
            body["knows"] = list(started.values_list("call_id", flat=True))
            shown = client.post(f"{page}{door}/", {"key": "k", **body})
            assert shown.status_code == 409
    assert "its function instructions failed with" in read(shown)
    assert PIN not in read(shown)
    logged = "".join(map(logging.Formatter().format, caplog.records))
    assert PIN not in logged
    assert logged.count("Traceback") == 1
    assert Run.objects.count() == 1
