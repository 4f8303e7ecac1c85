"""`arun` in a request served over ASGI, with a model and tools that are coroutines and use the ORM."""

from __future__ import annotations

import asyncio
import os
from multiprocessing.connection import Connection
from typing import Any

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.db import connection, connections
from django.http import HttpRequest, JsonResponse
from django.test import override_settings
from django.urls import path

from agentruns import Agent, ModelReply, ModelRequest, ToolContext, tool
from agentruns.models import Run
from tests.crash.child import Orders, prepare
from tests.crash.processes import Forked
from tests.effects import Effects
from tests.shop.agents import act, call
from tests.shop.models import Order

LIMIT = 120  # seconds
CALLS = ["look_at", "look_fast", "search_one", "search_two", "read"]


@tool
async def look_at(ctx: ToolContext) -> str:
    """Look at the order in the thread that drives."""
    return act(str(await Order.objects.acount()), ctx)


@tool(timeout=LIMIT)
async def look_fast(ctx: ToolContext) -> str:
    """Look at the order in a thread of its own."""
    return act(str(await Order.objects.acount()), ctx)


@tool(parallel=True, safe_to_retry=True)
async def search_one(ctx: ToolContext) -> str:
    """Look at the order beside another."""
    return act(str(await Order.objects.acount()), ctx)


@tool(parallel=True, safe_to_retry=True)
async def search_two(ctx: ToolContext) -> str:
    """Look at the order beside another."""
    return act(str(await Order.objects.acount()), ctx)


async def is_dear(arguments: dict[str, Any], ctx: ToolContext) -> bool:
    """Ask the database whether a person has to be asked."""
    return await Order.objects.acount() > 1


@tool(requires_approval=is_dear)
def read(ctx: ToolContext) -> str:
    """Look at the order without a coroutine."""
    return act(str(Order.objects.count()), ctx)


class AsyncModel:
    """A model that reads the database as coroutines do."""

    identity = "async-model"

    async def propose(self, request: ModelRequest) -> ModelReply:
        """Call every tool once, then say how many orders there are."""
        orders = await Order.objects.acount()
        if request.step:
            return ModelReply([{"type": "text", "text": f"{orders} order"}], "end_turn")
        calls = [{"type": "tool_use", "id": f"t-{name}", **call(name)} for name in CALLS]
        return ModelReply(calls, "tool_use")


async def drive(request: HttpRequest) -> JsonResponse:
    """Drive a run while the request waits."""
    tools = [look_at, look_fast, search_one, search_two, read]
    agent = Agent("async", instructions="Look.", tools=tools, model=AsyncModel())
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
    names = ("NAME", "HOST", "PORT", "OPTIONS")
    database = {name: connection.settings_dict[name] for name in names}
    child = Forked(serve, Orders([], lease=60, database=database, environment=dict(os.environ)))
    try:
        assert child.pipe.poll(2 * LIMIT), "the request is not answered"
        assert child.hear() == b'{"status": "completed", "output": "1 order"}'
        assert child.ended() == 0
    finally:
        child.close()
    assert sorted(each["tool"] for each in effects.lines()) == ["1"] * len(CALLS)
    assert Run.objects.get().status == "completed"
