"""Help for forked processes, which must not share a lock, a thread or a connection with their parent."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

_inherited: list[Any] = []


def in_child(renew: Callable[[], object]) -> None:
    """Register `renew` to be called in every process forked from this one, before other code runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


def renewed(lock: Any) -> Any:
    """Free a lock in every forked process, because a parent's thread may hold it then; return the lock."""
    in_child(lock._at_fork_reinit)
    return lock


def keep(inherited: Any) -> None:
    """Keep an object of the parent process alive, because deleting it could close the parent's connection."""
    _inherited.append(inherited)


def without_connections(part: Any) -> Any:
    """Copy a sync or async HTTP client of httpx, or a transport in it, without its open connections."""
    made = copy.copy(part)
    members = getattr(made, "__dict__", {})
    if "_connections" in members:  # a pool of httpcore; a thread of the parent may have held its lock
        members |= {"_connections": [], "_requests": []}
        made._optional_thread_lock = type(part._optional_thread_lock)()
    for name, value in [*members.items()]:
        if hasattr(value, "handle_request") or hasattr(value, "handle_async_request"):
            members[name] = without_connections(value)
    if "_mounts" in members:
        members["_mounts"] = {key: each and without_connections(each) for key, each in part._mounts.items()}
    return made


def disconnect(owner: Any) -> None:
    """Drop, in a forked process, the open connections of each httpx client that is an attribute of `owner`.

    An attribute may also be an SDK's client, which has its HTTP client as `_client`.
    """
    for value in [*getattr(owner, "__dict__", {}).values()]:
        client = getattr(value, "_client", value)
        if hasattr(client, "_transport") and hasattr(client, "_mounts"):
            keep(copy.copy(client))
            vars(client).update(vars(without_connections(client)))
