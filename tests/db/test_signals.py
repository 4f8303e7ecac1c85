"""A host that writes in receivers of all models' signals, as an audit log of all models does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, connection, connections
from django.db.models.deletion import ProtectedError
from django.db.models.functions import Now
from django.db.models.signals import m2m_changed, post_delete, post_save, pre_delete, pre_save

import agentruns
from agentruns import answer, approve, ask_human, cancel_run, deny, fork_run, run_agent, send_message, tool
from agentruns.engine import leases
from agentruns.journal.verify import problems
from agentruns.models import Approval, Run, Session
from agentruns.services.api_tokens import create_token, revoke, session_token
from agentruns.services.approvals.decisions import expire_due, extend
from agentruns.services.data.erasure import erase_user, erase_whole_session
from agentruns.services.data.retention import erase_session, prune_ended
from agentruns.services.reviews import review_run
from agentruns.services.sweep import sweep
from agentruns.services.switches import switch
from agentruns.services.transfer import export_run, import_run
from agentruns.utils.db import delete_rows
from tests.admin.pages import url
from tests.api.http import Api
from tests.db.exports import forget_everything
from tests.db.helpers import run_out, sound, user
from tests.effects import Effects
from tests.shop.agents import call, refund, shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

SIGNALS = (pre_save, post_save, pre_delete, post_delete, m2m_changed)


@pytest.fixture
def fired() -> Iterator[list[str]]:
    """Write a row for each signal; collect the names of our models, and of all signals in a transaction."""
    collected: list[str] = []

    def audit(sender: Any, **about: Any) -> None:
        if sender is Order:
            return
        name, ours = sender._meta.label, sender._meta.app_label == "agentruns"
        inside = any(each.in_atomic_block for each in connections.all(initialized_only=True))
        if ours or (inside and not about.get("raw") and sender._meta.app_label == "admin"):
            collected.append(f"{name} {'in a transaction' if inside else ''}")
        if connection.vendor == "sqlite":  # a wait for the journal's own lock would last for minutes
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA busy_timeout = 100")
        try:
            Order.objects.create(number=uuid4().hex[:20], customer="audit", total_cents=1, note=str(about))
        except OperationalError as error:
            collected.append(f"{name} {error}")

    for signal in SIGNALS:
        signal.connect(audit)
    yield collected
    for signal in SIGNALS:
        signal.disconnect(audit)
    connection.close()


@tool(transactional=True, requires_approval=True, sensitive=["iban"])
def pay(iban: str, cents: int) -> str:
    """Pay, in the journal's own transaction."""
    Order.objects.create(number=iban, customer="paid", total_cents=cents)
    return "paid"


def test_a_whole_life_sends_no_signal_of_ours(
    fired: list[str], effects: Effects, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AGENTRUNS_APPROVAL_EXPIRES = timedelta(days=1)
    ada, eve = (
        user("ada"),
        user("eve", "decide_approval", "review_run", "view_run", "switch", "start_run", is_staff=True),
    )
    turns = [{"tools": [call("pay", iban="DE02", cents=5), call("refund", cents=5000)]}, {"text": "paid"}]
    agent = shop_agent("audited", *turns, tools=[pay, refund, ask_human])
    result = run_agent(agent, "pay", "s1", actor=ada, idempotency_key="k")
    assert result.status == "awaiting-approval"
    for approval, verb in zip(result.pending, (approve, deny), strict=True):
        extend(approval.pk, eve, timedelta(days=1))
        verb(approval.pk, eve, reason="seen")
    sweep()
    run = sound(Run.objects.get(pk=result.run_id))
    assert (run.status, Order.objects.filter(customer="paid").count()) == ("completed", 1)
    review_run(run.pk, eve, rating=1, note="right")
    fork = fork_run(run.pk, 2, actor=ada, idempotency_key="fork")
    send_message(Session.objects.get(pk=fork.session_id), "and?", actor=ada, idempotency_key="said")
    cancel_run(fork.pk, ada)
    asking = shop_agent("asking", {"tools": [call("ask_human", question="Which?")]}, tools=[ask_human])
    answer(run_agent(asking, "go", "s2", idempotency_key="k2").pending[0].pk, eve, "this one")
    sweep()
    late = run_agent(shop_agent("late", {"tools": [call("refund", cents=5000)]}), "go", "s3")
    extend(late.pending[0].pk, eve, timedelta(days=1))
    run_out(Approval.objects.get(pk=late.pending[0].pk))
    expire_due()
    sweep()
    carded = run_agent(shop_agent("carded", {"tools": [call("refund", cents=5000)]}), "go", "s5").pending[0]
    pressed = Api(eve).client.post(url(carded, "deny"), {"digest": carded.digest, "reason": "no"})
    assert (pressed.status_code, Approval.objects.get(pk=carded.pk).status) == (302, "denied")
    sweep()
    for state in ("off", "off", "on"):
        switch("tool", "pay", state, eve, reason="stop")
    token, text = create_token(eve, ["runs:write", "runs:read"])
    session_token("visit", timedelta(seconds=1))
    status, body = Api().post(
        "/runs",
        {"agent": "audited", "session": "s4", "input": "by token", "idempotency_key": "once"},
        Authorization=f"Bearer {text}",
    )
    assert status == 201, body
    sweep()
    card = Approval.objects.get(status="pending", run=body["id"], tool_name="refund")
    status, said = Api(eve).post(
        f"/approvals/{card.pk}/deny", {"idempotency_key": "n", "reason": "no", "digest": card.digest}
    )
    assert status == 200, said
    revoke(token.pk, eve)
    cancel_run(body["id"], eve)
    lines = [*export_run(run.pk, true_values=True)]
    erase_user(ada, eve, "asked")
    erase_whole_session("s2")
    erase_session("s3")
    assert fired == []
    forget_everything()
    fired.clear()
    assert problems(import_run(lines, scope="elsewhere").session_id) == []
    Run.objects.update(updated_at=Now() - timedelta(days=40))
    assert prune_ended(30).sessions == 1
    monkeypatch.setattr(leases, "_at_start", {})
    leases.drain("default")
    assert fired == []
    assert not Order.objects.filter(customer="audit", note__contains="DE02").exists()


def test_a_row_of_the_project_that_refers_to_a_run_goes_with_it_or_keeps_it(fired: list[str]) -> None:
    """Django's own deletion of the project's rows, with the project's signals, happens before ours."""
    run = Run.objects.get(pk=run_agent(shop_agent("plain"), "go", "s1").run_id)
    assert delete_rows(Run.objects.filter(pk=uuid4())) == 0
    with pytest.raises(ProtectedError):
        delete_rows(Session.objects.filter(pk=run.session_id))
    assert Run.objects.filter(pk=run.pk).exists() and fired == []


SENDING = re.compile(r"\.a?(save|create|get_or_create|update_or_create|delete)\(")
FREE = ("storage.delete(", "storage.save(", "messages.create(", "api.create(", "collector.delete(")


def test_no_code_of_ours_writes_in_a_form_that_sends_signals() -> None:
    """A receiver works inside the write's transaction: `bulk_create`, `update`, `delete_rows` have none."""
    root = Path(agentruns.__file__).parent
    files = [each for each in root.rglob("*.py") if not {"testing", "migrations"} & {*each.parts}]
    lines = [(each.name, line) for each in files for line in each.read_text("utf-8").splitlines()]
    sending = [line for line in lines if SENDING.search(line[1])]
    assert [line for line in sending if not any(free in line[1] for free in FREE)] == []
