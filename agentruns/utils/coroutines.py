"""Awaiting from sync code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from asgiref.sync import async_to_sync

T = TypeVar("T")


def wait(awaitable: Awaitable[T]) -> T:
    """Await from sync code, even in a thread that is running an event loop."""

    async def finish() -> T:
        return await awaitable

    # Not asyncio.run: asgiref sends the coroutine's ORM work back to this thread, so it uses this thread's
    # connection, which the engine keeps healthy and a TestCase wraps in its transaction. Without that it
    # would wait for the thread of the surrounding ASGI request: this one, which waits for the coroutine.
    run = async_to_sync(finish, force_new_loop=True)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentruns-async")
    try:
        return thread.submit(copy_context().run, run).result()
    finally:
        thread.shutdown(wait=False)
