"""Tenants in schemas, and what else a project sets on its connection: the journal's own has it, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import OperationalError, connection, connections
from django.db.backends.postgresql import base
from django.db.models.functions import Now

from agentruns import Agent, ModelRequest, ToolContext, approve, run_agent, start_run, tool
from agentruns.checks.deployment import check_deployment
from agentruns.engine import drafts, leases
from agentruns.journal.connection import OWN, own_alias, separate_connection
from agentruns.journal.verify import problems
from agentruns.models import Approval, Draft, Message, Run, Session
from agentruns.services.sweep import sweep
from agentruns.services.switches import switch
from agentruns.testing import ScriptedModel
from agentruns.utils import calls
from agentruns.utils.carry import keep
from tests.api.http import Api, make_user
from tests.db.dying import elsewhere
from tests.db.racing import at_once
from tests.shop.agents import call, refund, shop_agent
from tests.shop.models import Order
from tests.waiting import LIMIT, wait_for

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has no schemas"),
]


class TenantWrapper(base.DatabaseWrapper):
    """As django-tenants' backend: a tenant is chosen, and each cursor sets the search path of its schema.

    The cursor is Django's, so wrappers of a connection's statements get that statement, too.
    """

    include_public_schema = True
    schema_name = "public"
    tenant: Any = SimpleNamespace(schema_name="public")

    def set_tenant(self, tenant: Any, include_public: bool = True) -> None:
        self.tenant, self.schema_name, self.include_public_schema = tenant, tenant.schema_name, include_public

    def _cursor(self, name: str | None = None) -> Any:
        cursor = super()._cursor(name)
        if name is None:
            cursor.execute(f"SET search_path = '{self.schema_name}', 'public'")
        return cursor


@contextmanager
def tenant(name: str) -> Iterator[None]:
    """As django-tenants' schema_context."""
    shared: Any = connection
    before = shared.tenant
    shared.set_tenant(SimpleNamespace(schema_name=name))
    try:
        yield
    finally:
        shared.set_tenant(before)


@pytest.fixture
def schemas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two tenants, each with tables of its own for the journal and the shop."""
    tables = [
        model._meta.db_table
        for name in ("agentruns", "shop")
        for model in apps.get_app_config(name).get_models()
    ]
    names = ["north", "south"]
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE; CREATE SCHEMA {name}")
            for table in tables:
                cursor.execute(f'CREATE TABLE {name}."{table}" (LIKE public."{table}" INCLUDING ALL)')
    monkeypatch.setattr(base, "DatabaseWrapper", TenantWrapper)  # for the connections of new threads
    monkeypatch.setattr(leases, "_at_start", {})
    calls._driving.cache_clear()  # its threads may have connections of the other kind
    known: list[Any] = connections.all()
    kind = type(known[0])
    for shared in known:
        shared.close()
        shared.__class__ = TenantWrapper
    yield names
    calls._driving.cache_clear()
    for shared in known:
        shared.close()
        shared.__class__ = kind
        for made in ("tenant", "schema_name", "include_public_schema"):
            shared.__dict__.pop(made, None)
    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA north, south CASCADE")


@tool(timeout=timedelta(minutes=5))
def place(ctx: ToolContext) -> str:
    """Place an order, from a thread of its own, when a heartbeat has extended the lease."""
    Order.objects.create(number=str(ctx.call_id)[:20], customer="tenant", total_cents=1)
    began = Run.objects.get(pk=ctx.run_id).lease_expires_at
    wait_for(lambda: Run.objects.get(pk=ctx.run_id).lease_expires_at != began, "a heartbeat")
    return str(connection.schema_name)  # type: ignore[attr-defined]


@tool(transactional=True)
def look(ctx: ToolContext) -> str:
    """Count the orders of the tenant and of another database, and leave another tenant behind."""
    count = Order.objects.count() + Order.objects.using("other").count()
    connection.set_tenant(SimpleNamespace(schema_name="public"))  # type: ignore[attr-defined]
    return str(count)


def counted(name: str) -> tuple[int, int, int]:
    with tenant(name):
        return Session.objects.count(), Run.objects.count(), Order.objects.count()


def test_a_tenants_runs_live_in_its_schema_in_every_thread(schemas: list[str], settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05
    turns = [{"tools": [call("place"), call("look"), call("refund", cents=5000)]}, {"text": "done"}]
    agent = shop_agent("of-tenants", *turns, tools=[place, look, refund])

    def live(name: str) -> None:
        with tenant(name):
            result = run_agent(agent, "go", "s1", idempotency_key="k")
            approve(result.pending[0].pk, None)
        with tenant(name):
            sweep()
            run = Run.objects.get()
            rows = Message.objects.filter(kind="tool_result").order_by("seq")
            results = [row.payload["content"] for row in rows]
            assert (run.status, results[:2], problems(run.session_id)) == ("completed", [name, "1"], [])

    assert at_once(*(partial(live, name) for name in schemas)) == [None, None]
    for name in schemas:
        with tenant(name):
            async_to_sync(agent.arun)("go", "s2", idempotency_key="k2")
            start_run(agent, "go", "s3", idempotency_key="k3")
    assert [counted(name) for name in ("north", "south", "public")] == [(3, 3, 2), (3, 3, 2), (0, 0, 0)]
    with tenant("south"):
        switch("agent", "of-tenants", "off", reason="stop")
        leases.drain("default")
        assert sweep().completed == 0 and leases.is_draining("default")
    with tenant("north"):
        assert not leases.is_draining("default"), "another tenant's worker was asked"
        sweep()
        assert Approval.objects.filter(status="pending").count() == 2


def test_one_writer_of_drafts_serves_all_tenants(schemas: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PERIOD": 0.02, "PERIODS": {}, "LOOKS": 0.02}.items():
        monkeypatch.setattr(drafts, name, value)
    barrier = threading.Barrier(len(schemas))

    def live(name: str) -> None:
        def write(request: ModelRequest) -> dict[str, str]:
            barrier.wait(LIMIT)
            assert request.on_text is not None
            request.on_text(name)
            wait_for(lambda: Draft.objects.get().text == name, f"the draft of {name}")
            barrier.wait(LIMIT)
            return {"text": name}

        with tenant(name):
            agent = Agent(f"talks-{name}", instructions="Talk.", model=ScriptedModel([write]))
            run = start_run(agent, "go", "s1")
            Draft.objects.create(run=run, watched_until=Now() + timedelta(minutes=5))
            assert sweep().completed == 1

    assert at_once(*(partial(live, name) for name in schemas)) == [None, None]


def test_a_stream_reads_its_own_tenant(schemas: list[str], settings: Any) -> None:
    settings.AGENTRUNS_API_PING_SECONDS = 0.01
    agent = shop_agent("streaming", {"tools": [call("refund", cents=5000)]}, tools=[refund])
    user, streams = make_user("ann", "view_run"), {}
    for name in schemas:
        with tenant(name):
            run = run_agent(agent, name, "s1", actor=user, idempotency_key="k")
            api = Api(user)
            streams[name] = iter(api.client.get(f"/api/runs/{run.run_id}/events"))
    for _ in range(5):  # each looks while the other one has a look
        for name, stream in streams.items():
            with tenant(name):
                assert b"event: end" not in next(stream)
    for name in schemas:
        with tenant(name):
            approve(Approval.objects.get().pk, None)
            sweep()
            assert b"event: end" in b"".join(streams[name])


def state(shared: Any) -> Any:
    """The hook of a project that keeps its tenant in a variable, for row-level security."""
    with shared.cursor() as cursor:
        cursor.execute("SELECT current_setting('app.tenant', true)")
        value = cursor.fetchone()[0]

    def set_it(other: Any) -> None:
        with other.cursor() as cursor:
            cursor.execute("SELECT set_config('app.tenant', %s, false)", [value])

    return set_it


def variable(alias: str) -> str:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_setting('app.tenant', true)")
        return str(cursor.fetchone()[0])


@tool(timeout=timedelta(minutes=5))
def inside(ctx: ToolContext) -> str:
    return variable("default")


def drop(pid: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])


@tool
def beside(ctx: ToolContext) -> str:
    """Look at the journal's connection, and let the server drop both."""
    seen = [variable("default"), variable(own_alias("default"))]
    pids = [connections[alias].connection.info.backend_pid for alias in ("default", "default" + OWN)]
    for pid in pids:
        elsewhere(partial(drop, pid))
    return " ".join(seen)


def test_a_variable_is_set_on_each_connection_that_works_for_the_run(settings: Any) -> None:
    settings.AGENTRUNS_CONNECTION_STATE = f"{__name__}.state"
    agent = shop_agent(
        "of-variables",
        {"tools": [call("beside"), call("beside"), call("inside")]},
        tools=[beside, inside],
    )
    for name in ("north", "south"):  # one after the other, in the same thread
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('app.tenant', %s, false)", [name])
        result = run_agent(agent, "go", name, idempotency_key=name)
        rows = Message.objects.filter(run_id=result.run_id, kind="tool_result").order_by("seq")
        assert [row.payload["content"] for row in rows] == [f"{name} {name}"] * 2 + [name]
    connection.close()


@pytest.mark.parametrize("path", [None, f"{__name__}.state"])
def test_an_engine_of_schemas_that_is_not_known_is_told(path: str | None, settings: Any) -> None:
    settings.AGENTRUNS_CONNECTION_STATE = path
    before = connection.settings_dict["ENGINE"]
    try:
        connection.settings_dict["ENGINE"] = "django_pgschemas.postgresql"
        found = [message.id for message in check_deployment(None)]
    finally:
        connection.settings_dict["ENGINE"] = before
    assert found == (["agentruns.E025"] if path is None else [])


@pytest.mark.parametrize("error", [OperationalError, ValueError])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "connecting"])
def test_a_connection_whose_state_cannot_be_set_is_not_used_without_it(
    error: type[Exception], is_open: bool
) -> None:
    connection, tries = separate_connection("default"), list[int]()
    assert connection is not None
    connection.close()

    def state(other: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise error("for a moment")

    if is_open:
        connection.ensure_connection()
        with nullcontext() if error is OperationalError else pytest.raises(error):
            keep(connection, state)
    else:
        keep(connection, state)
        with pytest.raises(error):
            connection.ensure_connection()
    connection.ensure_connection()
    connection.close()
    assert len(tries) == 2
