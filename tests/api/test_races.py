"""Clients that act at the same moment, or again with the same key; in and without a transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connections

from agentruns import Policy
from agentruns.agents.agent import Agent
from agentruns.journal.verify import problems
from agentruns.models import Approval, IdempotencyRecord, Message, Run
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.admin.world import World
from tests.api.http import Api, make_user, refused
from tests.bells import WitnessBell
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


def test_one_session_takes_one_of_many_tasks_and_the_run_is_cancelled_once(
    shop: Agent, owner: Any, atomic_requests: bool
) -> None:
    clients = [Api(owner) for _ in range(CLIENTS)]
    body = {"agent": "shop", "session": "s1"}
    answers = together(lambda number: clients[number].post("/runs", {**body, "input": f"task {number}"}))
    assert Counter(status for status, _ in answers) == {201: 1, 409: CLIENTS - 1}
    run = str(Run.objects.get().pk)
    assert {body["run_id"] for status, body in answers if status == 409} == {run}
    answers = together(lambda number: clients[number].post(f"/runs/{run}/cancel"))
    assert Counter(status for status, _ in answers) == {200: 1, 409: CLIENTS - 1}
    assert problems(Run.objects.get().session_id) == []


def test_workers_are_rung_after_the_commit(shop: Agent, pending: Any, bell: type[WitnessBell]) -> None:
    """Without a transaction around the request; tests/hosts has each request in one."""
    approval, boss = pending(), Api(make_user("boss", "decide_approval", "view_run", "resume_run"))
    bell.rung.clear()
    run = boss.post("/runs", {"agent": "shop", "input": "refund it"})[1]
    assert boss.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})[0] == 200
    assert boss.post(f"/runs/{run['id']}/resume")[0] == 200
    rung = [(str(run_id), was_seen) for run_id, was_seen in bell.rung]
    assert rung == [(run["id"], True), (str(approval.run_id), True), (run["id"], True)]


class BrokenBell:
    def notify(self, run_id: UUID) -> None:
        raise ConnectionError("the broker is away")


def test_a_broker_that_is_away_is_no_error(
    shop: Agent, api: Api, atomic_requests: bool, settings: Any
) -> None:
    settings.AGENTRUNS_DISPATCHER = f"{__name__}.BrokenBell"
    assert api.post("/runs", {"agent": "shop", "input": "refund it"})[0] == 201


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


Post = tuple[str, dict[str, Any]]


def control(run: Run, verb: str, **body: Any) -> Post:
    return f"/runs/{run.pk}/{verb}", body


def decision(approval: Approval, verb: str, **body: Any) -> Post:
    return f"/approvals/{approval.pk}/{verb}", {"digest": approval.digest, **body}


def verdict(run: Run) -> Post:
    call_id = run.messages.get(kind="orphan_found").call_id
    return control(run, f"orphans/{call_id}/resolve", verdict="occurred", result=[1.5, {"x": None}])


POSTS: dict[str, Callable[[World], Post]] = {
    "cancel": lambda world: control(world.queued(), "cancel", reason="\x00 no"),
    "pause": lambda world: control(world.queued(), "pause"),
    "resume": lambda world: control(world.paused(), "resume"),
    "resolve": lambda world: verdict(world.orphaned()),
    "approve": lambda world: decision(world.waiting(), "approve", arguments={"cents": 4000}),
    "deny": lambda world: decision(world.waiting(), "deny", reason="no"),
    "answer": lambda world: decision(world.waiting(), "answer", text="not this time"),
}


@pytest.fixture
def boss(db: None) -> Api:
    return Api(user("superuser"))


@pytest.mark.parametrize("name", POSTS)
def test_the_same_key_tells_what_came_of_it(
    name: str, world: World, boss: Api, atomic_requests: bool
) -> None:
    path, body = POSTS[name](world)
    first = boss.post(path, body, Idempotency_Key="k1")
    assert (first[0], boss.response.headers.get("Idempotency-Replayed")) == (200, None)
    content, rows = boss.response.content, Message.objects.count()
    assert boss.post(path, {**body, "idempotency_key": "k1"}) == first
    assert (boss.response["Idempotency-Replayed"], boss.response.content) == ("true", content)
    Run.objects.update(error="changed meanwhile")  # nothing of it was kept
    again = boss.post(path, {**body, "idempotency_key": "k1"})
    assert again[1].get("error") == (None if path.startswith("/approvals") else "changed meanwhile")
    assert (Message.objects.count(), IdempotencyRecord.objects.count()) == (rows, 1)


@pytest.mark.parametrize("name", ["cancel", "approve"])
def test_many_at_once_act_once(name: str, world: World, boss: Api, atomic_requests: bool) -> None:
    path, body = POSTS[name](world)
    clients = [Api(user("superuser")) for _ in range(CLIENTS)]
    answers = together(lambda number: clients[number].post(path, body, Idempotency_Key="k1"))
    assert all(answer == answers[0] and answer[0] == 200 for answer in answers)
    replayed = [client.response.headers.get("Idempotency-Replayed") for client in clients]
    assert (replayed.count("true"), replayed.count(None)) == (CLIENTS - 1, 1)
    kind = {"cancel": "run_cancel_requested", "approve": "approval_decided"}[name]
    assert (Message.objects.filter(kind=kind).count(), IdempotencyRecord.objects.count()) == (1, 1)


@pytest.mark.parametrize("name", POSTS)
@pytest.mark.parametrize("lost", ["the permission", "the sight of it", "their account"])
def test_a_repeated_request_is_judged_anew(name: str, lost: str, world: World, settings: Any) -> None:
    path, body = POSTS[name](world)
    needs = ("decide_approval", "view_run", "cancel_run", "pause_run", "resume_run", "resolve_orphan")
    ann = make_user("ann", *needs)
    assert Api(ann).post(path, body, Idempotency_Key="k1")[0] == 200
    if lost == "the permission":
        ann.user_permissions.set(Permission.objects.filter(codename__in=["view_run", "view_approval"]))
    elif lost == "the sight of it":
        settings.AGENTRUNS_POLICY = f"{__name__}.Blind"
    else:
        User.objects.filter(pk=ann.pk).update(is_active=False)
    status, problem = Api(User.objects.get(pk=ann.pk)).post(path, body, Idempotency_Key="k1")
    assert status == {"the permission": 403, "the sight of it": 404, "their account": 401}[lost]
    assert not {"arguments", "input"} & set(problem or {})


class Blind(Policy):
    def visible(self, user: Any, runs: Any) -> Any:
        """Let nobody see anything."""
        return runs.none()


def test_a_key_belongs_to_one_request_of_one_owner(world: World, boss: Api) -> None:
    path, body = POSTS["deny"](world)
    other = Api(make_user("other", "decide_approval"))
    assert boss.post(path, body, Idempotency_Key="k1")[0] == 200
    elsewhere = control(world.queued(), "cancel")
    for another in ((path, {**body, "reason": "because"}), elsewhere):
        problem = refused(boss.post(*another, Idempotency_Key="k1"), 409, "idempotency-key")
        assert problem["answered_at"].endswith("Z")
    assert other.post(path, body, Idempotency_Key="k1")[1]["type"] == "urn:agentruns:approval-state"
    assert boss.post(*elsewhere, Idempotency_Key="k2")[0] == 200


def test_an_error_is_not_kept(world: World, boss: Api, atomic_requests: bool) -> None:
    path, body = POSTS["answer"](world)
    stale = {**body, "digest": "0" * 64}
    assert boss.post(path, stale, Idempotency_Key="k1")[0] == 409
    assert Api(make_user("viewer", "view_run")).post(path, body, Idempotency_Key="k1")[0] == 403
    assert not IdempotencyRecord.objects.exists()
    assert boss.post(path, body, Idempotency_Key="k1")[0] == 200


def test_the_key_of_a_run_may_be_in_the_header(api: Api, shop: Agent) -> None:
    body = {"agent": "shop", "input": "refund it"}
    status, run = api.post("/runs", body, Idempotency_Key="k1")
    assert (status, run["idempotency_key"]) == (201, "k1")
    assert api.post("/runs", {**body, "idempotency_key": "k1"}, Idempotency_Key="k1") == (200, run)
    fork = {"at": 2, "idempotency_key": "k2"}
    assert api.post(f"/runs/{run['id']}/fork", fork)[1]["idempotency_key"] == "k2"
    assert api.post(f"/runs/{run['id']}/fork", {"at": 2}, Idempotency_Key="k2")[0] == 200
    assert (Run.objects.count(), IdempotencyRecord.objects.count()) == (2, 0)


def test_a_key_is_a_short_text_and_header_and_field_have_to_agree(world: World, boss: Api) -> None:
    start: Post = ("/runs", {"agent": "a", "input": "b"})
    for key in ("", "x" * 201, "a\x7fb"):
        status, problem = boss.post(*start, Idempotency_Key=key)
        assert (status, problem["errors"][0]["loc"]) == (422, ["header", "Idempotency-Key"])
    for path, body in (POSTS["pause"](world), POSTS["approve"](world), start):
        status, problem = boss.post(path, {**body, "idempotency_key": "k1"}, Idempotency_Key="k2")
        assert (status, problem["type"]) == (422, "urn:agentruns:validation")
        assert problem["errors"][0]["loc"] == ["header", "Idempotency-Key"]
    assert not IdempotencyRecord.objects.exists()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_records_are_with_the_runs(pending: Any, decider: Any, settings: Any) -> None:
    settings.AGENTRUNS_DATABASE = "other"
    path, body = decision(pending(), "approve")
    staff = Api(decider)
    assert staff.post(path, body, Idempotency_Key="k1") == staff.post(path, body, Idempotency_Key="k1")
    assert IdempotencyRecord.objects.using("other").get().owner_id == decider.pk
    assert not IdempotencyRecord.objects.using("default").exists()
    assert not connections["other"].in_atomic_block
