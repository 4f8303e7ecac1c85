"""Heads of ended runs, kept elsewhere: what they show, and that they get there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connection
from django.db.models.functions import Now

from agentruns.checks.settings import check_values
from agentruns.journal.outbox import resting
from agentruns.journal.read import stored_rows
from agentruns.journal.verify import problems
from agentruns.models import Message, Notification, Run, Session, triggers
from agentruns.services.data.retention import erase_session
from agentruns.services.sweep import sweep
from tests.commands.running import run as command
from tests.db.exports import forget_everything
from tests.db.helpers import run_turns, the_run
from tests.rows import sealed, stored
from tests.shop.agents import call
from tests.waiting import Hanging

pytestmark = pytest.mark.django_db(transaction=True)

told: list[tuple[UUID, int, str]] = []
trouble: list[Exception] = []
hanging = Hanging()


def tell(session_id: UUID, seq: int, head: str) -> None:
    """An anchor of a project's own: in trouble, or slow, when a test wants it."""
    if trouble:
        raise trouble.pop()
    hanging.hang()
    told.append((session_id, seq, head))


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    told.clear(), trouble.clear(), resting.clear(), hanging.let_go()
    yield
    hanging.let_go(), resting.clear()


@pytest.fixture
def file(tmp_path: Path, settings: Any) -> Path:
    settings.AGENTRUNS_ANCHOR = "agentruns.contrib.anchor.append_to_file"
    settings.AGENTRUNS_ANCHOR_FILE = str(tmp_path / "anchors.jsonl")
    return tmp_path / "anchors.jsonl"


def ended(session: str) -> Run:
    return the_run(run_turns({"tools": [call("post", text="hi")]}, session=session))


def verified(file: object, *options: str) -> Any:
    """Compare the journal with the anchors of a file."""
    return command("verify_journal", *options, "--anchors", str(file))


def computed_anew(session_id: UUID) -> None:
    """Rewrite a session as a database's owner could: another text, and all hashes fitting."""
    session, head, made = Session.objects.get(pk=session_id), "", []
    for row, _ in stored_rows(Message.objects.filter(session_id=session_id)):
        message = Message.objects.get(session_id=session_id, seq=row.seq)
        payload = json.loads(json.dumps(message.payload).replace("post done", "post never done"))
        row = row._replace(payload=payload, prev_hash=head or row.prev_hash)
        row, parts = sealed(session_id, row)
        head = row.hash
        made.append(stored(session_id, row, parts))
    with triggers.lifted(connection):
        Message.objects.filter(session_id=session_id).delete()
        Message.objects.bulk_create(made)
        Session.objects.filter(pk=session.pk).update(head=head)


def test_a_chain_that_was_computed_anew_is_found(file: Path) -> None:
    run, other = ended("s1"), ended("s2")
    lines = map(json.loads, file.read_text().splitlines())
    heads = {str(one.pk): (one.next_seq - 1, one.head) for one in Session.objects.all()}
    assert {line["session"]: (line["seq"], line["head"]) for line in lines} == heads
    assert "Anchors compared: 2, of pruned sessions: 0. Nothing" in verified(file).out
    computed_anew(run.session_id)
    assert problems(run.session_id) == []
    assert command("verify_journal").code == 0, "nothing inside the database shows it"
    outcome = verified(file)
    anew = "Session s1: seq 7 has another hash than its anchor: the chain was written anew."
    assert (outcome.code, outcome.out.splitlines()[0]) == (1, anew)
    assert [verified(file, f"--session={key}").code for key in ("s2", "s1")] == [0, 1]
    erase_session("s1")
    assert "Anchors compared: 2, of pruned sessions: 1. Nothing" in verified(file).out
    with triggers.lifted(connection):
        Message.objects.filter(session_id=other.session_id, seq__gt=3).delete()
    assert "Session s2: was anchored at seq 7, a row that is missing.\n" in verified(file).out


def test_a_lost_tail_and_a_session_that_vanished_are_told_from_an_altered_chain(file: Path) -> None:
    run = ended("s1")
    with triggers.lifted(connection):
        Message.objects.filter(seq__gt=3).delete()
        Session.objects.update(next_seq=4, head=Message.objects.get(seq=3).hash)
    outcome = verified(file)
    lost = "Session s1: was anchored at seq 7, and ends at 3: its last rows are lost. If nobody deleted it,"
    assert (outcome.code, lost in outcome.out) == (1, True), outcome.out
    assert "another hash" not in outcome.out
    forget_everything()
    assert command("verify_journal").code == 0
    outcome = verified(file)
    assert (outcome.code, f"Session {run.session_id}: was anchored at seq" in outcome.out) == (1, True)
    assert "gone without a tombstone" in outcome.out


def test_it_is_told_again_until_it_went_through(settings: Any) -> None:
    settings.AGENTRUNS_ANCHOR = f"{__name__}.tell"
    trouble.append(OSError("the archive is away"))
    assert (ended("s1").status, told) == ("completed", [])
    resting.clear()
    Notification.objects.update(not_before=Now() - timedelta(seconds=1))
    session = Session.objects.get()
    for _ in range(2):
        sweep()
        assert told == [(session.pk, session.next_seq - 1, session.head)]


def test_one_that_hangs_does_not_hold_the_engine(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.AGENTRUNS_ANCHOR = f"{__name__}.tell"
    monkeypatch.setattr("agentruns.journal.anchor.TIMEOUT", 0.2)
    hanging.reset()
    monkeypatch.setattr("agentruns.journal.outbox.REST_SECONDS", 3600)
    assert [ended(f"s{number}").status for number in range(3)] == ["completed"] * 3
    assert not hanging.was_waited_for
    hanging.let_go()
    assert sorted(Notification.objects.values_list("attempts", flat=True)) == [0, 0, 1]


def test_an_anchor_that_cannot_be_told_or_read_is_found(settings: Any, tmp_path: Path) -> None:
    for path, found in {
        None: [],
        f"{__name__}.tell": [],
        f"{__name__}.nobody": ["agentruns.E019"],
        f"{__name__}.told": ["agentruns.E019"],
        "agentruns.contrib.anchor.append_to_file": ["agentruns.E019"],  # without a file
    }.items():
        settings.AGENTRUNS_ANCHOR = path
        assert [message.id for message in check_values(None)] == found, path
    file = tmp_path / "anchors.jsonl"
    assert verified(file).code == 2
    for line in ("x", "[]", '{"session": "s1", "seq": 1, "head": ""}', "[" * 9_000):
        file.write_text(f"\n{line}\n")
        outcome = verified(file)
        assert (outcome.code, "Line 2 is no anchor" in outcome.err) == (2, True)
