"""A journal that cannot be read, or added to: its run is paused with the reason, and no other waits."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DataError, OperationalError, connection

from agentruns import cancel_run, resume_run, run_agent, start_run
from agentruns.exceptions import JournalUnreadableError
from agentruns.journal.store import DatabaseStore
from agentruns.journal.verify import problems
from agentruns.models import Definition, Message, Run
from agentruns.services.sweep import sweep
from tests.commands.running import run as command
from tests.db.helpers import payloads
from tests.db.replies import Counting, nested, uses
from tests.effects import Effects
from tests.rows import write_raw
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def sweep_often(times: int = 7) -> int:
    """Sweep as a worker would over some hours, and count the errors."""
    errors = 0
    for _ in range(times):
        Run.objects.update(not_before=None)
        errors += sweep().errors
    return errors


DEEP = '{"content":' + "[" * 5_000 + "]" * 5_000 + "}"


@pytest.mark.parametrize("text", ["{", "[]", "", DEEP, '{"v":1}'])
def test_a_journal_that_cannot_be_read_pauses_its_run(text: str, effects: Effects) -> None:
    agent = shop_agent("damaged", {"tools": [call("post", text="x")]})
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    other = start_run(agent, "do it", "s2", idempotency_key="k2")
    row = Message.objects.get(run=run, kind="run_started")
    with connection.cursor() as cursor:
        cursor.execute("SELECT facts FROM agentruns_message WHERE id = %s", [row.pk])
        before = cursor.fetchone()[0]
    write_raw("agentruns_message", "facts", text, "id", row.pk)
    assert sweep_often(4) == 4
    Run.objects.update(not_before=None)
    named = command("resume_runs")
    assert (named.code, f"Run {run.pk} in session s1: paused: attempts_exhausted: " in named.out) == (1, True)
    assert sweep_often() == 0
    run, other = Run.objects.get(pk=run.pk), Run.objects.get(pk=other.pk)
    assert (run.status, run.attempts, other.status, effects.count()) == ("paused", 5, "completed", 1)
    assert run.blocked_reason.startswith("attempts_exhausted: The journal of session")
    assert "verify_journal" in run.blocked_reason
    shown = command("show_run", str(run.pk))
    assert "attempts_exhausted: The journal of session" in shown.out
    assert (shown.code, "verify_journal names the row" in shown.err) == (1, True)
    for service in (cancel_run, resume_run):
        with pytest.raises(JournalUnreadableError, match="cannot be read"):
            service(run.pk)
    write_raw("agentruns_message", "facts", before, "id", row.pk)
    assert resume_run(run.pk).status == "completed"
    assert (problems(run.session_id), effects.count()) == ([], 2)


def test_a_row_too_deep_to_be_sent_pauses_its_run_with_the_reason(effects: Effects) -> None:
    run = start_run(shop_agent("deep"), "do it", "s1", idempotency_key="k")
    deep = nested(480)
    write_raw(
        "agentruns_message",
        "content",
        str({"content": [{"type": "text", "text": deep}]}).replace("'", '"'),
        "seq",
        2,
    )
    assert sweep_often() == 5
    run = Run.objects.get()
    assert (run.status, "RecursionError" in run.blocked_reason) == ("paused", True)


def test_an_altered_column_or_definition_stops_no_other_run(effects: Effects) -> None:
    agent = shop_agent("altered", {"tools": [call("post", text="x")]})
    altered = start_run(agent, "do it", "s1", idempotency_key="k")
    start_run(agent, "do it", "s2", idempotency_key="k2")
    Run.objects.filter(pk=altered.pk).update(error="altered")
    write_raw("agentruns_run", "usage", "{", "error", "altered")
    swept = sweep()
    assert (swept.driven, swept.completed, effects.count()) == (2, 2, 2)


class Refusing:
    """A database that refuses some rows for good."""

    def __init__(self, error: Exception, kind: str) -> None:
        self.error, self.kind, self.refused = error, kind, 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        append = DatabaseStore.append

        def refusing(store: DatabaseStore, batch: Any, **options: Any) -> None:
            if any(row.kind == self.kind for row in batch.rows):
                self.refused += 1
                raise self.error
            append(store, batch, **options)

        monkeypatch.setattr(DatabaseStore, "append", refusing)


def of_state(code: str) -> OperationalError:
    """An error that PostgreSQL gives this SQLSTATE."""
    cause = Exception("refused")
    cause.sqlstate = code  # type: ignore[attr-defined]
    error = OperationalError("refused")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        DataError("value too long for type character varying(200)"),
        OperationalError("sending query and params failed: number of parameters must be between 0 and 65535"),
        OperationalError("too many SQL variables"),
        of_state("54000"),
        of_state("22P05"),
    ],
)
def test_what_the_database_refuses_for_good_is_not_tried_for_ever(
    error: Exception, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Counting(uses(("post", {"text": "x"})))
    agent = shop_agent("refused", tools=TOOLS)
    agent.model = model  # type: ignore[assignment]
    start_run(agent, "do it", "s1", idempotency_key="k")
    database = Refusing(error, "assistant")
    with monkeypatch.context() as patch:
        database.install(patch)
        assert sweep_often() == 1
    run = Run.objects.get()
    assert (run.status, model.asked, database.refused, effects.count()) == ("paused", 1, 1, 0)
    assert run.blocked_reason.startswith("cannot be stored: ")
    assert str(error) in run.blocked_reason
    assert resume_run(run.pk).status == "completed"
    assert (problems(run.session_id), effects.count()) == ([], 1)


def test_a_result_that_is_refused_for_good_is_in_doubt(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = shop_agent("refused", {"tools": [call("post", text="x")]})
    start_run(agent, "do it", "s1", idempotency_key="k")
    Refusing(DataError("no"), "tool_result").install(monkeypatch)
    sweep_often(3)
    run = Run.objects.get()
    assert (run.status, effects.count(), len(payloads(run, "late_result"))) == ("orphaned", 1, 1)


def test_an_error_that_ends_each_attempt_is_the_reason(
    effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(shop_agent("broken"), "do it", "s1", idempotency_key="k")

    def broken(*args: Any) -> None:
        raise AttributeError("no such part")

    monkeypatch.setattr("agentruns.engine.loop._request", broken)
    assert sweep_often() == 5
    run = Run.objects.get()
    assert (run.status, run.attempts) == ("paused", 5)
    assert run.blocked_reason == "attempts_exhausted: AttributeError: no such part"
    assert "AttributeError" in command("show_run", str(run.pk)).out
    assert problems(run.session_id) == []


def test_a_definition_that_cannot_be_read_stops_no_other_run(effects: Effects) -> None:
    from tests.registry import isolated_registry

    with isolated_registry():
        gone = start_run(shop_agent("changed", max_steps=3), "do it", "s1", idempotency_key="k")
    shop_agent("changed", max_steps=4)
    Definition.objects.filter(pk=gone.definition_id).update(body="")
    write_raw("agentruns_definition", "body", "{", "hash", gone.definition_id)
    run_agent(shop_agent("fine"), "do it", "s2", idempotency_key="k2")
    assert sweep().blocked == 1
    assert "definition cannot be read" in Run.objects.get(pk=gone.pk).blocked_reason
