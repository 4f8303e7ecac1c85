"""Projects that are not ours: their transactions, users, routers, connections and test cases."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core import serializers
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.db.backends.signals import connection_created

from agentruns import approve, cancel_run, pause_run, resume_run, run_agent, start_run, tool
from agentruns.checks.deployment import check_database
from agentruns.exceptions import NotDurableError
from agentruns.journal.connection import own_alias, own_connection
from agentruns.journal.verify import problems
from agentruns.models import Approval, Definition, Message, Run, Session, triggers
from agentruns.services.sweep import sweep
from tests.bells import WitnessBell
from tests.db.dying import elsewhere
from tests.db.helpers import names, run_turns, the_run
from tests.effects import Effects
from tests.programs import run_program
from tests.shop.agents import call, charge
from tests.shop.models import Order
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)

TABLES = (Definition, Session, Run, Message, Approval)


# Projects of their own


@pytest.mark.parametrize("host", ["uuid_users", "routed", "pooled"])
def test_a_project_lives_the_whole_story(host: str, effects: Effects) -> None:
    if host == "pooled" and connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL has a connection pool")
    lived = run_program(sys.executable, "-m", "tests.hosts", DJANGO_SETTINGS_MODULE=f"tests.hosts.{host}")
    facts = json.loads(lived.stdout.splitlines()[-1])
    assert (facts["waiting"], facts["completed"], facts["status"]) == (1, 1, "completed")
    assert set(facts["pages"].values()) == {200}
    assert (facts["clicked"], facts["api"], facts["runs"]) == (302, [201, 200, "cancelled"], [facts["run"]])
    assert {facts["owner"], facts["decided_by"], *facts["actors"]} == {facts["boss"]}
    assert facts["note"] == "seen"
    assert facts["effects"] == sorted(names(effects)) == ["post", "refund", "search", "search"]
    if host == "uuid_users":
        assert str(UUID(facts["boss"])) == facts["boss"]


def test_a_project_without_time_zones_is_told_before_anything_runs() -> None:
    command = (sys.executable, "-m", "django", "check")
    checked = run_program(*command, code=1, DJANGO_SETTINGS_MODULE="tests.hosts.naive_times")
    assert "agentruns.E002" in checked.stderr
    assert "Set USE_TZ = True" in checked.stderr


# start() in the caller's transaction


def everything() -> list[int]:
    return [table._default_manager.count() for table in TABLES]


def order(number: str) -> Order:
    return Order.objects.create(number=number, customer="Ada", total_cents=1)


def test_a_savepoint_takes_back_its_start_and_nothing_else(effects: Effects, bell: type[WitnessBell]) -> None:
    """What is started beside an order is seen when the order is, or leaves nothing at all with it."""
    for _ in range(2):
        with transaction.atomic():
            order("A1")
            start_run("calls-annotate", "the first task", "s1", idempotency_key="k1")
            transaction.set_rollback(True)
        assert (everything(), Order.objects.count(), bell.rung) == ([0] * len(TABLES), 0, [])
        assert sweep().found == 0
    with transaction.atomic():
        kept = start_run("calls-annotate", "the first task", "s1", idempotency_key="k1")
        with transaction.atomic():
            start_run("calls-post", "the second task", "s2", idempotency_key="k2")
            transaction.set_rollback(True)
        order("A1")
        assert elsewhere(lambda: (everything(), Order.objects.count())) == ([0] * len(TABLES), 0)
        assert bell.rung == []
    assert (Run.objects.get(), Session.objects.get().key, Message.objects.count()) == (kept, "s1", 2)
    assert bell.rung == [(kept.pk, True)]
    again = start_run("calls-post", "the second task", "s2", idempotency_key="k2")
    assert (sweep().completed, Order.objects.get().note, effects.count()) == (2, "seen", 1)
    assert (problems(kept.session_id), problems(again.session_id)) == ([], [])


def test_clicks_in_a_transaction_that_rolls_back_did_not_happen(
    effects: Effects, bell: type[WitnessBell]
) -> None:
    """Cancel and pause take the lease of a waiting run; that is undone with them."""
    result = run_turns({"tools": [call("refund", cents=5000)]})
    run = the_run(result)
    before = list(Run.objects.values()), Message.objects.count()
    for click, pk in ((approve, result.pending[0].pk), (cancel_run, run.pk), (pause_run, run.pk)):
        with transaction.atomic():
            click(pk, None)
            transaction.set_rollback(True)
        assert (list(Run.objects.values()), Message.objects.count()) == before
    assert (bell.rung, sweep().found) == ([], 0)
    with transaction.atomic():
        approve(result.pending[0].pk, None)
    assert (sweep().completed, effects.count()) == (1, 1)
    the_run(result)


# Autocommit off


@pytest.fixture(params=["turned off by the caller", "AUTOCOMMIT of the project"])
def manual(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is kept on this connection until somebody commits."""
    if request.param == "turned off by the caller":
        transaction.set_autocommit(False)
    else:
        monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
        connection.close()
        assert not connection.get_autocommit()
        (found,) = check_database(None, databases=["default"])
        assert found.id == "agentruns.E005"
    yield
    transaction.rollback()
    monkeypatch.undo()
    connection.close()


def test_without_autocommit_nothing_is_driven_and_a_start_is_the_callers_to_commit(
    effects: Effects, manual: None
) -> None:
    for drive in (
        lambda: run_agent("calls-post", "do it", "s1", idempotency_key="k"),
        sweep,
        lambda: call_command("run_agent", "calls-post", "do it", session="s1"),
    ):
        with pytest.raises((NotDurableError, CommandError), match="Turn AUTOCOMMIT on"):
            drive()
        transaction.commit()
        assert (everything(), effects.count()) == ([0] * len(TABLES), 0)
    for end in (transaction.rollback, transaction.commit):
        order("A1")  # SQLite's transaction begins with the first change, not with a savepoint
        run = start_run("calls-post", "do it", "s1", idempotency_key="k")
        end()
        assert Order.objects.count() == Run.objects.count() == (end is transaction.commit)
    with pytest.raises(NotDurableError, match="Turn AUTOCOMMIT on"):
        resume_run(run.pk)
    transaction.rollback()
    assert elsewhere(lambda: Run.objects.get().status) == "queued"
    transaction.set_autocommit(True)
    assert (sweep().completed, effects.count(), problems(run.session_id)) == (1, 1, [])
    transaction.set_autocommit(False)


# Connections that live long, or not at all


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connections live for a minute, as in production."""
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", 60)
    yield
    monkeypatch.undo()
    connections.close_all()


def used() -> Any:
    """Find the driver's connection that a drive would commit on."""
    with own_connection("default"):
        own = connections[own_alias("default")]
        own.ensure_connection()
        return own.connection


def is_closed(raw: Any) -> bool:
    with pytest.raises(Exception, match="closed"):
        raw.cursor().execute("SELECT 1")
    return True


TENANT: list[Any] = []  # the raw connections on which the tenant was set, while there is a tenant


def state_of_tenant(shared: Any) -> Any:
    return (lambda other: TENANT.append(other.connection)) if TENANT else None


def test_no_tenant_gets_the_connection_of_another(kept: None, settings: Any) -> None:
    settings.AGENTRUNS_CONNECTION_STATE = f"{__name__}.state_of_tenant"
    TENANT.append("there is one")
    of_tenant = used()
    assert of_tenant in TENANT and used() is of_tenant
    TENANT.clear()
    free = used()
    assert is_closed(of_tenant) and free is not of_tenant and used() is free


@pytest.mark.parametrize("age", [0, 60])
def test_a_run_connects_once_and_its_heartbeat_leaves_no_connection_behind(
    age: int, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", age)
    connection.close()
    made: dict[str, list[Any]] = {}

    def note(connection: Any, **_signal: Any) -> None:
        made.setdefault(threading.current_thread().name, []).append(connection.connection)

    @tool
    def dawdle() -> str:
        wait_for(lambda: made.get("agentruns-keeper"), "a heartbeat")
        return "done"

    connection_created.connect(note)
    try:
        run_turns(*[{"tools": [call("dawdle"), call("charge", cents=5)]}] * 3, tools=[dawdle, charge])
        opened = len(made.pop(threading.current_thread().name))
        assert opened == 2, "the thread's, and the journal's own"
    finally:
        connection_created.disconnect(note)
        connections.close_all()
    assert all(is_closed(raw) for raw in made["agentruns-keeper"])


def test_a_forked_process_leaves_it_to_its_parent(kept: None) -> None:
    first = used()
    assert used() is first
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


# Test cases, and what empties the database after them


@pytest.mark.django_db
def test_a_run_inside_a_testcase_has_no_threads(
    effects: Effects, bell: type[WitnessBell], django_capture_on_commit_callbacks: Any
) -> None:
    """Neither heartbeat nor parallel calls: another thread would see nothing of the transaction."""
    with django_capture_on_commit_callbacks(execute=True):
        run = start_run("calls-post", "do it", "rung")
        assert bell.rung == []
    assert [pk for pk, _is_seen in bell.rung] == [run.pk]
    searches = [call("search", query=query) for query in "xy"]
    writes = [call("post", text="x"), call("annotate", number="A1", note="seen"), call("charge", cents=5)]
    order("A1")
    before = {*threading.enumerate()}  # what an earlier test of this process left may be among them
    result = run_turns({"tools": [*writes, *searches, call("refund", cents=5000), call("broken")]})
    new = {*threading.enumerate()} - before
    assert not [thread for thread in new if thread.name.startswith("agentruns-")]
    approve(result.pending[0].pk, None)
    assert sweep().completed == 2
    the_run(result)
    assert effects.count() == 7
    with transaction.atomic(), pytest.raises(NotDurableError):
        run_turns(session="inside another block")


def test_a_dump_of_the_journal_is_the_journal(effects: Effects, tmp_path: Path) -> None:
    """As XML: Django's JSON cuts times to milliseconds, and the journal's hashes are of six digits."""
    result = run_turns({"tools": [call("post", text="1\x00 \ud800 𝄞"), call("refund", cents=5000)]})
    run = the_run(result)
    before = [list(table._default_manager.order_by("pk").values()) for table in TABLES]
    dump = tmp_path / "journal.xml"
    with dump.open("w", encoding="utf-8") as stream:
        serializers.serialize(
            "xml", [one for table in TABLES for one in table._default_manager.all()], stream=stream
        )
    with triggers.lifted(connection):
        call_command("flush", interactive=False, verbosity=0)
    call_command("loaddata", dump, verbosity=0)
    assert [list(table._default_manager.order_by("pk").values()) for table in TABLES] == before
    assert problems(run.session_id) == []
    approve(result.pending[0].pk, None)
    assert (sweep().completed, effects.count()) == (1, 2)
    the_run(result)


def test_a_project_without_pytest_empties_its_databases(effects: Effects) -> None:
    """Django's own runner, with serialized_rollback, several databases, `flush`, and no plugin."""
    command = (sys.executable, "-m", "django", "test", "tests.hosts.cases")
    tested = run_program(*command, DJANGO_SETTINGS_MODULE="tests.hosts.base")
    assert "Ran 7 tests" in tested.stderr
    assert effects.count() == 2
