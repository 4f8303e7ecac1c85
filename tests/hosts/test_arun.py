"""`arun` in a request served over ASGI, with a model and tools that are coroutines and use the ORM."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db import connections
from django.http import HttpRequest, JsonResponse
from django.test import override_settings
from django.urls import path

from agentruns import Agent, ModelReply, ModelRequest, ToolContext, tool
from agentruns.models import Run
from tests.crash.child import Orders, prepare
from tests.crash.processes import finish, start
from tests.db.helpers import names
from tests.effects import Effects
from tests.shop.agents import act, call
from tests.shop.models import Order

LIMIT = 120  # seconds


async def look(ctx: ToolContext) -> str:
    """Look at the order."""
    return act(str(await Order.objects.acount()), ctx)


async def is_dear(arguments: dict[str, Any], ctx: ToolContext) -> bool:
    """Ask the database whether a person has to be asked."""
    return await Order.objects.acount() > 1


def read(ctx: ToolContext) -> str:
    """Look at the order without a coroutine."""
    return act(str(Order.objects.count()), ctx)


TOOLS = [
    tool(name="look_at")(look),  # in the thread that drives
    tool(name="look_fast", timeout=LIMIT)(look),  # in a thread of its own
    tool(name="search_one", parallel=True, safe_to_retry=True)(look),  # beside the next one
    tool(name="search_two", parallel=True, safe_to_retry=True)(look),
    tool(requires_approval=is_dear)(read),
]


class AsyncModel:
    """A model that reads the database as coroutines do."""

    identity = "async-model"

    async def propose(self, request: ModelRequest) -> ModelReply:
        """Call every tool once, then say how many orders there are."""
        orders = await Order.objects.acount()
        if request.step:
            return ModelReply([{"type": "text", "text": f"{orders} order"}], "end_turn")
        calls = [{"type": "tool_use", "id": f"t-{tool.name}", **call(tool.name)} for tool in TOOLS]
        return ModelReply(calls, "tool_use")


async def drive(request: HttpRequest) -> JsonResponse:
    """Drive a run while the request waits."""
    agent = Agent("async", instructions="Look.", tools=TOOLS, model=AsyncModel())
    result = await agent.arun("look", "asgi")
    return JsonResponse({"status": result.status, "output": result.output})


urlpatterns = [path("drive", drive)]


def serve(orders: Orders, pipe: Connection) -> None:
    """Serve one request, as an ASGI server would."""
    os.environ.clear()
    prepare(orders)
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[], ALLOWED_HOSTS=["*"]):
        pipe.send(asyncio.run(answer()))
    connections.close_all()


async def answer() -> bytes:
    scope = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/drive"}
    there = ApplicationCommunicator(ASGIHandler(), {**scope, "query_string": b"", "headers": []})
    await there.send_input({"type": "http.request"})
    await there.receive_output(LIMIT + 10)
    body = (await there.receive_output(LIMIT))["body"]
    await there.wait(LIMIT)
    return bytes(body)


@pytest.mark.django_db(transaction=True)
def test_arun_in_an_asgi_request_with_coroutines_that_use_the_orm(effects: Effects) -> None:
    Order.objects.create(number="A1", customer="Ann", total_cents=100)
    child = start(serve=serve, lease=60)
    assert child.pipe.poll(2 * LIMIT), "the request is not answered"
    assert child.hear() == b'{"status": "completed", "output": "1 order"}'
    finish(child)
    assert names(effects) == ["1"] * len(TOOLS)
    assert Run.objects.get().status == "completed"
