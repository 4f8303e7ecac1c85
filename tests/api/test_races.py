"""Clients that act at the same moment, with and without a transaction around each request."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar
from uuid import UUID

import pytest
from django.db import connection

from agentruns.agents.agent import Agent
from agentruns.journal.verify import problems
from agentruns.models import Run
from agentruns.services import runs as services
from agentruns.services.sweep import sweep
from tests.api.http import Api, make_user
from tests.db.racing import CLIENTS, together
from tests.effects import Effects

pytestmark = pytest.mark.django_db(transaction=True)

CROWD = 20


def test_one_approval_is_approved_once(pending: Any, effects: Effects, atomic_requests: bool) -> None:
    approval = pending()
    clients = [Api(make_user(f"user{number}", "decide_approval")) for number in range(CROWD)]
    path, body = f"/approvals/{approval.pk}/approve", {"digest": approval.digest}
    answers = together(lambda number: clients[number].post(path, body), CROWD)
    assert Counter(status for status, _ in answers) == {200: 1, 409: CROWD - 1}
    winner = next(body["decided_by_name"] for status, body in answers if status == 200)
    for status, body in answers:
        if status == 409:
            assert body["type"] == "urn:agentruns:approval-state"
            assert body["decided_by_name"] == winner
    sweep()
    assert effects.count() == 1
    assert problems(Run.objects.get().session_id) == []


def test_approve_and_deny_at_once(pending: Any, effects: Effects, atomic_requests: bool) -> None:
    approval = pending()
    clients = [Api(make_user(f"user{number}", "decide_approval")) for number in range(CLIENTS)]
    body = {"digest": approval.digest}
    verbs = {0: ("approve", body), 1: ("deny", {**body, "reason": "no"})}

    def act(number: int) -> tuple[int, Any]:
        verb, body = verbs[number % 2]
        return clients[number].post(f"/approvals/{approval.pk}/{verb}", body)

    answers = together(act)
    assert Counter(status for status, _ in answers) == {200: 1, 409: CLIENTS - 1}
    winner = next(body["status"] for status, body in answers if status == 200)
    sweep()
    assert effects.count() == (1 if winner == "approved" else 0)


@pytest.mark.parametrize("session", [{}, {"session": "s1"}], ids=["generated", "given"])
def test_one_key_is_one_run(shop: Agent, owner: Any, atomic_requests: bool, session: dict[str, str]) -> None:
    clients = [Api(owner) for _ in range(CLIENTS)]
    body = {"agent": "shop", "input": "refund it", "idempotency_key": "k1", **session}
    answers = together(lambda number: clients[number].post("/runs", body))
    assert Counter(status for status, _ in answers) == {201: 1, 200: CLIENTS - 1}
    assert len({body["id"] for _, body in answers}) == Run.objects.count() == 1
    assert problems(Run.objects.get().session_id) == []


def test_one_session_takes_one_of_many_tasks(shop: Agent, owner: Any, atomic_requests: bool) -> None:
    clients = [Api(owner) for _ in range(CLIENTS)]
    answers = together(
        lambda number: clients[number].post(
            "/runs", {"agent": "shop", "input": f"task {number}", "session": "s1"}
        )
    )
    assert Counter(status for status, _ in answers) == {201: 1, 409: CLIENTS - 1}
    run = str(Run.objects.get().pk)
    assert {body["run_id"] for status, body in answers if status == 409} == {run}


def test_one_run_is_cancelled_once(shop: Agent, owner: Any, atomic_requests: bool) -> None:
    clients = [Api(owner) for _ in range(CLIENTS)]
    run = clients[0].post("/runs", {"agent": "shop", "input": "refund it"})[1]
    answers = together(lambda number: clients[number].post(f"/runs/{run['id']}/cancel"))
    assert Counter(status for status, _ in answers) == {200: 1, 409: CLIENTS - 1}
    assert problems(Run.objects.get().session_id) == []


class Bell:
    rung: ClassVar[list[tuple[str, bool]]] = []

    def notify(self, run_id: UUID) -> None:
        self.rung.append((str(run_id), connection.in_atomic_block))


class BrokenBell:
    def notify(self, run_id: UUID) -> None:
        raise ConnectionError("the broker is away")


def test_a_broker_that_is_away_is_no_error(
    shop: Agent, api: Api, atomic_requests: bool, settings: Any
) -> None:
    settings.AGENTRUNS_DISPATCHER = f"{__name__}.BrokenBell"
    assert api.post("/runs", {"agent": "shop", "input": "refund it"})[0] == 201


def test_workers_are_rung_after_the_commit(
    shop: Agent, pending: Any, atomic_requests: bool, settings: Any, owner: Any, monkeypatch: Any
) -> None:
    approval = pending()
    inside: list[bool] = []
    get_or_start = services.get_or_start

    def watched(*given: Any, **options: Any) -> Any:
        inside.append(connection.in_atomic_block)
        return get_or_start(*given, **options)

    monkeypatch.setattr(services, "get_or_start", watched)
    settings.AGENTRUNS_DISPATCHER = f"{__name__}.Bell"
    monkeypatch.setattr(Bell, "rung", [])
    boss = Api(make_user("boss", "decide_approval", "view_run", "resume_run"))
    status, run = boss.post("/runs", {"agent": "shop", "input": "refund it"})
    assert status == 201
    assert inside == [atomic_requests]
    assert boss.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})[0] == 200
    assert boss.post(f"/runs/{run['id']}/resume")[0] == 200
    assert Bell.rung == [(run["id"], False), (str(approval.run_id), False), (run["id"], False)]


def test_a_refusal_in_a_transaction_leaves_nothing(
    shop: Agent, pending: Any, owner: Any, atomic_requests: bool
) -> None:
    approval = pending()
    api = Api(owner)
    before = approval.run.messages.count()
    assert api.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})[0] == 403
    assert api.post(f"/runs/{approval.run_id}/resume")[0] == 403
    assert api.post("/runs", {"agent": "shop", "input": "more", "session": "s1"})[0] == 409
    assert api.post("/runs", {"agent": "shop", "input": "more", "session": "s2"})[0] == 201
    assert approval.run.messages.count() == before
    assert Run.objects.count() == 2
