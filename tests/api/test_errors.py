"""The table of problems, and errors that no endpoint raises itself."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from ninja.errors import HttpError

from agentruns import exceptions
from agentruns.agents.agent import Agent
from agentruns.api.errors import PROBLEMS, URN, Problem
from tests.api.http import Api

pytestmark = pytest.mark.django_db(transaction=True)


def test_every_exception_has_a_stable_type_of_its_own() -> None:
    raised = {
        kind
        for _, kind in inspect.getmembers(exceptions, inspect.isclass)
        if issubclass(kind, exceptions.AgentRunsError)
    }
    assert raised - set(PROBLEMS) == {exceptions.DurableRunNotFoundError}  # a NotFoundError like the others
    types = [name for _, name, _ in PROBLEMS.values()]
    assert len(set(types)) == len(types)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in types)


def test_an_exception_of_a_host_is_its_nearest_known_class() -> None:
    class OurBusyError(exceptions.SessionBusyError):
        pass

    class SomethingElse(exceptions.AgentRunsError):
        pass

    busy = Problem.of(OurBusyError("busy", "the run"))
    assert (busy.status_code, busy.type, busy.extras) == (409, URN + "session-busy", {"run_id": "the run"})
    assert Problem.of(SomethingElse("?")).status_code == 500
    parts = Problem.of(exceptions.DurableConfigMismatchError("changed", ("model",)))
    assert parts.extras == {"parts": ("model",)}


@pytest.mark.parametrize(("status", "title"), [(429, "Too Many Requests"), (499, "Error")])
def test_an_error_of_a_hosts_decorator_has_no_type_of_ours(
    api: Api, monkeypatch: Any, status: int, title: str
) -> None:
    def throttled(request: Any) -> None:
        raise HttpError(status, "slower")

    monkeypatch.setattr("agentruns.api.runs.user_of", throttled)
    problem = {"type": "about:blank", "title": title, "status": status, "detail": "slower"}
    assert api.get("/runs") == (status, problem)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/runs", "GET, POST"),
        ("/runs/x", "GET"),
        ("/runs/x/messages", "GET"),
        ("/runs/x/cancel", "POST"),
        ("/approvals", "GET"),
        ("/approvals/x/deny", "POST"),
        ("/health", "GET"),
    ],
)
def test_other_methods_are_405(api: Api, path: str, allowed: str) -> None:
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"):
        if method in allowed:
            continue
        assert api.request(method, path)[0] == 405
        assert set(api.response["Allow"].split(", ")) == set(allowed.split(", "))


def test_health_is_open_and_tells_nothing_else(monkeypatch: Any) -> None:
    from django.db import OperationalError, connection

    nobody = Api()
    assert nobody.get("/health") == (200, {"status": "ok"})

    def broken() -> Any:
        raise OperationalError("no password supplied for user secret")

    monkeypatch.setattr(connection, "cursor", broken)
    status, problem = nobody.get("/health")
    assert (status, problem["type"]) == (503, "urn:agentruns:unavailable")
    assert "secret" not in str(problem)


def test_a_bug_is_not_hidden(api: Api, shop: Agent, monkeypatch: Any) -> None:
    """A 500 is Django's: it rolls the request's transaction back and tells whoever watches."""

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("agentruns.api.runs.starting.start_run", broken)
    with pytest.raises(ZeroDivisionError):
        api.post("/runs", {"agent": "shop", "input": "hi"})


def test_scripts_come_back_as_text(api: Api, shop: Agent) -> None:
    script = "<script>alert(1)</script>"
    status, problem = api.post("/runs", {"agent": script, "input": "hi"})
    assert (status, script in problem["detail"]) == (422, True)
    assert api.response["X-Content-Type-Options"] == "nosniff"
