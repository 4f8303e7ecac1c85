from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import pytest
from coverage import Coverage
from django.contrib.contenttypes.models import ContentType
from django.db import DatabaseError, InterfaceError, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import TransactionTestCase
from hypothesis import HealthCheck, settings as hypothesis_settings

from agentruns.agents.agent import Agent, register, registered
from agentruns.engine.driver import Driver
from agentruns.engine.leases import keeper
from agentruns.models import Approval, Run, triggers
from agentruns.services.runs.lifecycle import run_agent
from tests import effects as ledger, files, rebuild, scratch
from tests.admin.world import World
from tests.api.http import make_user
from tests.bells import WitnessBell
from tests.registry import isolated_registry
from tests.settings import BRIEF, DATABASE
from tests.shop.agents import call, shop_agent
from tests.tenants.project import waiting_runs
from tests.waiting import LIMIT, wait_for

# By default Python looks for garbage after 700 new objects: among all that is imported, a fifth of the time.
gc.set_threshold(20_000, 20, 50)
# Child processes start twice as fast from compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Each test has a folder: to make and delete them on a disk takes a tenth of all the time.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", scratch.folder())
if "PYTEST_XDIST_WORKER" in os.environ:
    # This process is measured. Its children are not: most are killed before they could report.
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)

# How long an example takes tells of the machine and not of the code.
hypothesis_settings.register_profile(
    "any machine", hypothesis_settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def _asked_for_database() -> None:
    """Without this, a wrong start would test SQLite twice and still be green."""
    vendor = {"sqlite": "sqlite", "postgres": "postgresql"}[DATABASE]
    assert {connection.vendor for connection in connections.all()} == {vendor}


@pytest.fixture(scope="session", autouse=True)
def _time_enough() -> Iterator[None]:
    """Give minutes to work that a page or a worker waits seconds for; a test of such a limit sets its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentruns.tools.card.PATIENCE", LIMIT)
        patch.setattr("agentruns.contrib.slack.PATIENCE", LIMIT)
        for module in ("contrib.mail", "contrib.slack", "contrib.webhook", "journal.anchor"):
            patch.setattr(f"agentruns.{module}.TIMEOUT", LIMIT)
        yield


@pytest.fixture(autouse=True)
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ledger.Effects:
    """The ledger of outside effects; child processes find it with `Effects.from_environment()`."""
    path = tmp_path / "effects.jsonl"
    monkeypatch.setenv(ledger.VARIABLE, str(path))
    return ledger.Effects(path)


@pytest.fixture(autouse=True)
def _agents_are_forgotten() -> Iterator[None]:
    """Agents declared by a test are registered beside those of the apps, until its end."""
    known = registered()
    with isolated_registry():
        for agent in known:
            register(agent)
        yield


@pytest.fixture(autouse=True)
def _forgetful(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the drivers of the engine's tests forget, where the test run asks for it."""
    if rebuild.FORGETFUL and request.node.get_closest_marker("remembers") is None:
        monkeypatch.setattr(Driver, "_stored", rebuild.forgetting(Driver._stored))
        monkeypatch.setenv("AGENTRUNS_TEST_REBUILD", "1")  # for child processes


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that run the same whether drivers forget or not."""
    if rebuild.remembers(item.path):
        item.add_marker("remembers")


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Iterator[Path]:
    """Where large results are stored."""
    folder = tmp_path / "payloads"
    settings.STORAGES = {**settings.STORAGES, **files.alias(folder)}
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def world(db: None) -> World:
    """Runs in every state that a person meets."""
    return World()


@pytest.fixture
def urlconf(settings: Any) -> Any:
    """Serve these patterns instead of those of the tests."""

    def serve(*patterns: Any) -> None:
        module = ModuleType("tests.api.urlconf")
        module.urlpatterns = list(patterns)  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module
        settings.ROOT_URLCONF = module.__name__

    yield serve
    sys.modules.pop("tests.api.urlconf", None)


@pytest.fixture
def shop() -> Agent:
    """An agent whose refund over 1000 cents asks a person."""
    return shop_agent("shop", {"tools": [call("refund", cents=5000)]})


@pytest.fixture
def owner(db: None) -> Any:
    return make_user("owner")


@pytest.fixture
def decider(db: None) -> Any:
    return make_user("decider", "decide_approval")


@pytest.fixture
def pending(shop: Agent, owner: Any) -> Callable[..., Approval]:
    """Make a pending approval of a run, owned by `owner` if nobody else is named."""

    def make(session: str = "s1", actor: Any = owner) -> Approval:
        result = run_agent(shop, "refund it", session, actor=actor, idempotency_key=session)
        assert result.status == "awaiting-approval"
        approval: Approval = result.pending[0]
        return approval

    return make


@pytest.fixture
def bell(settings: Any, monkeypatch: pytest.MonkeyPatch) -> type[WitnessBell]:
    """The dispatcher of the test: it has rung for no run yet."""
    settings.AGENTRUNS_DISPATCHER = "tests.bells.WitnessBell"
    monkeypatch.setattr(WitnessBell, "rung", [])
    return WitnessBell


@pytest.fixture
def two(settings: Any) -> dict[str, Run]:
    """A waiting run of each tenant under the same keys, whose every text names its tenant."""
    settings.AGENTRUNS_POLICY = "tests.tenants.policy.Policy"
    return waiting_runs()


# Tests that measure no coverage: they look at the tree, or drive at random what other tests drive on purpose.
UNMEASURED = {"model", "packaging", "properties"}


@contextmanager
def _untraced() -> Iterator[None]:
    """Trace nothing in this thread, nor in threads begun meanwhile: tracing doubles the time of Python."""
    here, begun = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        yield
    finally:
        sys.settrace(here)
        threading.settrace(begun)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Build the items untraced: their modules are imported already."""
    with _untraced():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the tests of `UNMEASURED` untraced."""
    with _untraced() if item.path.parent.name in UNMEASURED else nullcontext():
        return (yield)


def pytest_collection_finish() -> None:
    """Leave the modules and the tests, which live as long as the process, out of every search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Store the coverage of a process now: xdist kills a process that takes ten seconds to end."""
    if "PYTEST_XDIST_WORKER" in os.environ and (measured := Coverage.current()) is not None:
        measured.save()


LEFT = 120.0  # seconds for what a test left at work
KEPT = {"django_migrations", "django_content_type", "auth_permission"}
# What takes ten seconds and more: begun first, so that no process works on one of them alone at the end.
LONG = (
    "test_machine", "test_copies", "test_soak", "test_at_each_statement", "test_plugin",
    "test_readme", "test_claims", "test_races", "test_mixed_replies", "tests/e2e", "test_history",
    "test_docs_tutorial", "test_wheel", "test_typing", "test_deploys", "test_celery", "test_closing",
    "test_a_project_lives",
)  # fmt: skip
# By one process: what they share takes long to make, or to import (the Anthropic SDK: two seconds).
TOGETHER = {
    "demo": ("e2e/test_demo", "e2e/test_console"),
    "celery": ("workers/test_celery",),
    "failover": ("tests/failover",),
    "sdk": (
        "test_fake_anthropic", "unit/test_anthropic", "test_window", "test_caching", "unit/test_providers",
        "db/test_claude", "test_claude_page", "test_odd_results",
    ),
}  # fmt: skip


def is_for_the_other_database(item: pytest.Item) -> bool:
    """Deal the cases of a product out to the databases, in `make test`; `make test-full` has all on each."""
    if not BRIEF or item.get_closest_marker("one_database") is None:
        return False
    return crc32(item.nodeid.encode()) % 2 != (DATABASE == "postgres")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the long tests out to the beginnings of the parts that xdist's worksteal gives each process."""
    elsewhere = [item for item in items if is_for_the_other_database(item)]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in elsewhere]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long: dict[str, list[pytest.Item]] = {}
    rest: list[pytest.Item] = []
    for item in items:
        shares = [key for key, names in TOGETHER.items() if any(name in item.nodeid for name in names)]
        if shares or any(name in item.nodeid for name in LONG):
            long.setdefault(shares[0] if shares else item.nodeid, []).append(item)
        else:
            rest.append(item)
    items[:] = [
        item
        for number in range(processes)
        for item in (*chain(*list(long.values())[number::processes]), *rest[number::processes])
    ]


@pytest.fixture(scope="session", autouse=True)
def _emptied_quickly() -> Iterator[None]:
    """Django's flush makes all tables and all permissions anew: a third of the time of two thousand tests."""

    def empty(case: TransactionTestCase) -> None:
        for alias in case._databases_names(include_mirrors=False):  # type: ignore[attr-defined]
            _empty(connections[alias])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", empty)
        yield


_emptied: Counter[str] = Counter()  # how often, by database
_tables: dict[str, list[str]] = {}  # by database


def _empty(connection: BaseDatabaseWrapper) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_filled(connection))  # one question: most tests fill few of the tables
        filled = [name for (name,) in cursor.fetchall()]
    if filled:
        _delete(connection, filled)
    if triggers.differences(connection):
        triggers.install(connection)
    ContentType.objects.clear_cache()


def _filled(connection: BaseDatabaseWrapper) -> str:
    if connection.alias not in _tables:
        there = connection.introspection.django_table_names(include_views=False)
        _tables[connection.alias] = sorted({*there} - KEPT)
    tables = _tables[connection.alias]
    return " UNION ALL ".join(
        f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM \"{table}\")" for table in tables
    )


def _delete(connection: BaseDatabaseWrapper, tables: list[str]) -> None:
    with ExitStack() as stack:
        if {triggers.MESSAGE, triggers.TOMBSTONE} & {*tables}:
            stack.enter_context(triggers.lifted(connection))
        stack.enter_context(transaction.atomic(using=connection.alias))
        cursor = stack.enter_context(connection.cursor())
        if connection.vendor == "postgresql":
            cursor.execute("SET LOCAL session_replication_role = replica")  # no foreign keys
        for table in tables:
            cursor.execute(f'DELETE FROM "{table}"')
    _emptied[connection.alias] += 1
    if connection.vendor == "postgresql" and _emptied[connection.alias] % 10 == 0:
        with connection.cursor() as cursor:  # or every scan reads the rows of all tests before
            cursor.execute("VACUUM " + ", ".join(f'"{table}"' for table in _tables[connection.alias]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Wait for what a test left at work, or emptying the tables runs into a deadlock with it."""
    mark = item.get_closest_marker("django_db")
    if mark is None or not mark.kwargs.get("transaction"):
        return
    with suppress(AssertionError):  # what hangs for ever is the next test's to complain of
        wait_for(lambda: not _is_at_work(), "what the test left at work", LEFT)


def _is_at_work() -> bool:
    names = {thread.name for thread in threading.enumerate()}
    if not (keeper._leases or keeper._is_connected):  # it only waits for the next run
        names.discard("agentruns-keeper")
    return any(name.startswith("agentruns-") for name in names) or (
        DATABASE == "postgres" and _somebody_writes()
    )


def _somebody_writes() -> bool:
    """Whether another backend is inside a transaction, such as that of a process just killed."""
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND xact_start IS NOT NULL AND backend_type = 'client backend')"
            )
            return bool(cursor.fetchone()[0])
    except (DatabaseError, InterfaceError, RuntimeError):
        return False  # a test of a database that is out of reach, or one that was skipped and may use none
