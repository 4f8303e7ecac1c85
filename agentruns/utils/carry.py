"""The state that a project sets on its connection, such as a tenant's schema, for the connections we open.

The journal has a connection of its own, and some of a project's functions are called in threads of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, connections

from agentruns.conf import settings

T = TypeVar("T")
State = Callable[[Any], object] | None  # sets on a connection what was set on another; None: nothing

_states = threading.local()  # alias -> State, inside `carried`


def state_of(alias: str) -> State:
    """Find what is set on this thread's connection: AGENTRUNS_CONNECTION_STATE, or django-tenants' tenant."""
    if alias in _states.__dict__:
        state: State = _states.__dict__[alias]
        return state
    shared: Any = connections[alias]
    if settings.CONNECTION_STATE is not None:
        asked: State = settings.connection_state(shared)
        return asked
    if not hasattr(shared, "set_tenant"):
        return None
    tenant, includes_public = shared.tenant, getattr(shared, "include_public_schema", True)
    return lambda other: other.set_tenant(tenant, includes_public)


def keep(connection: Any, state: State) -> None:
    """Set `state` on a connection now, and each time it connects.

    None sets nothing more, and closes a connection on which a state was kept, because that would stay set.
    """
    had_state = connection.__dict__.pop("connect", None)
    if state is None:
        if had_state:
            connection.close()
        return

    def connect() -> None:
        type(connection).connect(connection)
        try:
            state(connection)
        except BaseException:  # a repetition must not use the connection without the state
            connection.close()
            raise

    connection.connect = connect
    if connection.connection is not None or hasattr(connection, "set_tenant"):
        try:
            state(connection)
        except BaseException as error:  # perhaps dropped by the server: the next use connects
            connection.close()
            if not isinstance(error, DatabaseError | InterfaceError):
                raise


@contextmanager
def carried(alias: str, state: State) -> Iterator[None]:
    """Keep `state` on this thread's connection in the block, unless an outer block does."""
    if state is None or alias in _states.__dict__:
        yield
        return
    _states.__dict__[alias] = state
    keep(connections[alias], state)
    try:
        yield
    finally:
        del _states.__dict__[alias]
        connections[alias].__dict__.pop("connect", None)  # but the thread's connection keeps what it had


def restore(alias: str) -> None:
    """Set the state of the surrounding block again, after user code that may have changed the connection."""
    if state := _states.__dict__.get(alias):
        keep(connections[alias], state)


def carrying(alias: str, work: Callable[[], T]) -> Callable[[], T]:
    """Wrap `work` for another thread, whose connections then have the state of this thread's."""
    state = state_of(alias)
    return work if state is None else carried(alias, state)(work)


def schema_of(alias: str) -> str:
    """Name the schema of a connection of django-tenants; "" for others."""
    return str(getattr(connections[alias], "schema_name", None) or "")
