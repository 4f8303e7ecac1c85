"""System checks: settings, databases, agents, and what surrounds the app; and their reference pages."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import celery
import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import Group, Permission, User
from django.core.checks import WARNING, run_checks
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.functions import Now
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from agentruns import Policy, start_run, tool
from agentruns.agents.agent import Agent
from agentruns.checks.agents import check_agents, check_approvers
from agentruns.checks.deployment import check_database, check_deployment, check_dispatcher, check_sweeper
from agentruns.checks.settings import check_payload_storage, check_policy, check_settings, check_values
from agentruns.conf import DEFAULTS
from agentruns.models import Control, Run
from agentruns.models.router import JournalRouter
from agentruns.services.sweep import sweep, sweeper
from agentruns.tasks import CeleryDispatcher
from agentruns.tools import Tool
from tests.db.helpers import user
from tests.registry import isolated_registry
from tests.shop.agents import refund as anybodys, shop_agent

pytestmark = pytest.mark.django_db

MODEL = "claude-sonnet-5-5"
LATE = timedelta(minutes=10, seconds=1)
WAL, OFF = "PRAGMA journal_mode=WAL", "PRAGMA synchronous=OFF"
ROOT = Path(__file__).parents[2]
ID = re.compile(r"agentruns\.[EW]\d{3}")


@tool(requires_approval=True, approvers="finance")
def wire(cents: int) -> str:
    """Wire money."""
    return "wired"


@tool(requires_approval=lambda args, ctx: True, approvers="auth.change_user")
def refund(cents: int) -> str:
    """Refund."""
    return "refunded"


def ids(found: Any) -> list[str]:
    """List the ids of messages of checks."""
    return [message.id for message in found]


def test_the_settings_of_the_tests_are_fine_and_asking_a_database_is_quick() -> None:
    """A few questions, however much there is: the longest are about tools that two groups approve."""
    found = [check(None) for check in (check_settings, check_deployment, check_dispatcher, check_values)]
    assert found == [[], [], [], []]
    assert ids(check_database(None, databases=["default"])) == []
    for number in range(5):
        Agent(f"gated-{number}", instructions="", model=MODEL, tools=[wire, refund])
    checks = (check_database, check_approvers, check_sweeper)
    with CaptureQueriesContext(connections["default"]) as asked:
        for check in checks:
            check(None, databases=["default"])
    assert len(asked) <= 14, [query["sql"] for query in asked]
    with CaptureQueriesContext(connections["default"]) as asked:
        for check in checks:
            assert check(None, databases=None) == check(None, databases=["other"]) == []
    assert len(asked) == 0


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"AGENTRUNS_LEASE_SECOND": 5}, "agentruns.W001"),
        ({"AGENTRUNS_CAN_DECIDE": "shop.rules.can_decide"}, "agentruns.W001"),  # the policy replaces it
        ({"AGENTRUNS_LEASE_SECONDS": 10, "AGENTRUNS_HEARTBEAT_SECONDS": 9}, "agentruns.E001"),
        ({"USE_TZ": False}, "agentruns.E002"),
        ({"AGENTRUNS_DATABASE": "nowhere"}, "agentruns.E003"),
        ({"AGENTRUNS_PRICES": {MODEL: {"input": 3}}}, "agentruns.E007"),
        ({"AGENTRUNS_PRICES": None}, "agentruns.E007"),
    ],
)
def test_a_setting_that_breaks_the_promise_is_found(changed: dict[str, Any], expected: str) -> None:
    with override_settings(**changed):
        (found,) = check_settings(None)
    assert found.id == expected
    assert found.hint


def test_a_new_project_hears_of_the_storage_when_it_is_deployed() -> None:
    without = {name: one for name, one in django_settings.STORAGES.items() if name != "agentruns"}
    with override_settings(STORAGES=without):
        assert "agentruns.W005" not in ids(run_checks())
        found = [one for one in run_checks(include_deployment_checks=True) if one.id == "agentruns.W005"]
        assert found == check_payload_storage(None)
        assert "docs/" not in str(found[0].hint)
        with override_settings(AGENTRUNS_PAYLOAD_STORAGE=""):
            assert check_payload_storage(None) == []


def test_every_wrong_price_is_told_and_an_agent_whose_cost_nobody_can_know() -> None:
    Agent("thrifty", instructions="Save.", model=MODEL, cost_budget=1)
    Agent("generous", instructions="Spend.", model=MODEL)
    (found,) = check_agents(None)
    assert (found.id, found.level) == ("agentruns.W003", WARNING)
    assert "thrifty" in found.msg
    assert MODEL in found.msg
    with override_settings(AGENTRUNS_PRICES={MODEL: {"input": 3, "output": 15}}):
        assert check_agents(None) == check_settings(None) == []
    with override_settings(AGENTRUNS_PRICES={"a": {}, "b": {"input": -1, "output": 1}}):
        assert ids(wrong := check_settings(None)) == ["agentruns.E007"] * 2
        assert ["'a'" in wrong[0].msg, "'b'" in wrong[1].msg] == [True, True]
        assert check_agents(None) == []  # one mistake, said once


@pytest.mark.parametrize(
    ("vendor", "facts", "expected"),
    [("mysql", {}, "agentruns.E004"), (None, {"AUTOCOMMIT": False}, "agentruns.E005")],
)
def test_a_database_that_breaks_the_promise_is_found(
    vendor: str | None, facts: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connections["default"]
    monkeypatch.setattr(type(connection), "vendor", vendor or connection.vendor)
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", True)
    for name, value in facts.items():
        monkeypatch.setitem(connection.settings_dict, name, value)
    (found,) = check_database(None, databases=["default"])
    assert found.id == expected
    assert found.hint
    assert check_database(None, databases=None) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("idle_in_transaction_session_timeout = 0", "agentruns.W014"),
        ("synchronous_commit = off", "agentruns.E006"),
    ],
    ids=["keeps locks", "forgets"],
)
def test_a_server_that_breaks_the_promise_is_found(change: str, expected: str) -> None:
    connection = connections["default"]
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has no server: test_a_database_of_sqlite has what it can be told")
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL {change}")
    assert ids(check_database(None, databases=["default"])) == [expected]


class Mistyped(Policy):
    def can_decides(self, user: Any, approval: Any, arguments: Any) -> bool:
        """Be asked by nobody."""
        return False

    def _helper(self) -> None:
        """Help."""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("agentruns.Policy", []), ("nowhere.Policy", ["agentruns.E018"]),
        ("agentruns.Agent", ["agentruns.E018"]), (f"{__name__}.Mistyped", ["agentruns.W015"]),
    ],
)  # fmt: skip
def test_the_policy_is_one_and_all_its_methods_are_asked(path: str, expected: list[str]) -> None:
    with override_settings(AGENTRUNS_POLICY=path):
        assert ids(check_policy(None)) == expected


@pytest.fixture
def scratch(tmp_path: Path, django_db_blocker: Any) -> Iterator[Callable[..., None]]:
    """Make the journal's database an SQLite one of its own: those of the tests are as they should be."""

    def make(name: str, **options: Any) -> None:
        where = {"ENGINE": "django.db.backends.sqlite3", "NAME": name or tmp_path / "db"}
        database = {**where, "OPTIONS": options}
        connections.settings["scratch"] = connections.configure_settings({"default": database})["default"]

    with override_settings(AGENTRUNS_DATABASE="scratch"), django_db_blocker.unblock():
        yield make
    BaseDatabaseWrapper.close(connections["scratch"])  # SQLite's own leaves a database in memory open
    del connections["scratch"], connections.settings["scratch"]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (":memory:", {}, ["agentruns.E015"]),
        ("file:shop?mode=memory&cache=shared", {}, ["agentruns.E015"]),
        # As Django's own tests have it.
        ("file:memorydb_default?mode=memory&cache=shared", {"transaction_mode": "IMMEDIATE"}, []),
        ("", {"transaction_mode": "IMMEDIATE"}, ["agentruns.W006"]),
        ("", {"init_command": OFF}, ["agentruns.W002", "agentruns.W006", "agentruns.E006"]),
        ("", {"init_command": f"{WAL}; PRAGMA synchronous=NORMAL"}, ["agentruns.W002", "agentruns.E006"]),
        ("", {"init_command": WAL}, ["agentruns.W002"]),
        ("", {"transaction_mode": "IMMEDIATE", "init_command": WAL}, []),
    ],
)
def test_a_database_of_sqlite(
    name: str, options: dict[str, Any], expected: list[str], scratch: Callable[..., None]
) -> None:
    scratch(name, **options)
    found = check_database(None, databases=["scratch"])
    assert ids(found) == expected
    assert all(one.hint for one in found)


def test_a_name_that_is_no_claude_model() -> None:
    for number, model in enumerate((MODEL, "eu.anthropic.claude-sonnet-5-5", "Claude-Haiku-5@20261021")):
        Agent(f"fine-{number}", instructions="", model=model)
    shop_agent("an object")
    assert check_agents(None) == []
    Agent("mistyped", instructions="", model="gpt-7")
    (found,) = check_agents(None)
    assert (found.id, "mistyped" in found.msg, "'gpt-7'" in found.msg) == ("agentruns.W011", True, True)


def test_an_agent_without_a_model_has_the_default_one_or_is_refused(settings: Any) -> None:
    settings.AGENTRUNS_DEFAULT_MODEL = MODEL
    agent = Agent("plain", instructions="Help.")
    named = Agent("plain", instructions="Help.", model=MODEL)
    assert (agent.model, agent.definition()["model"]) == (MODEL, MODEL)
    assert agent.definition_hash == named.definition_hash
    settings.AGENTRUNS_DEFAULT_MODEL = "claude-haiku-5"
    assert Agent("plain", instructions="Help.").definition_hash != agent.definition_hash
    assert (agent.model, Agent("own", instructions="", model=MODEL).model) == (MODEL, MODEL)
    for default, words in ((None, "AGENTRUNS_DEFAULT_MODEL"), ("", "AGENTRUNS_DEFAULT_MODEL"), (5, "not 5")):
        settings.AGENTRUNS_DEFAULT_MODEL = default
        with pytest.raises(TypeError, match=f"Agent 'plain'.* model.*{words}"):
            Agent("plain", instructions="Help.")


def found(*tools: Tool) -> list[str]:
    """List what the check says of an agent with these tools."""
    with isolated_registry():
        Agent("gated", instructions="", model=MODEL, tools=tools)
        messages = check_approvers(None, databases=["default"])
    assert all(one.hint for one in messages)
    assert {*ids(messages)} <= {"agentruns.W010"}
    return [one.msg for one in messages]


def test_a_gate_that_nobody_may_open() -> None:
    assert found() == found(anybodys) == []  # nobody at all: the project is being set up
    user("cy")
    (nobody,) = found(anybodys)
    assert "refund" in nobody
    assert found(tool(refund.fn, outward=True)) == found(tool(refund.fn, requires_approval=True))
    user("bo", "decide_approval")
    assert found(anybodys) == []
    (mistyped,) = found(wire, anybodys)
    assert "approvers='finance' of wire names neither a permission nor a group" in mistyped
    escalating = tool(
        refund.fn, requires_approval=True, escalate_after=timedelta(days=1), escalate_to="managers"
    )
    (unknown,) = found(escalating)
    assert "escalate_to='managers' of refund names neither a permission nor a group" in unknown
    Group.objects.create(name="managers")
    assert found(escalating) == []
    finance = Group.objects.create(name="finance")
    (empty,) = found(wire)
    assert "may decide for 'finance'" in empty
    finance.user_set.add(user("al"))  # who may not decide at all
    assert len(found(wire)) == 1
    finance.permissions.add(Permission.objects.get(codename="decide_approval"))
    assert found(wire) == []
    User.objects.filter(username="al").update(is_active=False)
    assert len(found(wire)) == 1
    User.objects.create_superuser("boss")
    assert found(wire, anybodys) == []


def test_a_gate_that_a_permission_opens(settings: Any) -> None:
    bo = user("bo", "decide_approval")
    assert len(found(refund)) == 1
    bo.user_permissions.add(Permission.objects.get(codename="change_user"))
    assert found(refund) == []
    bo.user_permissions.clear()
    # With permissions from elsewhere nobody can tell.
    settings.AUTHENTICATION_BACKENDS = ["shop.auth.Directory", *settings.AUTHENTICATION_BACKENDS]
    assert found(refund) == []


class Replicas:
    """Reads from a replica."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "replica"


def test_atomic_requests_and_a_router_that_reads_from_a_replica(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    (found,) = check_deployment(None)
    assert found.id == "agentruns.W007"
    assert "non_atomic_requests(using='default')" in str(found.hint)
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", False)
    settings.DATABASE_ROUTERS = [Replicas()]
    (found,) = check_deployment(None)
    assert (found.id, "'replica'" in found.msg) == ("agentruns.W013", True)
    settings.DATABASE_ROUTERS = [JournalRouter(), Replicas()]
    assert check_deployment(None) == []
    settings.AGENTRUNS_DATABASE = "other"
    assert check_deployment(None) == []


Mute, Celerys = type("Mute", (), {}), type("Celerys", (CeleryDispatcher,), {})  # cannot ring; a project's own


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("shop.bells.Bell", "No module named 'shop'"), ("nonsense", "nonsense"),
        (f"{__name__}.Mute", "no method notify"), (f"{__name__}.LATE", "not callable"),
    ],
)  # fmt: skip
def test_a_dispatcher_that_cannot_be_used(path: str, why: str, settings: Any) -> None:
    settings.AGENTRUNS_DISPATCHER = path
    (found,) = check_dispatcher(None)
    assert (found.id, why in found.msg) == ("agentruns.E014", True)
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


def test_celery_as_it_should_be_and_eager(app: Any, settings: Any) -> None:
    app.conf.task_acks_late = True  # not of our task, which says otherwise itself
    assert check_dispatcher(None) == []
    app.conf.task_always_eager = True
    assert ids(check_dispatcher(None)) == ["agentruns.W009"]
    settings.AGENTRUNS_DISPATCHER = "agentruns.engine.wakeup.SweepDispatcher"
    assert check_dispatcher(None) == []


def test_a_project_that_acknowledges_late(app: Any) -> None:
    @tool(timeout=4000)
    def ship(number: str) -> str:
        """Ship."""
        return "shipped"

    app.conf.task_annotations = {"agentruns.advance_run": {"acks_late": True}}
    assert check_dispatcher(None) == []  # an hour is long enough for a model's reply
    Agent("shipper", instructions="Ship.", model=MODEL, tools=[ship])
    (found,) = check_dispatcher(None)
    assert (found.id, "3600 s" in found.msg, "4000 s" in found.msg) == ("agentruns.W008", True, True)
    for seconds, expected in ((5000, []), (60, ["agentruns.W008"])):
        app.conf.broker_transport_options = {"visibility_timeout": seconds}
        assert ids(check_dispatcher(None)) == expected
    app.conf.broker_url = "amqp://localhost"  # redelivers when a connection ends, and not before
    assert check_dispatcher(None) == []


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


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def in_python(folder: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py"))


def test_all_checks_are_listed_and_tested() -> None:
    known = {*re.findall(r'id="(agentruns\.[EW]\d{3})"', in_python("agentruns"))}
    listed = re.findall(r"^\| `(agentruns\.[EW]\d{3})` \|", page("reference/checks.md"), re.MULTILINE)
    assert listed == sorted(known)
    assert known <= {*ID.findall(in_python("tests"))}


@pytest.mark.parametrize("name", ["reference/checks.md", "databases.md"])
def test_the_settings_that_are_named_exist(name: str) -> None:
    named = {*re.findall(r"AGENTRUNS_([A-Z_]+[A-Z])", page(name))}
    assert named <= {*DEFAULTS}


def test_all_settings_are_listed_with_their_defaults() -> None:
    row = r"^\| `AGENTRUNS_(\w+)` \| [^|]+ \| `([^|]+)` \| [^|]+ \|$"
    rows = re.findall(row, page("reference/settings.md"), re.MULTILINE)
    assert [name for name, _default in rows] == [*dict.fromkeys(name for name, _default in rows)]
    assert {name: ast.literal_eval(default) for name, default in rows} == DEFAULTS
