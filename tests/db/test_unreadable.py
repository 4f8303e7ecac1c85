"""A journal that cannot be read, or added to: its run is paused with the reason, and no other waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from django.db import DataError, OperationalError

from agentruns import cancel_run, resume_run, start_run
from agentruns.exceptions import JournalUnreadableError
from agentruns.journal.store import DatabaseStore
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from agentruns.utils import json as canonical
from tests.commands.running import run as command
from tests.db.helpers import payloads, sound
from tests.db.replies import Counting, nested, uses
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.rows import write_raw
from tests.shop.agents import call, shop_agent

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
    before = canonical.dumps(row.facts)
    write_raw("agentruns_message", "facts", text, "id", row.pk)
    assert sweep_often(4) == 4
    Run.objects.update(not_before=None)
    named = command("resume_runs")
    assert (named.code, f"Run {run.pk} in session s1: paused: attempts_exhausted: " in named.out) == (1, True)
    assert sweep_often(1) == 0
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
    assert (sound(run).status, effects.count()) == ("completed", 2)


def test_a_row_too_deep_to_be_sent_pauses_its_run_with_the_reason(effects: Effects) -> None:
    run = start_run(shop_agent("deep"), "do it", "s1", idempotency_key="k")
    content = json.dumps({"content": [{"type": "text", "text": nested(480)}]})
    write_raw("agentruns_message", "content", content, "seq", 2)
    assert sweep_often() == 5
    run = Run.objects.get()
    assert (run.status, "RecursionError" in run.blocked_reason) == ("paused", True)


def test_an_altered_column_or_definition_stops_no_other_run(effects: Effects) -> None:
    with isolated_registry():
        gone = start_run(shop_agent("changed", max_steps=3), "do it", "s0", idempotency_key="k0")
    shop_agent("changed", max_steps=4)
    write_raw("agentruns_definition", "body", "{", "hash", gone.definition_id)
    agent = shop_agent("altered", {"tools": [call("post", text="x")]})
    altered = start_run(agent, "do it", "s1", idempotency_key="k")
    start_run(agent, "do it", "s2", idempotency_key="k2")
    Run.objects.filter(pk=altered.pk).update(error="altered")
    write_raw("agentruns_run", "usage", "{", "error", "altered")
    swept = sweep()
    assert (swept.driven, swept.completed, swept.blocked, effects.count()) == (2, 2, 1, 2)
    assert "definition cannot be read" in Run.objects.get(pk=gone.pk).blocked_reason


@contextmanager
def refusing(error: Exception, kind: str) -> Iterator[list[Exception]]:
    """Let the database refuse rows of a kind for good; yield how often it did."""
    append, refused = DatabaseStore.append, []

    def refuse(store: DatabaseStore, batch: Any, **options: Any) -> None:
        if any(row.kind == kind for row in batch.rows):
            refused.append(error)
            raise error
        append(store, batch, **options)

    with patch.object(DatabaseStore, "append", refuse):
        yield refused


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
def test_what_the_database_refuses_for_good_is_not_tried_for_ever(error: Exception, effects: Effects) -> None:
    agent = shop_agent("refused")
    agent.model = model = Counting(uses(("post", {"text": "x"})))  # type: ignore[assignment]
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    with refusing(error, "assistant") as refused:
        assert sweep_often() == 1
    run = sound(run)
    assert (run.status, model.asked, len(refused), effects.count()) == ("paused", 1, 1, 0)
    assert run.blocked_reason.startswith("cannot be stored: ")
    assert str(error) in run.blocked_reason
    assert resume_run(run.pk).status == "completed"
    assert (sound(run).status, effects.count()) == ("completed", 1)


def test_a_result_that_is_refused_for_good_is_in_doubt(effects: Effects) -> None:
    agent = shop_agent("refused", {"tools": [call("post", text="x")]})
    run = start_run(agent, "do it", "s1", idempotency_key="k")
    with refusing(DataError("no"), "tool_result"):
        sweep_often(3)
    run.refresh_from_db()
    assert (run.status, effects.count(), len(payloads(run, "late_result"))) == ("orphaned", 1, 1)


def test_an_error_that_ends_each_attempt_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**members: Any) -> None:
        raise AttributeError("no such part")

    start_run(shop_agent("broken"), "do it", "s1", idempotency_key="k")
    monkeypatch.setattr("agentruns.engine.loop.ModelRequest", broken)
    assert sweep_often() == 5
    run = sound(Run.objects.get())
    assert (run.status, run.attempts) == ("paused", 5)
    assert run.blocked_reason == "attempts_exhausted: AttributeError: no such part"
    assert "AttributeError" in command("show_run", str(run.pk)).out
