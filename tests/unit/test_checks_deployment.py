"""Checks of what surrounds the app: requests, routers, the dispatcher, Celery, the sweep."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import celery
import pytest
from django.db import connections
from django.db.models.functions import Now

from agentruns import start_run, tool
from agentruns.agents.agent import Agent
from agentruns.checks.deployment import check_deployment, check_dispatcher, check_sweeper
from agentruns.checks.settings import check_values
from agentruns.engine.wakeup import SweepDispatcher
from agentruns.models import Control, Run
from agentruns.models.router import JournalRouter
from agentruns.services.sweep import sweep, sweeper
from agentruns.tasks import CeleryDispatcher
from tests.shop.agents import shop_agent
from tests.unit.checks import ids

LATE = timedelta(minutes=10, seconds=1)


# Requests and routers


def test_atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    (found,) = check_deployment(None)
    assert found.id == "agentruns.W007"
    assert "non_atomic_requests(using='default')" in str(found.hint)
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", False)
    assert check_deployment(None) == []


class Replicas:
    """Reads from a replica."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"


def test_a_router_that_reads_from_a_replica(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [Replicas()]
    (found,) = check_deployment(None)
    assert (found.id, "'replica'" in found.msg) == ("agentruns.W013", True)
    settings.DATABASE_ROUTERS = [JournalRouter(), Replicas()]
    assert check_deployment(None) == []
    settings.AGENTRUNS_DATABASE = "other"
    assert check_deployment(None) == []


# The dispatcher


class Mute:
    """Cannot ring."""


class Celerys(CeleryDispatcher):
    """A project's own."""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("shop.bells.Bell", "No module named 'shop'"),
        ("nonsense", "nonsense"),
        (f"{__name__}.Mute", "no method notify"),
        (f"{__name__}.LATE", "not callable"),
    ],
)
def test_a_dispatcher_that_cannot_be_used(path: str, why: str, settings: Any) -> None:
    settings.AGENTRUNS_DISPATCHER = path
    (found,) = check_dispatcher(None)
    assert (found.id, why in found.msg) == ("agentruns.E014", True)


def test_telemetry_that_is_not_there(settings: Any) -> None:
    assert check_values(None) == []
    settings.AGENTRUNS_TELEMETRY = "agentruns.contrib.opentelemetry.OpenTelemetry"
    assert check_values(None) == []
    settings.AGENTRUNS_TELEMETRY = "shop.spans.Spans"
    (found,) = check_values(None)
    assert (found.id, "No module named 'shop'" in found.msg) == ("agentruns.E016", True)


@pytest.fixture
def app(settings: Any) -> Iterator[Any]:
    """A project's Celery."""
    settings.AGENTRUNS_DISPATCHER = f"{__name__}.Celerys"
    before = celery.current_app._get_current_object()
    app = celery.Celery("shop", broker="redis://localhost/0", set_as_current=True)
    yield app
    app.close()
    before.set_current()


def test_celery_as_it_should_be(app: Any) -> None:
    app.conf.task_acks_late = True  # not of our task, which says otherwise itself
    assert check_dispatcher(None) == []


def test_eager_celery(app: Any, settings: Any) -> None:
    app.conf.task_always_eager = True
    assert ids(check_dispatcher(None)) == ["agentruns.W009"]
    settings.AGENTRUNS_DISPATCHER = f"{SweepDispatcher.__module__}.SweepDispatcher"
    assert check_dispatcher(None) == []


def test_a_project_that_acknowledges_late(app: Any) -> None:
    @tool(timeout=4000)
    def ship(number: str) -> str:
        """Ship."""
        return "shipped"

    app.conf.task_annotations = {"agentruns.advance_run": {"acks_late": True}}
    assert check_dispatcher(None) == []  # an hour is long enough for a model's reply
    Agent("shipper", instructions="Ship.", model="claude-sonnet-5-5", tools=[ship])
    (found,) = check_dispatcher(None)
    assert (found.id, "3600 s" in found.msg, "4000 s" in found.msg) == ("agentruns.W008", True, True)
    app.conf.broker_transport_options = {"visibility_timeout": 5000}
    assert check_dispatcher(None) == []
    app.conf.broker_transport_options = {"visibility_timeout": 60}
    assert ids(check_dispatcher(None)) == ["agentruns.W008"]
    app.conf.broker_url = "amqp://localhost"  # redelivers when a connection ends, and not before
    assert check_dispatcher(None) == []


# The sweep


@pytest.mark.django_db(transaction=True)
def test_nobody_sweeps() -> None:
    def found() -> list[str]:
        return ids(check_sweeper(None, databases=["default"]))

    assert (sweeper("default"), found()) == ("never", [])
    agent = shop_agent("waits")
    run = start_run(agent, "go", "s1", idempotency_key="k")
    assert found() == []  # not for long
    Run.objects.filter(pk=run.pk).update(updated_at=Now() - LATE)
    assert found() == ["agentruns.W012"]
    Control.objects.update_or_create(name=Control.DRAINING, defaults={"seen_at": Now()})  # is no sweep
    assert (sweeper("default"), found()) == ("never", ["agentruns.W012"])
    sweep(drives=False)
    assert (sweeper("default"), found()) == ("ok", [])
    Control.objects.update(seen_at=Now() - LATE)
    assert (sweeper("default"), found()) == ("late", ["agentruns.W012"])
    Run.objects.filter(pk=run.pk).update(status="completed")
    assert (sweeper("default"), found()) == ("late", [])
