"""Naming refusals: what `refuses` and AGENTRUNS_REFUSALS take, and which HTTP answers are one."""

from __future__ import annotations

import urllib.error
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import requests
from django.test import override_settings

from agentruns import Agent, ToolContext, ToolRefused, http_refusal, tool
from agentruns.checks.settings import check_values
from agentruns.tools import InvalidArguments
from agentruns.tools.refusals import is_refusal

# 409 can be the conflict with an earlier copy of the same request, which is at work.
ANSWERS = {
    **dict.fromkeys((400, 401, 402, 403, 404, 410, 422, 451, 499), True),
    **dict.fromkeys((200, 301, 399, 408, 409, 425, 429, 500, 502, 503, 504, 599), False),
}


class Declined(Exception):
    """Says that nothing was taken."""


def an_error(**members: Any) -> Any:
    """Make an error as a client raises it."""
    error = OSError("no")
    vars(error).update(members)
    return error


def answered(status: int) -> requests.Response:
    """Make an answer, which is false for every status from 400 on."""
    response = requests.Response()
    response.status_code = status
    return response


@pytest.mark.parametrize("status", ANSWERS)
def test_which_http_answers_are_refusals(status: int) -> None:
    for error in (
        an_error(response=answered(status)),
        urllib.error.HTTPError("https://bank.example", status, "no", Message(), None),
        an_error(status=status),  # as aiohttp
        an_error(status_code=status),  # as many an SDK
    ):
        assert http_refusal(error) is ANSWERS[status]
    odd = an_error(response=SimpleNamespace(status_code=str(status)), status="not found")
    for error in (TimeoutError("slow"), urllib.error.URLError("no"), odd):
        assert http_refusal(error) is False, "it has no status"


class Redirecting(BaseHTTPRequestHandler):
    """Answers a POST like a form that was taken, with the address of a page; there is none."""

    def do_POST(self) -> None:
        self.send_response(303)
        self.send_header("Location", "/done")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("client", [requests, httpx.Client(follow_redirects=True)], ids=["requests", "httpx"])
def test_a_refusal_behind_a_redirect_is_none(client: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/pay"
        answers = [client.post(url), client.get(url)]
        server.shutdown()
    assert [answer.status_code for answer in answers] == [404, 404]
    found = []
    for answer in answers:
        with pytest.raises((requests.HTTPError, httpx.HTTPStatusError)) as caught:
            answer.raise_for_status()
        found.append(http_refusal(caught.value))
    assert found == [False, True], "the form was taken; the page was not found"


@pytest.mark.parametrize(
    "refuses", [Declined, (Declined,), [KeyError, Declined], lambda error: "x" in str(error)]
)
def test_one_or_several_may_be_named(refuses: Any) -> None:
    declared = tool(pay, refuses=refuses)
    assert is_refusal(Declined("x"), declared.refuses)
    assert is_refusal(ToolRefused("a"), declared.refuses) and is_refusal(
        InvalidArguments("a"), declared.refuses
    )
    assert not is_refusal(ValueError("a"), declared.refuses)


async def later(error: Exception) -> bool:
    """Say so later."""
    return True


@pytest.mark.parametrize(
    ("refuses", "why"),
    [
        (Exception, "Exception is every error"),
        (later, "is a coroutine function"),
        (BaseException, "BaseException is no Exception"),
        ([Declined, dict], "dict is no Exception"),
        ("shop.Declined", "'s' is neither an exception nor a function"),
        (Declined("an instance"), "Declined('an instance') is neither an exception nor a function"),
        (None, "None is neither an exception nor a function"),
    ],
)
def test_anything_else_is_refused_on_import(refuses: Any, why: str) -> None:
    with pytest.raises(TypeError) as refused:
        tool(pay, refuses=refuses)
    assert str(refused.value).startswith("Tool 'pay': refuses names what it cannot: ")
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        ([], ""),
        ((f"{__name__}.Declined", "agentruns.http_refusal"), ""),
        ("agentruns.http_refusal", "is not a list of dotted paths"),
        ([Declined], "is not a list of dotted paths"),
        (["nowhere.Error"], "No module named 'nowhere'"),
        (["builtins.Exception"], "Exception is every error"),
        (["builtins.SystemExit"], "SystemExit is no Exception"),
        (["agentruns.__version__"], "is neither an exception nor a function"),
    ],
)
def test_the_setting_is_checked(paths: Any, why: str) -> None:
    with override_settings(AGENTRUNS_REFUSALS=paths):
        found = check_values(None)
        if paths == ["nowhere.Error"]:  # it costs no tool the refusals that it names
            assert is_refusal(Declined("x"), [Declined]) and not is_refusal(ValueError("x"), [Declined])
    assert [one.id for one in found] == (["agentruns.E017"] if why else [])
    assert not why or why in found[0].msg


def test_the_definition_names_them_and_is_the_same_without() -> None:
    """Which exceptions mean that nothing happened is a rule under which a run was started."""

    def definition(**options: Any) -> tuple[Any, str]:
        declared = tool(pay, **options)
        agent = Agent("payer", instructions="Pay.", tools=[declared], model="claude-sonnet-5-5")
        return declared.policy(), agent.definition_hash

    plain, hashed = definition()
    assert ("refuses" in plain, definition(refuses=())) == (False, (plain, hashed))
    named, other = definition(refuses=[http_refusal, Declined])
    assert named["refuses"] == ["agentruns.tools.refusals.http_refusal", f"{__name__}.Declined"]
    assert definition(refuses=[Declined, http_refusal]) == (named, other)
    assert other != hashed


def pay(ctx: ToolContext, cents: int) -> str:
    """Pay."""
    return "paid"
