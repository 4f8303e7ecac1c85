"""Calls of a project's functions: their paths, their arity, and awaiting between sync and async code."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from contextvars import copy_context
from functools import cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from asgiref.sync import AsyncToSync, async_to_sync, sync_to_async
from django.db import connections

from agentruns.utils import carry, forks
from agentruns.utils.db import working

T = TypeVar("T")

MOST_DRIVES = 32  # runs that a process drives at once for async code
LOOK_SECONDS = 0.5  # between two calls of `check` in `on_loop`


def path_of(function: Any) -> str:
    """Build the dotted path by which a Definition names a function, a class, or the class of an object."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}.{name}"


def arity_mistake(function: Any, *parameters: str) -> str:
    """Explain why a callable cannot be called with positional arguments of these names; "" if it can.

    Also returns "" if there is no readable signature, as for some builtins and for a value that is not
    callable.
    """
    try:  # the wrapper of a decorated function counts, because it is called
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*parameters)
    except TypeError:
        return (
            f"is called as f({', '.join(parameters)}), which a function declared f{signature} does not take"
        )
    return ""


def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a sync or async function of the project; return its result, awaited if that is necessary."""
    result = function(*args, **options)
    return wait(result) if inspect.isawaitable(result) else result


def wait(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable from sync code, even in a thread that runs an event loop; return its result."""

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


_lock = forks.renewed(threading.Lock())
_loop: asyncio.AbstractEventLoop | None = None
_owners: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _after_fork() -> None:
    global _loop
    forks.keep(_loop)
    _loop = None
    for owner in [*_owners.values()]:
        forks.disconnect(owner)


forks.in_child(_after_fork)


def on_loop(awaitable: Awaitable[T], owner: Any, check: Callable[[], None] = lambda: None) -> T:
    """Wait for an awaitable that runs on the one event loop of this process; return its result.

    The loop never ends, so an async HTTP client that `owner` keeps can use its connections again; a forked
    process has a loop of its own, and the client no connection of its parent. ORM work runs in this thread.
    `check` is called regularly; if it raises an exception, this cancels the awaitable and raises that
    exception. An exception in this thread, such as a worker's time limit, cancels the awaitable, too.
    """
    global _loop
    left = threading.Event()
    with _lock:
        if _loop is None:
            made = asyncio.new_event_loop()
            threading.Thread(target=made.run_forever, name="async-models", daemon=True).start()
            _loop = made
        loop = _loop
        with suppress(TypeError):  # it has no weak references
            _owners[id(owner)] = owner
    if asyncio._get_running_loop() is loop:  # this thread runs the loop, and must not wait for it
        return wait(awaitable)

    async def finish() -> T:
        executor = AsyncToSync.executors.current  # asgiref's for this thread; another thread would not see it

        async def work() -> T:
            AsyncToSync.executors.current = executor
            return await awaitable

        working = asyncio.run_coroutine_threadsafe(work(), loop)
        result = asyncio.wrap_future(working)
        try:
            while not (await asyncio.wait({result}, timeout=LOOK_SECONDS))[0]:
                if left.is_set():
                    raise asyncio.CancelledError
                check()
            return result.result()
        finally:
            working.cancel()

    try:
        return wait(finish())
    except BaseException:
        left.set()
        raise


@cache
def _driving() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_DRIVES, thread_name_prefix="async-drive")


forks.in_child(_driving.cache_clear)


async def in_thread(
    alias: str, function: Callable[..., T], *args: Any, drives: bool = False, **options: Any
) -> T:
    """Call a sync function from async code, in a thread of its own that closes its database connections.

    At most MOST_DRIVES functions run at once that drive a run; others use the threads of the event loop.
    Inside a transaction, or for an in-memory database, calls it in the thread that runs all other sync code.
    """

    def call() -> T:
        try:
            with working() if drives else nullcontext():
                return function(*args, **options)
        finally:
            connections.close_all()

    def elsewhere() -> Callable[[], T] | None:
        connection: Any = connections[alias]
        in_memory = connection.vendor == "sqlite" and connection.is_in_memory_db()
        is_alone = connection.in_atomic_block or in_memory  # other threads do not see its rows
        return None if is_alone else carry.carrying(alias, call)

    if (work := await sync_to_async(elsewhere)()) is None:
        return await sync_to_async(function)(*args, **options)
    return await sync_to_async(work, thread_sensitive=False, executor=_driving() if drives else None)()
