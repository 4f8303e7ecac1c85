"""The same key: done once, answered with what came of it; on SQLite and PostgreSQL, alone and in a race."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connections

from agentruns import Policy
from agentruns.agents.agent import Agent
from agentruns.models import Approval, IdempotencyRecord, Message, Run
from tests.admin.people import user
from tests.admin.world import World
from tests.api.http import Api, make_user
from tests.db.racing import CLIENTS, together

pytestmark = pytest.mark.django_db(transaction=True)

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
        status, problem = boss.post(*another, Idempotency_Key="k1")
        assert (status, problem["type"]) == (409, "urn:agentruns:idempotency-key")
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


@pytest.mark.parametrize("key", ["", "x" * 201, "a\x7fb"])
def test_keys_that_are_none(api: Api, shop: Agent, key: str) -> None:
    status, problem = api.post("/runs", {"agent": "shop", "input": "hi"}, Idempotency_Key=key)
    assert (status, problem["errors"][0]["loc"]) == (422, ["header", "Idempotency-Key"])


def test_header_and_field_have_to_agree(api: Api, world: World, boss: Api) -> None:
    for path, body in (
        POSTS["pause"](world),
        POSTS["approve"](world),
        ("/runs", {"agent": "a", "input": "b"}),
    ):
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
