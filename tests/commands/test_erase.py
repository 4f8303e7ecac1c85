"""`manage.py erase` takes a row, a user's rows or a session, and says what it cannot reach."""

from __future__ import annotations

import json

import pytest

from agentruns import cancel_run, run_agent, start_run
from agentruns.models import Message, Run, Session, Tombstone
from tests.commands.running import run
from tests.db.helpers import user
from tests.shop.agents import shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def done() -> Run:
    ada = user("ada")
    result = run_agent(shop_agent("one"), "ADAS-TASK", "s1", idempotency_key="k1", actor=ada)
    return Run.objects.get(pk=result.run_id)


def test_a_row(done: Run) -> None:
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


def test_a_user_also_one_who_is_gone(done: Run) -> None:
    ada = user("bob")
    ada.is_active = False
    ada.save()
    run_agent(shop_agent("two"), "BOBS-TASK", "s2", idempotency_key="k2")
    Session.objects.filter(key="s2").update(owner_id=ada.pk)
    waits = start_run(shop_agent("three"), "BOBS-MORE", "s3", idempotency_key="k3")
    Session.objects.filter(key="s3").update(owner_id=ada.pk)
    outcome = run("erase", "--user=bob", "--reason=r", "--json")
    record = json.loads(outcome.out)
    assert (outcome.code, len(record["rows"]), len(record["refused"])) == (1, 3, 1)
    cancel_run(waits.pk)
    assert run("erase", "--user=bob", "--reason=r").code == 0
    texts = [str(row.content) for row in Message.objects.all()]
    assert not any("BOBS" in text for text in texts) and any("ADAS" in text for text in texts)
    assert run("erase", "--user=nobody", "--reason=r").code == 2


def test_a_session_leaves_hashes(done: Run) -> None:
    assert "rows 4" in run("erase", "--session=s1", "--dry-run").out
    outcome = run("erase", "--session=s1")
    assert outcome.code == 0 and "Erased: rows 4" in outcome.out
    assert not Run.objects.exists()
    assert Tombstone.objects.get().key.startswith("sha256:")
    assert run("erase", "--session=s9").code == 1
