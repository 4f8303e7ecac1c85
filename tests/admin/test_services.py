"""Who may do what, asked of the services themselves: a page can forget to ask, they cannot."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser

from agentruns import (
    adopt_definition,
    answer,
    approve,
    cancel_run,
    deny,
    extend,
    pause_run,
    resolve_orphan,
    resume_run,
)
from agentruns.exceptions import AgentRunsError, PermissionDeniedError
from agentruns.services.control import hold_run
from agentruns.services.runs import surface_orphans
from tests.admin.pages import snapshot
from tests.admin.people import ROLES, user
from tests.admin.world import World, timed

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)
DECIDERS = {"decider", "outsider", "superuser"}  # an outsider has the permissions, and no admin
OPERATORS = {"operator", "resumer", "outsider", "superuser"}

Ask = Callable[[World, Any], object]
SERVICES: dict[str, tuple[Ask, set[str]]] = {
    "approve": (lambda world, actor: approve(world.waiting().pk, actor), DECIDERS),
    "edit": (lambda world, actor: approve(world.waiting().pk, actor, arguments={"cents": 1}), DECIDERS),
    "deny": (lambda world, actor: deny(world.waiting().pk, actor, "no"), DECIDERS),
    "answer": (lambda world, actor: answer(world.waiting().pk, actor, "no"), DECIDERS),
    "extend": (lambda world, actor: extend(world.waiting(tools=[timed]).pk, actor, HOUR), DECIDERS),
    "cancel": (lambda world, actor: cancel_run(world.waiting().run_id, actor), OPERATORS),
    "resume": (lambda world, actor: resume_run(world.paused().pk, actor, drive=False), OPERATORS),
    "surface": (lambda world, actor: surface_orphans(world.orphaned().pk, actor), OPERATORS),
    "resolve": (lambda world, actor: resolve(world, actor), {"resolver", "outsider", "superuser"}),
    "pause": (lambda world, actor: pause_run(world.waiting().run_id, actor), {"superuser"}),
    "hold": (lambda world, actor: hold_run(world.waiting().run_id, actor), {"superuser"}),
    "adopt": (lambda world, actor: adopt_definition(world.waiting().run_id, actor), {"superuser"}),
}


def resolve(world: World, actor: Any) -> object:
    run = world.orphaned()
    call_id = run.messages.get(kind="orphan_found").call_id
    return resolve_orphan(run.pk, call_id, "occurred", actor, result="done")


def before_and_after(ask: Ask, world: World, actor: Any) -> tuple[bool, Exception | None]:
    """Return whether anything was changed by the service itself, and what it raised."""
    known: list[Any] = []

    class Watched:
        """The world, remembering how it was once it was made ready."""

        def __getattr__(self, name: str) -> Any:
            def made(*args: Any, **options: Any) -> Any:
                found = getattr(world, name)(*args, **options)
                known.append(snapshot())
                return found

            return made

    try:
        ask(Watched(), actor)  # type: ignore[arg-type]
    except AgentRunsError as error:
        return snapshot() != known[-1], error
    return snapshot() != known[-1], None


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", SERVICES)
def test_a_service_asks_by_itself(world: World, name: str, role: str) -> None:
    ask, allowed = SERVICES[name]
    actor = AnonymousUser() if role == "anonymous" else user(role)
    changed, error = before_and_after(ask, world, actor)
    if role in allowed:
        assert not isinstance(error, PermissionDeniedError)
        assert changed or name == "adopt", "adopting what is in force already is a conflict"
    else:
        assert isinstance(error, PermissionDeniedError)
        assert not changed


def test_the_requester_may_be_kept_from_deciding(world: World, settings: Any) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    for number, decide in enumerate((approve, lambda key, who: deny(key, who, "no"))):
        approval = world.waiting(f"own-{number}", actor=user("decider"))
        with pytest.raises(PermissionDeniedError, match="requesters may not decide"):
            decide(approval.pk, user("decider"))
        assert decide(approval.pk, user("superuser")).status in ("approved", "denied")
