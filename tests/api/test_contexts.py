"""A context is what the policy gives whoever starts a run now, at every door: nobody borrows or keeps one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.test import Client

from agentruns import Agent, Policy, run_agent, session_token, start_run
from agentruns.exceptions import PermissionDeniedError
from agentruns.models import Run, Session
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.api.http import Api, Program, make_user

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)
MANY, FEW = {"limit": 10_000}, {"limit": 10}


class Ranks(Policy):
    """The context says what the user may spend: made by us, nobody sends it."""

    def context(self, user: Any, agent: Any, requested: Any) -> Any:
        return MANY if user.groups.filter(name="managers").exists() else FEW


class Careful(Ranks):
    """Refuses what it gave itself, but an order."""

    def context(self, user: Any, agent: Any, requested: Any) -> Any:
        if requested.keys() - {"order"}:
            raise PermissionDeniedError("Only an order may be sent.")
        return {**requested, **super().context(user, agent, requested)}


@pytest.fixture(autouse=True)
def _ranks(settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Ranks"
    Agent("chat", instructions="Serve.", model=ScriptedModel([{"text": "one"}] * 5), starters="anyone")


def manager(name: str) -> Any:
    user = make_user(name, "start_run", "fork_run", "view_run", is_staff=True)
    user.groups.add(Group.objects.get_or_create(name="managers")[0])
    return user


def begun(user: Any) -> str:
    run = Api(user).post("/runs", {"agent": "chat", "input": "hi", "session": "s1"})[1]
    assert run["context"] == MANY
    sweep()
    return str(run["id"])


@pytest.mark.parametrize("policy", ["Ranks", "Careful"])
@pytest.mark.parametrize("door", ["message", "fork", "again"])
def test_a_rank_that_was_lost_starts_nothing_any_more(settings: Any, policy: str, door: str) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.{policy}"
    ann = manager("ann")
    run = begun(ann)
    ann.groups.clear()
    client, page = Client(), f"/admin/agentruns/run/{run}"
    client.force_login(ann)
    if door == "message":
        assert Api(ann).post("/sessions/s1/messages", {"content": "go on"})[0] == 201
    else:
        assert client.post(f"{page}/{door}/", {"key": "k", "at": 2, "text": "x"}).status_code == 302
    assert Run.objects.latest("created_at").context == FEW


@pytest.mark.parametrize("door", ["fork", "again"])
def test_nobody_borrows_a_rank(door: str) -> None:
    run = begun(manager("boss"))
    bob = make_user("bob", "view_run", "fork_run", "start_run", is_staff=True)
    client = Client()
    client.force_login(bob)
    path = f"/admin/agentruns/run/{run}/{door}/"
    assert client.post(path, {"key": "k", "at": 2, "text": "refund 9999"}).status_code == 302
    assert Run.objects.latest("created_at").context == FEW


def test_without_a_rule_the_context_of_one_user_is_no_others(settings: Any) -> None:
    settings.AGENTRUNS_POLICY = "agentruns.Policy"
    ann, bob = make_user("ann"), make_user("bob", "view_run", "fork_run")
    run = run_agent("chat", "hi", "s1", owner=ann, context={"tenant": 7}).run_id
    for user, context in ((ann, {"tenant": 7}), (bob, {})):
        fork = Api(user).post(f"/runs/{run}/fork", {"at": 2, "text": "x"})[1]
        assert (fork["owner_name"], fork["context"]) == (user.username, context)
    assert Api(ann).post("/sessions/s1/messages", {"content": "and"})[1]["context"] == {"tenant": 7}


@pytest.mark.parametrize("path", ["/runs", "/sessions/s1/messages"])
def test_a_visitor_borrows_no_rank(path: str) -> None:
    body = {"agent": "chat", "input": "x"} if path == "/runs" else {"content": "x"}
    visitor = Program(session_token("s1", HOUR))
    start_run("chat", "hello", "s1", context={"order": 7})
    sweep()
    boss = manager("boss")
    boss.user_permissions.set(make_user("clerk", "act_for", "start_run", "view_run").user_permissions.all())
    assert Api(boss).post("/sessions/s1/messages", {"content": "x"})[1]["context"] == MANY
    sweep()
    assert visitor.post(path, body)[0] == 201
    assert Run.objects.latest("created_at").context == {"order": 7}


@pytest.mark.parametrize("path", ["/runs", "/sessions/s1/messages"])
def test_a_visitor_of_a_users_session_has_what_the_user_has(path: str) -> None:
    body = {"agent": "chat", "input": "x"} if path == "/runs" else {"content": "x"}
    ann = manager("ann")
    begun(ann)
    ann.groups.clear()
    visitor = Program(session_token(Session.objects.get(), HOUR))
    assert visitor.post(path, body)[0] == 201
    assert Run.objects.latest("created_at").context == FEW
    sweep()
    type(ann).objects.update(is_active=False)
    assert visitor.post(path, body)[0] == 403
