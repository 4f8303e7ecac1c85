"""The journal's own connection between two drives: kept as long as CONN_MAX_AGE says, and by nobody else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections
from django.db.backends.signals import connection_created

from agentruns import run_agent, tool
from agentruns.journal.connection import own_alias, own_connection
from tests.shop.agents import call, shop_agent
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def kept() -> Iterator[None]:
    """Connections live for a minute, as in production."""
    age = connection.settings_dict["CONN_MAX_AGE"]
    connection.settings_dict["CONN_MAX_AGE"] = 60
    yield
    connection.settings_dict["CONN_MAX_AGE"] = age
    connections.close_all()


def used() -> Any:
    """Return the driver's connection that a drive would commit on."""
    with own_connection("default"):
        own = connections[own_alias("default")]
        own.ensure_connection()
        return own.connection


def test_the_next_drive_has_the_same(kept: None) -> None:
    assert run_agent(shop_agent("kept"), "do it", "s1").status == "completed"
    first = used()
    assert run_agent(shop_agent("kept"), "do it", "s2").status == "completed"
    assert used() is first


def test_each_drive_has_its_own_where_connections_are_not_kept() -> None:
    assert used() is not used()


def test_it_is_closed_with_the_connection_of_the_thread(kept: None) -> None:
    first = used()
    connections.close_all()
    with pytest.raises(Exception, match="closed"):
        first.cursor().execute("SELECT 1")
    assert used() is not first


def test_a_heartbeat_leaves_none_behind(kept: None, settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05
    made = []

    def note(connection: Any, **_signal: Any) -> None:
        if threading.current_thread().name == "agentruns-heartbeat":
            made.append((connection, connection.connection))

    @tool
    def dawdle() -> str:
        """Take so long that the lease is extended."""
        wait_for(lambda: made, "a heartbeat")
        return "done"

    connection_created.connect(note)
    try:
        run_agent(shop_agent("slow", {"tools": [call("dawdle")]}, tools=[dawdle]), "do it", "s1")
    finally:
        connection_created.disconnect(note)
    assert made
    for _wrapper, raw in made:
        with pytest.raises(Exception, match="closed"):
            raw.cursor().execute("SELECT 1")


def test_a_forked_process_leaves_it_to_its_parent(kept: None) -> None:
    first = used()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(used() is first)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert used() is first
    assert first.cursor().execute("SELECT 1") is not None
