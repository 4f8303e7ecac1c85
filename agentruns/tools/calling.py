"""Call a function of the developer's, sync or async, from sync code."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from asgiref.sync import async_to_sync

T = TypeVar("T")


def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `fn` returns, awaited on an event loop of its own if it is awaitable."""
    result = fn(*args, **kwargs)
    return wait(result) if inspect.isawaitable(result) else result


def wait(awaitable: Awaitable[T]) -> T:
    """Return the value of an awaitable; also in a thread whose own event loop is running."""

    async def finish() -> T:
        return await awaitable

    # Not plain asyncio.run: asgiref sends the ORM work of the coroutine back to this thread, so it uses this
    # thread's connection, which the engine keeps healthy and a TestCase wraps in its transaction.
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
