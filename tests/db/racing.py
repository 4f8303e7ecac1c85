"""Clicks of other threads, threads that start together, and what must be true after them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connection, connections

from agentruns import approve, cancel_run, deny, pause_run, resume_run
from agentruns.engine.worker import advance
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.helpers import GO_ON, outcomes
from tests.effects import Effects
from tests.shop.models import Order
from tests.waiting import LIMIT, wait_for

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
CLIENTS = 8


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """Run the actions in threads that start together; return what each returned or raised."""
    barrier = threading.Barrier(len(actions))
    results: list[Any] = [None] * len(actions)

    def work(index: int, action: Callable[[], Any]) -> None:
        try:
            barrier.wait(LIMIT)
            results[index] = action()
        except Exception as error:
            results[index] = error
        finally:
            connections.close_all()

    # Daemons, so that one that hangs fails its test and does not keep the process from ending.
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), f"hung, after {results}"
    return results


def together(act: Callable[[int], tuple[int, Any]], clients: int = CLIENTS) -> list[tuple[int, Any]]:
    """Let every client act at once."""
    return at_once(*(partial(act, number) for number in range(clients)))


@contextmanager
def isolation(level: str) -> Iterator[None]:
    """Let every connection of the project, in whatever thread, work at an isolation level."""
    if connection.vendor == "sqlite":
        if level != LEVELS[0]:
            pytest.skip(f"SQLite has one isolation level: there is no {level}")
        yield
        return
    options = connection.settings_dict["OPTIONS"]  # one dictionary for the connections of all threads
    assert "options" not in options
    # Not Django's own `isolation_level`: that leaves statements outside of a transaction as they are.
    options["options"] = "-c default_transaction_isolation=" + level.lower().replace(" ", r"\ ")
    connection.close()
    try:
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            assert cursor.fetchone() == (level.lower(),)
        yield
    finally:
        del options["options"]
        connection.close()


def deadlocks() -> int:
    """Count the deadlocks that PostgreSQL had to break; a backend tells as it ends, so wait for that."""
    if connection.vendor == "sqlite":
        return 0  # one writer at a time: there is nothing to wait for each other over
    mine = "datname = current_database()"
    others = f"SELECT 1 FROM pg_stat_activity WHERE {mine} AND pid <> pg_backend_pid() AND backend_type = %s"

    def ask(sql: str, *values: str) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchone()

    wait_for(lambda: ask(others, "client backend") is None, "the backends to end")
    (count,) = ask(f"SELECT deadlocks FROM pg_stat_database WHERE {mine}")
    return int(count)


def somebody_waits() -> bool:
    """Tell whether a backend of PostgreSQL waits for a lock."""
    waiters = "wait_event_type = 'Lock' AND datname = current_database()"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE {waiters})")
        return bool(cursor.fetchone()[0])


class Click:
    """What a person does about a run, once, and what came of it."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.made = False
        self.was_live = False  # a worker held the run when it was asked
        self.refused: Exception | None = None

    def start(self, run_id: Any) -> threading.Thread:
        """Click from a thread of its own."""
        thread = threading.Thread(target=self._work, args=(run_id,), daemon=True)
        thread.start()
        return thread

    def make(self, run_id: Any) -> None:
        """Click, and wait until that is done."""
        thread = self.start(run_id)
        thread.join(LIMIT)
        assert not thread.is_alive(), f"{self.word} waits for the worker that waits for it"

    def _work(self, run_id: Any) -> None:
        try:
            self.was_live = Run.objects.get(pk=run_id).status == "running"
            self.made = CLICKS[self.word](run_id)
        except Exception as error:
            self.made, self.refused = True, error
        finally:
            connections.close_all()


def decide(run_id: Any, word: str, which: int = 0) -> bool:
    """Decide on one of the run's pending cards; tell whether there was one."""
    cards = list(Approval.objects.pending().filter(run_id=run_id).order_by("requested_at", "id"))
    if cards and word == "approve":
        approve(cards[which].pk, None, digest=cards[which].digest)
    elif cards:
        deny(cards[which].pk, None, "not today")
    return bool(cards)


CLICKS: dict[str, Callable[[Any], bool]] = {
    "cancel": lambda run_id: bool(cancel_run(run_id)),
    "pause": lambda run_id: bool(pause_run(run_id)),
    "approve": lambda run_id: decide(run_id, "approve"),
    "deny": lambda run_id: decide(run_id, "deny"),
    "approve the last": lambda run_id: decide(run_id, "approve", -1),
    "deny the last": lambda run_id: decide(run_id, "deny", -1),
}


def order(effects: Effects) -> Order:
    """Make the order tools write to, with nothing written yet and no effect outside."""
    effects.path.unlink(missing_ok=True)
    Order.objects.all().delete()
    return Order.objects.create(number="A1", customer="Ada", total_cents=100)


def drive(run: Run, store: DatabaseStore) -> Run:
    """Drive once, which is what one worker does without another sweep."""
    assert advance(run, "default", store=store)
    return Run.objects.get(pk=run.pk)


def end(run: Run) -> Run:
    """Let people and a sweep do what is left to do; no database needs to be touched."""
    for _ in range(6):
        run = Run.objects.get(pk=run.pk)
        if run.is_ended:
            return run
        if run.status == "paused":
            resume_run(run.pk)
        elif run.status == "awaiting-approval":
            decide(run.pk, "approve")
        sweep()
    raise AssertionError(f"The run never ends: {Run.objects.values().get(pk=run.pk)}")


def nothing_lost(run: Run, effects: Effects, doubtful: tuple[str, ...] = ()) -> None:
    """What happened outside is what the journal says happened: once each, with its result, none in doubt."""
    assert problems(run.session_id) == []
    check_messages([*result_of(run.pk).messages, GO_ON])
    rows = Message.objects.filter(run=run)
    keys = {row.payload["key"]: row.call_id for row in rows.filter(kind="tool_started")}
    results = {row.call_id: row for row in rows.filter(kind="tool_result")}
    done = [line["key"] for line in effects.lines()]
    assert len(done) == len(set(done)), "an effect happened twice"
    finished = {call_id for call_id, row in results.items() if row.payload["outcome"] == "ok"}
    inside = {row.call_id for row in results.values() if row.tool_name == "annotate"} & finished
    assert Order.objects.filter(note="seen").exists() == bool(inside)
    in_doubt = {row.call_id for row in results.values() if row.tool_name in doubtful}
    assert {keys[key] for key in done} - in_doubt == finished - inside - in_doubt, "a result was lost"
    if not doubtful:
        assert not rows.filter(kind="orphan_found").exists()
        assert "unknown" not in outcomes(run)
