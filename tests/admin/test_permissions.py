"""Who gets which page, and whose clicks count; the services ask by themselves, since a page can forget to."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import AnonymousUser
from django.urls import reverse

from agentruns import (
    adopt_definition,
    answer,
    approve,
    cancel_run,
    deny,
    extend,
    pause_run,
    raise_budget,
    resume_run,
)
from agentruns.exceptions import AgentRunsError, PermissionDeniedError
from agentruns.services.runs.control import hold_run, resolve_orphan
from agentruns.services.runs.lifecycle import surface_orphans
from tests.admin.pages import look, read, send, snapshot, url
from tests.admin.people import ROLES, browser, user
from tests.admin.world import World, secretive, status, timed

LOGIN = 302
SEES_APPROVALS = {"viewer", "decider", "superuser"}


def expected(role: str, allowed: set[str], done: int = 200) -> int:
    if role in ("anonymous", "outsider"):
        return LOGIN
    return done if role in allowed else 403


DECIDED = {
    "approve": "approved", "edit": "approved", "answer": "answered", "deny": "denied", "extend": "pending",
}  # fmt: skip
DATA = {"reason": "no", "text": "ask her", "hours": "4", "argument-cents": "4000"}


DECIDE, CONTROL = ("decider", "superuser"), ("operator", "superuser")


@pytest.mark.parametrize("verb", DECIDED)
def test_decisions(world: World, verb: str) -> None:
    tools = [timed] if verb == "extend" else None
    refused = world.waiting("refused", tools=tools)
    for role in sorted(ROLES, key=DECIDE.__contains__):  # those who are refused first
        approval = world.waiting(role, tools=tools) if role in DECIDE else refused
        before = snapshot()
        seen = approval.expires_at.isoformat() if approval.expires_at else ""
        response = send(approval, verb, role, seen=seen, **DATA)
        assert response.status_code == expected(role, {*DECIDE}, done=302), role
        if role not in DECIDE:
            assert snapshot() == before
            continue
        assert response.url == url(approval if verb == "extend" else refused), "the next that waits"
        row = approval.run.messages.filter(kind__startswith="approval_").latest("seq")
        assert row.payload["actor"]["name"] == role
        approval.refresh_from_db()
        assert approval.status == DECIDED[verb]


@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_decisions_on_a_page_of_several(world: World, verb: str) -> None:
    refused, listing = [world.waiting(name) for name in "ab"], reverse("admin:agentruns_approval_changelist")
    for role in ROLES:
        may, client = role in DECIDE, browser(role)
        approval, other = [world.waiting(role + name) for name in "ab"] if may else refused
        turn = reverse("admin:agentruns_approval_turn", args=[approval.run_id])
        for one, where, more, done in (
            (approval, turn, {"verb": verb}, 302),
            (other, listing, {"action": f"{verb}_selected", "confirmed": "1"}, 200),
        ):
            before = snapshot()
            chosen = {"_selected_action": [str(one.pk)], f"digest-{one.pk}": one.digest, "reason": "no"}
            response = client.post(where, {**chosen, **more})
            assert response.status_code == expected(role, SEES_APPROVALS, done=done), role
            assert (snapshot() != before) == may


def test_sensitive_arguments_are_revealed_to_who_may_see_them_and_that_is_logged(world: World) -> None:
    approval = world.waiting(tools=[secretive])
    for role in (*ROLES, "revealer"):
        response = browser(role).post(url(approval, "reveal"))
        assert response.status_code == expected(role, {"revealer", "superuser"})
        if response.status_code == 200:
            assert "DE02-secret" in read(response).text
            entry = LogEntry.objects.get()
            assert (entry.user.get_username(), entry.object_id) == (role, str(approval.pk))
            assert "Saw the sensitive arguments." in entry.get_change_message()
            entry.delete()
        else:
            assert LogEntry.objects.count() == 0
            assert "DE02-secret" not in response.content.decode()


@pytest.mark.parametrize(("action", "after"), [("resume", "queued"), ("cancel", "cancelled")])
def test_control(world: World, action: str, after: str) -> None:
    refused = world.paused("refused")
    for role in ROLES:
        run = world.paused(role) if role in CONTROL else refused
        before, seq = snapshot(), run.messages.latest("seq").seq
        response = browser(role).post(url(run, action), {"seq": seq, "reason": "enough"})
        assert response.status_code == expected(role, {*CONTROL}, done=302), role
        if role in CONTROL:
            assert status(run) == after
            assert run.messages.latest("seq").payload["actor"]["name"] == role
        else:
            assert snapshot() == before


def test_a_viewer_reads_why_there_are_no_buttons_and_a_decider_gets_no_link_to_the_run(world: World) -> None:
    approval, run = world.waiting(), world.paused()
    page = look(approval, "viewer lacks the permission agentruns.decide_approval.", role="viewer")
    assert url(approval, "approve") not in page.forms
    page = look(approval, role="decider")
    assert url(approval.run) not in page.links
    assert str(approval.run_id) in page.text
    page = look(run, role="viewer")
    assert not {url(run, verb) for verb in ("resume", "pause", "cancel")} & set(page.forms)
    for why in (
        "Resume: You lack the permission agentruns.resume_run.",
        "Pause: It is paused already.",
        "Cancel: You lack the permission agentruns.cancel_run.",
    ):
        assert why in page.text


def test_the_requester_may_pause_and_cancel_what_they_see(world: World) -> None:
    run = world.waiting(actor=user("viewer")).run
    assert "People can still decide meanwhile." in look(run, role="viewer").text
    for action, after in {"pause": "paused", "cancel": "cancelled"}.items():
        assert browser("viewer").post(url(run, action), {"reason": ""}).status_code == 302
        assert status(run) == after


DECIDERS = {"decider", "outsider", "superuser"}  # an outsider has the permissions, and no admin
OPERATORS = {"operator", "resumer", "outsider", "superuser"}

Made = Callable[[World, str], Any]
Ask = Callable[[Any, Any], object]
SERVICES: dict[str, tuple[Made, Ask, set[str]]] = {
    "approve": (World.waiting, lambda one, actor: approve(one.pk, actor), DECIDERS),
    "edit": (World.waiting, lambda one, actor: approve(one.pk, actor, arguments={"cents": 1}), DECIDERS),
    "deny": (World.waiting, lambda one, actor: deny(one.pk, actor, "no"), DECIDERS),
    "answer": (World.waiting, lambda one, actor: answer(one.pk, actor, "no"), DECIDERS),
    "extend": (
        lambda world, session: world.waiting(session, tools=[timed]),
        lambda one, actor: extend(one.pk, actor, timedelta(hours=1)),
        DECIDERS,
    ),
    "cancel": (World.waiting, lambda one, actor: cancel_run(one.run_id, actor), OPERATORS),
    "resume": (World.paused, lambda run, actor: resume_run(run.pk, actor, drive=False), OPERATORS),
    "surface": (World.orphaned, lambda run, actor: surface_orphans(run.pk, actor), OPERATORS),
    "resolve": (
        World.orphaned,
        lambda run, actor: resolve_orphan(run.pk, run.pending_calls[0], "occurred", actor, result="done"),
        {"resolver", "outsider", "superuser"},
    ),
    "pause": (World.waiting, lambda one, actor: pause_run(one.run_id, actor), {"superuser"}),
    "raise": (
        World.waiting,
        lambda one, actor: raise_budget(one.run_id, actor, max_steps=99),
        {"superuser"},
    ),
    "hold": (World.waiting, lambda one, actor: hold_run(one.run_id, actor), {"superuser"}),
    "adopt": (World.waiting, lambda one, actor: adopt_definition(one.run_id, actor), {"superuser"}),
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_asks_by_itself(world: World, name: str) -> None:
    make, ask, allowed = SERVICES[name]
    refused = make(world, "refused")
    for role in ROLES:
        actor = AnonymousUser() if role == "anonymous" else user(role)
        made = make(world, role) if role in allowed else refused
        before = snapshot()
        if role not in allowed:
            with pytest.raises(PermissionDeniedError):
                ask(made, actor)
            assert snapshot() == before
        elif name == "adopt":  # what is in force already is a conflict
            with pytest.raises(AgentRunsError) as conflict:
                ask(made, actor)
            assert not isinstance(conflict.value, PermissionDeniedError)
        else:
            ask(made, actor)
            assert snapshot() != before


def test_the_requester_may_be_kept_from_deciding(world: World, settings: Any) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    for number, decide in enumerate((approve, lambda key, who: deny(key, who, "no"))):
        approval = world.waiting(f"own-{number}", actor=user("decider"))
        with pytest.raises(PermissionDeniedError, match="requesters may not decide"):
            decide(approval.pk, user("decider"))
        assert send(approval, "approve", "decider").status_code == 403
        assert decide(approval.pk, user("superuser")).status in ("approved", "denied")
