"""Projects that are not ours: their transactions, users, routers, connections and test cases."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.core import serializers
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.db.backends.signals import connection_created
from django.test import TransactionTestCase

from agentruns import approve, cancel_run, pause_run, resume_run, run_agent, start_run
from agentruns.checks.database import check_database
from agentruns.exceptions import NotDurableError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Definition, Message, Run, Session, triggers
from agentruns.services.sweep import sweep
from tests.bells import WitnessBell
from tests.db.dying import elsewhere
from tests.db.helpers import run_turns, the_run
from tests.effects import Effects
from tests.programs import run_program
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

TABLES = (Definition, Session, Run, Message, Approval)


# Projects of their own


def live(host: str) -> subprocess.CompletedProcess[str]:
    """Let a process live the story of tests.hosts.story in a project."""
    return run_program(
        sys.executable, "-m", "tests.hosts", code=None, DJANGO_SETTINGS_MODULE=f"tests.hosts.{host}"
    )


@pytest.mark.parametrize("host", ["uuid_users", "routed", "pooled"])
def test_a_project_lives_the_whole_story(host: str, effects: Effects) -> None:
    if host == "pooled" and connection.vendor != "postgresql":
        pytest.skip("only PostgreSQL has a connection pool")
    lived = live(host)
    assert lived.returncode == 0, lived.stderr
    facts = json.loads(lived.stdout.splitlines()[-1])
    assert (facts["waiting"], facts["completed"], facts["status"]) == (1, 1, "completed")
    assert set(facts["pages"].values()) == {200}
    assert (facts["clicked"], facts["api"], facts["runs"]) == (302, [201, 200, "cancelled"], [facts["run"]])
    assert {facts["owner"], facts["decided_by"], *facts["actors"]} == {facts["boss"]}
    assert facts["note"] == "seen"
    assert (
        facts["effects"]
        == ["post", "refund", "search", "search"]
        == sorted(line["tool"] for line in effects.lines())
    )
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


def test_a_start_that_is_rolled_back_leaves_nothing_at_all(effects: Effects, bell: type[WitnessBell]) -> None:
    agent = shop_agent("joined", {"tools": [call("post", text="x")]})
    for _ in range(2):
        with pytest.raises(RuntimeError), transaction.atomic():
            order("A1")
            start_run(agent, "do it", "s1", idempotency_key="k")
            raise RuntimeError("the order was refused")
        assert (everything(), Order.objects.count(), bell.rung) == ([0] * len(TABLES), 0, [])
        assert sweep().found == 0
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    assert bell.rung == [(run.pk, True)]
    assert (sweep().completed, effects.count(), problems(run.session_id)) == (1, 1, [])


def test_a_start_beside_an_order_is_seen_when_the_order_is(bell: type[WitnessBell]) -> None:
    agent = shop_agent("beside", {"tools": [call("annotate", number="A1", note="seen")]})
    with transaction.atomic():
        order("A1")
        run = start_run(agent, "do it", "s1", idempotency_key="k")
        assert elsewhere(lambda: (everything(), Order.objects.count())) == ([0] * len(TABLES), 0)
        assert bell.rung == []
    assert bell.rung == [(run.pk, True)]
    assert (sweep().completed, Order.objects.get().note) == (1, "seen")


def test_a_savepoint_takes_back_its_start_and_nothing_else(effects: Effects, bell: type[WitnessBell]) -> None:
    agent = shop_agent("saved", {"tools": [call("post", text="x")]})
    with transaction.atomic():
        kept = start_run(agent, "the first task", "s1", idempotency_key="k1")
        with suppress(RuntimeError), transaction.atomic():
            start_run(agent, "the second task", "s2", idempotency_key="k2")
            raise RuntimeError("not this one")
        order("A1")
    assert (Run.objects.get(), Session.objects.get().key, Message.objects.count()) == (kept, "s1", 2)
    assert (Order.objects.count(), bell.rung) == (1, [(kept.pk, True)])
    again = start_run(agent, "the second task", "s2", idempotency_key="k2")
    assert sweep().completed == 2
    assert (effects.count(), problems(kept.session_id), problems(again.session_id)) == (2, [], [])


def test_clicks_in_a_transaction_that_rolls_back_did_not_happen(
    effects: Effects, bell: type[WitnessBell]
) -> None:
    """Cancel and pause take the lease of a waiting run; that is undone with them."""
    result = run_turns({"tools": [call("refund", cents=5000)]})
    run = the_run(result)
    before = list(Run.objects.values()), Message.objects.count()
    for click in (
        lambda: approve(result.pending[0].pk, None),
        lambda: cancel_run(run.pk),
        lambda: pause_run(run.pk),
    ):
        with pytest.raises(RuntimeError), transaction.atomic():
            click()
            raise RuntimeError("something else failed")
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


def test_without_autocommit_nothing_is_driven(effects: Effects, manual: None) -> None:
    agent = shop_agent("manual", {"tools": [call("post", text="x")]})
    for drive in (
        lambda: run_agent(agent, "do it", "s1", idempotency_key="k"),
        sweep,
        lambda: call_command("run_agent", "manual", "do it", session="s1"),
    ):
        with pytest.raises((NotDurableError, CommandError), match="Turn AUTOCOMMIT on"):
            drive()
        transaction.commit()
        assert (everything(), effects.count()) == ([0] * len(TABLES), 0)
    transaction.commit()


def test_without_autocommit_a_start_is_the_callers_to_commit(effects: Effects, manual: None) -> None:
    agent = shop_agent("manual", {"tools": [call("post", text="x")]})
    order("A1")  # SQLite's transaction begins with the first change, not with a savepoint
    start_run(agent, "do it", "s1", idempotency_key="k")
    transaction.rollback()
    assert (everything(), Order.objects.count()) == ([0] * len(TABLES), 0)
    order("A1")
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    transaction.commit()
    with pytest.raises(NotDurableError, match="Turn AUTOCOMMIT on"):
        resume_run(run.pk)
    transaction.rollback()
    assert elsewhere(lambda: Run.objects.get().status) == "queued"
    transaction.set_autocommit(True)
    assert (sweep().completed, effects.count(), problems(run.session_id)) == (1, 1, [])
    transaction.set_autocommit(False)


# Connections that live long, or not at all


@pytest.mark.parametrize("age", [None, 0, 60])
def test_a_run_connects_once_however_long_connections_live(
    age: int | None, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    turn = {"tools": [call("post", text="x"), call("charge", cents=5)]}
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", age)
    connection.close()

    def count(**facts: Any) -> None:
        opened.append(facts["connection"])

    connection_created.connect(count)
    try:
        run = the_run(run_turns(turn, turn, turn))
    finally:
        connection_created.disconnect(count)
        connection.close()
    assert (run.status, effects.count()) == ("completed", 6)
    assert len(opened) == 2, "the thread's, and the journal's own"


# Emptying the database


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


class WithTwoDatabases(TransactionTestCase):
    """Here the pytest plugin does what the mixin does elsewhere."""

    databases = {"default", "other"}

    def test_first(self) -> None:
        for alias in self.databases:
            with self.settings(AGENTRUNS_DATABASE=alias):
                self.assertEqual(Message.objects.using(alias).count(), 0)
                run = start_run("calls-post", "do it", "in-both", idempotency_key="k")
                self.assertEqual(problems(run.session_id, alias), [])
                self.assertEqual(triggers.differences(connections[alias]), [])

    def test_second(self) -> None:
        self.test_first()
