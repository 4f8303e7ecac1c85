"""The journal lives in the database that AGENTRUNS_DATABASE names, and every write goes there."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import transaction

from agentruns import approve, cancel_run, list_runs, resolve_orphan, resume_run, run_agent, start_run, tool
from agentruns.journal.verify import problems
from agentruns.models import Approval, Control, Definition, Message, Run, Session
from agentruns.services.sweep import sweep
from tests.db.doubts import wire
from tests.db.helpers import user
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MODELS = (Approval, Control, Definition, Message, Run, Session)


@pytest.fixture(autouse=True)
def _elsewhere(transactional_db: None, settings: Any) -> None:
    Control.objects.using("default").all().delete()  # left by the start of this process
    settings.AGENTRUNS_DATABASE = "other"


def test_everything_goes_to_the_named_database() -> None:
    staff = user("staff", "decide_approval", "resume_run", "cancel_run", "resolve_orphan")
    turn = {"tools": [call("refund", cents=5000), call("post", text="x"), call("search", query="y")]}
    with transaction.atomic(using="default"):  # of another database: no obstacle
        result = run_agent(shop_agent("there", turn), "do it", "s1", actor=staff, idempotency_key="k")
    approve(result.pending[0].pk, staff)
    assert sweep().completed == 1
    run = start_run(shop_agent("there-too"), "do it", "s2", actor=staff, idempotency_key="k2")
    cancel_run(run.pk, staff, reason="no")
    assert list_runs(owner=staff).count() == 2
    for model in MODELS:
        assert not model.objects.using("default").exists(), model
        assert model.objects.using("other").exists(), model
    Order.objects.using("other").create(number="A1", customer="Ada", total_cents=1)
    note = tool(name="note", transactional=True)(lambda: Order.objects.using("other").update(note="seen"))
    agent = shop_agent("doubtful", {"tools": [call("note"), call("wire", text="x")]}, tools=[note, wire])
    result = run_agent(agent, "do it", "s3", idempotency_key="k3")
    resolve_orphan(result.run_id, result.orphans[0], "occurred", None, result="it went out")
    assert resume_run(result.run_id).status == "completed"
    assert Order.objects.using("other").get().note == "seen"
    assert not Run.objects.using("default").exists()
    for session in Session.objects.using("other"):
        assert problems(session.pk, "other") == []
