"""`prune_runs` takes what is old, `erase` what it is told, and both say what they cannot reach."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from agentruns import cancel_run, fork_run, run_agent, start_run
from agentruns.management.commands import prune_runs
from agentruns.models import Message, Run, Session, Tombstone
from agentruns.services.data import retention
from agentruns.services.data.retention import delete_rows
from tests.commands.running import run
from tests.db.helpers import user
from tests.shop.agents import shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = 4  # of a run that asks for no call


@pytest.fixture
def old() -> None:
    """Three sessions that ended long ago, and one that did now."""
    agent = shop_agent("done")
    for number in range(4):
        run_agent(agent, "do it", f"s{number}", idempotency_key=f"k{number}")
    Run.objects.exclude(session__key="s3").update(updated_at=Now() - timedelta(days=91))


def keys() -> list[str]:
    return list(Session.objects.order_by("key").values_list("key", flat=True))


@pytest.mark.usefixtures("old")
@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_what_is_old_is_pruned_in_portions_in_one_database() -> None:
    assert run("prune_runs", "--older-than=90", "--database=other").out == "Pruned: nothing.\n"
    assert run("prune_runs", "--older-than=90", "--dry-run").out == "To be pruned: sessions 3, runs 3.\n"
    assert len(keys()) == 4
    outcome = run("prune_runs", "--older-than=90", "--limit=1")
    assert (outcome.code, outcome.out) == (0, f"Pruned: sessions 1, runs 1, rows {ROWS}.\n")
    (line,) = run("prune_runs", "--older-than=90", "--json").lines
    assert line == {
        "sessions": 2, "runs": 2, "rows": 2 * ROWS, "approvals": 0, "notifications": 0, "answers": 0,
        "definitions": 0, "files": 0, "refused": [], "copies": [],
    }  # fmt: skip
    assert run("prune_runs", "--older-than=90").out == "Pruned: nothing.\n"
    assert keys() == ["s3"]
    assert run("verify_journal").code == 0


@pytest.mark.usefixtures("old")
def test_sigterm_ends_it_between_two_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    def delete_and_stop(rows: Any) -> int:
        if rows.model is Session:
            os.kill(os.getpid(), signal.SIGTERM)
        return delete_rows(rows)

    with monkeypatch.context() as patch:
        patch.setattr(retention, "delete_rows", delete_and_stop)
        outcome = run("prune_runs", "--older-than=90")
    assert (outcome.code, outcome.out) == (0, f"Pruned: sessions 1, runs 1, rows {ROWS}.\n")
    assert len(keys()) == 3
    assert run("prune_runs", "--older-than=90").out.startswith("Pruned: sessions 2,")


@pytest.mark.usefixtures("old")
def test_a_session_is_erased() -> None:
    fork = fork_run(Run.objects.get(session__key="s3").pk, 2, session="copy")
    Session.objects.filter(key="copy").update(key="copy\x1b[2J")
    started = start_run("done", "again", "s3", idempotency_key="again")
    outcome = run("prune_runs", "--session=s3")
    assert (outcome.code, outcome.out) == (1, "")
    assert f"unfinished run {started.pk} (queued). Cancel it first" in outcome.err
    for one in (fork, started):
        cancel_run(one.pk)
    outcome = run("prune_runs", "--session=s3", "--forget-key")
    assert (outcome.code, outcome.out.splitlines()[1]) == (
        0, "Session 'copy\\x1b[2J' was forked from it and holds copies of its rows.",
    )  # fmt: skip
    assert outcome.out.startswith("Pruned: sessions 1, runs 2, rows ")
    assert Tombstone.objects.get().key.startswith("sha256:")
    assert run("prune_runs", "--session=s3").out == "Pruned: nothing.\n"
    assert run("prune_runs", "--session=nobody's").code == 1


@pytest.mark.parametrize(
    "options",
    [
        "", "--older-than=90 --session=s1", "--older-than=0", "--older-than=36501",
        "--older-than=90 --limit=0", "--older-than=90 --forget-key", "--session=s1 --dry-run",
        "--session=s1 --limit=1",
    ],
)  # fmt: skip
def test_usage(options: str) -> None:
    with pytest.raises(SystemExit) as caught:
        prune_runs.Command().run_from_argv(["manage.py", "prune_runs", *options.split()])
    assert caught.value.code == 2


@pytest.fixture
def done() -> Run:
    ada = user("ada")
    result = run_agent(shop_agent("one"), "ADAS-TASK", "s1", idempotency_key="k1", actor=ada)
    return Run.objects.get(pk=result.run_id)


def test_a_row_is_erased_and_then_its_session(done: Run) -> None:
    row = ("--row", str(done.pk), "2")
    assert run("erase", *row).code == 2, "a reason is needed"
    assert run("erase", "--row", str(done.pk), "x", "--reason=r").code == 2
    assert run("erase", *row, "--scope=x", "--reason=r").code == 2
    would = run("erase", *row, "--reason=r", "--dry-run")
    assert (would.code, would.out.splitlines()[:2]) == (
        0, [f"Run {done.pk}, row 2 (user)", "To be erased: rows 1, sessions 1."],
    )  # fmt: skip
    assert not Message.objects.filter(content=None).exists()
    found = run("erase", *row, "--reason=by letter")
    assert found.code == 0 and "Erased: rows 1" in found.out and "- backups" in found.out
    told = done.messages.get(kind="payload_erased").payload
    assert (told["actor"]["name"], told["reason"], told["seq"]) == ("erase", "by letter", 2)
    assert run("erase", "--row", str(done.pk), "99", "--reason=r").code == 1
    assert run("verify_journal").code == 0
    assert "rows 5" in run("erase", "--session=s1", "--dry-run").out
    outcome = run("erase", "--session=s1")
    assert outcome.code == 0 and "Erased: rows 5" in outcome.out
    assert not Run.objects.exists()
    assert Tombstone.objects.get().key.startswith("sha256:"), "hashes are left"
    assert run("erase", "--session=s9").code == 1


def test_a_user_is_erased_also_one_who_is_gone(done: Run) -> None:
    bob = user("bob", is_active=False)
    run_agent(shop_agent("two"), "BOBS-TASK", "s2", idempotency_key="k2")
    waits = start_run(shop_agent("three"), "BOBS-MORE", "s3", idempotency_key="k3")
    Session.objects.filter(key__in=["s2", "s3"]).update(owner_id=bob.pk)
    outcome = run("erase", "--user=bob", "--reason=r", "--json")
    record = json.loads(outcome.out)
    assert (outcome.code, len(record["rows"]), len(record["refused"])) == (1, 4, 1)
    cancel_run(waits.pk)
    assert run("erase", "--user=bob", "--reason=r").code == 0
    texts = [str(row.content) for row in Message.objects.all()]
    assert not any("BOBS" in text for text in texts) and any("ADAS" in text for text in texts)
    assert run("erase", "--user=nobody", "--reason=r").code == 2
