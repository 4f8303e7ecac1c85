"""Who acts is a user object or the program, in every function that asks; anything else is a TypeError."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser, Group
from django.test.utils import isolate_apps
from django.utils.functional import SimpleLazyObject

import agentruns
from agentruns import Agent, Policy, cancel_run, list_runs, run_agent, services, start_run
from agentruns.agents import agent as agent_options
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import events
from agentruns.journal.policy import is_somebody
from agentruns.models import ApiToken, ApprovalRule, Message, Run, Session
from agentruns.services import api_tokens
from agentruns.services.data import erasure
from agentruns.services.runs import control
from agentruns.services.runs.messages import send_message
from agentruns.services.runs.requests import RunRequest
from tests.api.http import make_user
from tests.db.helpers import payloads
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

WHO = ("actor", "owner", "user")
# What services ask each other about an actor that one of the others was given; each door has a user.
INNER = {"permissions", "requests", "sessions", "submit", "links", "recipients"}
ALSO_INNER = {"send", "last_run", "may_revoke", "assignable", "read_content", "agents_of", "why_not_start",
              "credentials"}  # fmt: skip


def asking() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield every function that asks who acts or whose something is, with the name of that parameter."""
    found: dict[str, Any] = {f"agentruns.{name}": getattr(agentruns, name) for name in agentruns.__all__}
    for module in pkgutil.walk_packages(services.__path__, f"{services.__name__}."):
        noun = module.name.rpartition(".")[2]
        if noun not in INNER:
            made = importlib.import_module(module.name)
            own = {name: each for name, each in vars(made).items() if name not in ALSO_INNER}
            found |= {
                f"{noun}.{name}": each
                for name, each in own.items()
                if inspect.isfunction(each) and each.__module__ == made.__name__
            }
    found |= {f"Agent.{name}": each for name, each in vars(Agent).items()}
    for name, function in found.items():
        if not inspect.isfunction(function) or name.rpartition(".")[2].startswith("_"):
            continue
        parameters = inspect.signature(function).parameters.values()
        keywords = {each.name for each in parameters if each.annotation != "str | None"}  # else an id
        if unpacked := re.fullmatch(r"Unpack\[(\w+)\]", function.__annotations__.get("options", "")):
            keywords |= {*getattr(agent_options, unpacked[1]).__annotations__}
        yield from ((name, function, who) for who in WHO if who in keywords)


ASKING = {f"{name}({who}=)": (function, who) for name, function, who in asking()}

ODD: dict[str, Callable[[], Any]] = {
    "a name": lambda: "ann", "no name": lambda: "", "a key": lambda: 5, "an object": object,
    "a flag": lambda: True, "bytes": lambda: b"x", "the class": get_user_model,
    "a record": lambda: {"id": "1", "name": "ann"}, "a lazy name": lambda: SimpleLazyObject(lambda: "ann"),
    "a row of another model": lambda: Group.objects.get(name="staff"),
}  # fmt: skip


@pytest.fixture
def given() -> dict[str, Any]:
    """A value for every other parameter: of a run that waits for a person, and one that has ended."""
    ann = make_user("ann")
    Group.objects.create(name="staff", pk=ann.pk)
    agent = shop_agent("shop", {"tools": [call("refund", cents=5000)]}, {"text": "done"})
    waits = run_agent(agent, "do it", "s1")
    ended = Run.objects.get(pk=run_agent(shop_agent("other"), "say", "ended", actor=ann).run_id)
    token, _text = api_tokens.create_token(ann, ["runs:read"])
    asked = events.APPROVAL_REQUESTED
    about = {"agent": "shop", "tool": "refund", "conditions": [], "caps": []}
    rule = ApprovalRule.objects.create(name="few", version=1, **about)
    return {
        "agent": agent, "text": "say", "content": "say", "session": ended.session, "run_id": ended.pk,
        "approval_id": waits.pending[0].pk, "reason": "because", "by": timedelta(hours=1), "seq": 2, "at": 2,
        "call_id": Message.objects.get(kind=asked).call_id, "verdict": "unknown", "user": ann,
        "key": "pi_1",
        "actor": ann, "owner": ann, "kind": "agent", "name": "shop", "state": "off", "token_id": token.pk,
        "approval": waits.pending[0], "tool": "refund", "rule": rule, "rule_id": rule.pk,
        "person": ann, "delegate": ann, "begins_at": waits.pending[0].requested_at,
        "ends_at": waits.pending[0].requested_at + timedelta(days=1), "absence_id": 1,
        "scopes": ["runs:read"], "ttl": timedelta(minutes=1), "runs": list_runs(),
    }  # fmt: skip


def test_nobody_else_acts(given: dict[str, Any]) -> None:
    def rows() -> dict[str, int]:
        return {model.__name__: model._default_manager.count() for model in apps.get_models()}

    # A function that begins to take another name for it has to be found.
    public = {each.partition("(")[0].removeprefix("agentruns.") for each in ASKING}
    assert {"start_run", "cancel_run", "resolve_orphan", "erase_user", "list_runs", "run_again"} <= public
    before = rows()
    for name, (function, who) in ASKING.items():
        parameters = inspect.signature(function).parameters.values()
        needed = [each.name for each in parameters if each.default is each.empty and each.kind < 4]
        values = {each: given[each] for each in needed if each != "self"}
        called = async_to_sync(function) if inspect.iscoroutinefunction(function) else function
        for odd, make in ODD.items():
            with pytest.raises(TypeError, match=r"must be a user object, such as request\.user, or None for"):
                called(*[given["agent"]] * needed.count("self"), **values | {who: make()})
                pytest.fail(f"{name} takes {odd}")
        assert rows() == before, name


class Silent(Policy):
    def scope(self, user: Any) -> str:
        """Ask a user for their tenant."""
        return "" if user is None else str(user.pk)


def test_with_an_owner_the_actor_is_looked_at_too(given: dict[str, Any], settings: Any) -> None:
    own = "agentruns.Policy"
    for policy, act in (
        (own, lambda: start_run("shop", "say", "s3", actor="mallory", owner=given["user"])),
        (own, lambda: run_agent("shop", "say", "s3", actor="mallory", owner=given["user"])),
        (own, lambda: send_message("ended", "say", actor="mallory", owner=given["user"])),
        (own, lambda: run_agent("shop", "say", actor="mallory")),  # nor where nothing is stored
        # Before its files are stored:
        (own, lambda: RunRequest(agent=given["agent"], text="say", session="s3", actor="mallory")),
        (f"{__name__}.Silent", lambda: start_run("shop", "say", "s3", actor="mallory")),
        (f"{__name__}.Silent", lambda: is_somebody("mallory")),
    ):
        settings.AGENTRUNS_POLICY = policy
        with pytest.raises(TypeError, match="must be a user object"):
            act()
    unsaved = type("Unsaved", (), {"pk": "", "is_active": True, "is_authenticated": True})()
    for ask in (is_somebody, lambda user: start_run("shop", "say", "s3", actor=user)):
        with pytest.raises(TypeError, match="must have an id: the Unsaved has an empty one"):
            ask(unsaved)


def test_users_are_taken_in_every_form_and_a_part_of_the_program(given: dict[str, Any]) -> None:
    ann = given["user"]
    lazy = SimpleLazyObject(lambda: ann)
    with isolate_apps("tests.shop"):
        meta = type("Meta", (), {"proxy": True, "app_label": "shop"})
        proxy: Any = type("Proxy", (type(ann),), {"__module__": __name__, "Meta": meta})
    for number, actor in enumerate((ann, lazy, proxy.objects.get(pk=ann.pk))):
        run = start_run("shop", "say", f"form{number}", actor=actor)
        assert (run.owner_id, payloads(run, events.RUN_STARTED)[0]["actor"]["name"]) == (ann.pk, "ann")
        assert cancel_run(run.pk, actor).status == "cancelled"
    assert list_runs(owner=lazy).count() == 4
    with pytest.raises(PermissionDeniedError):
        start_run("shop", "say", "visitor", actor=AnonymousUser())
    run = start_run("shop", "say", "programs")
    control.hold_run(run.pk, events.Program("resume_runs"))
    assert payloads(run, events.RUN_PAUSED)[0]["actor"] == {"id": "", "name": "resume_runs"}


def test_what_belongs_to_nobody_is_no_users() -> None:
    """A user who was deleted has no key; that of the program's own sessions is none either."""
    run_agent(shop_agent("shop"), "say", "s1")
    gone = make_user("gone")
    gone.delete()
    for user in (gone, AnonymousUser(), None):
        error = TypeError if user is None else PermissionDeniedError
        with pytest.raises(error):
            erasure.erase_user(user, None, "asked")
        with pytest.raises(error):
            api_tokens.create_token(user, ["runs:read"])
    assert not Message.objects.filter(content__isnull=True).exists()
    assert (Session.objects.count(), ApiToken.objects.count()) == (1, 0)
