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
    resolve_orphan,
    resume_run,
)
from agentruns.exceptions import AgentRunsError, PermissionDeniedError
from agentruns.models import Message
from agentruns.services.control import hold_run
from agentruns.services.runs import surface_orphans
from tests.admin.pages import look, read, send, snapshot, unchanged, url
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


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("verb", DECIDED)
def test_decisions(world: World, role: str, verb: str) -> None:
    approval = world.waiting(tools=[timed]) if verb == "extend" else world.waiting()
    before = snapshot()
    seen = approval.expires_at.isoformat() if approval.expires_at else ""
    response = send(approval, verb, role, seen=seen, **DATA)
    assert response.status_code == expected(role, {"decider", "superuser"}, done=302)
    if role in ("decider", "superuser"):
        goes_on = reverse("admin:agentruns_approval_changelist") if verb != "extend" else url(approval)
        assert response.url == goes_on
        row = Message.objects.filter(run=approval.run, kind__startswith="approval_").order_by("seq").last()
        assert row is not None
        assert row.payload["actor"]["name"] == role
        approval.refresh_from_db()
        assert approval.status == DECIDED[verb]
    else:
        assert snapshot() == before


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("verb", ["approve", "deny"])
def test_decisions_on_a_page_of_several(world: World, role: str, verb: str) -> None:
    approval, before = world.waiting(), snapshot()
    key, client = approval.pk, browser(role)
    row = {"verb": verb, "_selected_action": [str(key)], f"digest-{key}": approval.digest, "reason": "no"}
    turn = client.post(reverse("admin:agentruns_approval_turn", args=[approval.run_id]), row)
    may = role in ("decider", "superuser")
    assert turn.status_code == expected(role, SEES_APPROVALS, done=302)
    assert (snapshot() != before) == may
    other = world.waiting("other")
    before = snapshot()
    bulk = {
        "action": f"{verb}_selected", "_selected_action": [str(other.pk)], "confirmed": "1",
        f"digest-{other.pk}": other.digest, "reason": "no",
    }  # fmt: skip
    response = client.post(reverse("admin:agentruns_approval_changelist"), bulk)
    assert response.status_code == expected(role, SEES_APPROVALS)
    assert (snapshot() != before) == may


@pytest.mark.parametrize("role", [*ROLES, "revealer"])
def test_sensitive_arguments_are_revealed_to_who_may_see_them_and_that_is_logged(
    world: World, role: str
) -> None:
    approval = world.waiting(tools=[secretive])
    response = browser(role).post(url(approval, "reveal"))
    assert response.status_code == expected(role, {"revealer", "superuser"})
    if response.status_code == 200:
        assert "DE02-secret" in read(response).text
        entry = LogEntry.objects.get()
        assert (entry.user.get_username(), entry.object_id) == (role, str(approval.pk))
        assert "Saw the sensitive arguments." in entry.get_change_message()
    else:
        assert LogEntry.objects.count() == 0
        assert "DE02-secret" not in response.content.decode()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("action", ["resume", "cancel"])
def test_control(world: World, role: str, action: str) -> None:
    run, before = world.paused(), snapshot()
    seq = run.messages.order_by("-seq").first().seq
    response = browser(role).post(url(run, action), {"seq": seq, "reason": "enough"})
    assert response.status_code == expected(role, {"operator", "superuser"}, done=302)
    if role in ("operator", "superuser"):
        run.refresh_from_db()
        assert run.status == {"resume": "queued", "cancel": "cancelled"}[action]
        assert run.messages.order_by("-seq").first().payload["actor"]["name"] == role
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


def test_requests_without_a_csrf_token_are_refused(world: World) -> None:
    approval, run, client = world.waiting(), world.paused(), browser("superuser", enforce_csrf_checks=True)
    with unchanged():
        for target in (*(url(approval, verb) for verb in DECIDED), url(run, "resume"), url(run, "cancel")):
            assert (
                client.post(target, {"digest": approval.digest, "reason": "x", "seq": 1}).status_code == 403
            )


DECIDERS = {"decider", "outsider", "superuser"}  # an outsider has the permissions, and no admin
OPERATORS = {"operator", "resumer", "outsider", "superuser"}

Made = Callable[[World], Any]
Ask = Callable[[Any, Any], object]
SERVICES: dict[str, tuple[Made, Ask, set[str]]] = {
    "approve": (World.waiting, lambda one, actor: approve(one.pk, actor), DECIDERS),
    "edit": (World.waiting, lambda one, actor: approve(one.pk, actor, arguments={"cents": 1}), DECIDERS),
    "deny": (World.waiting, lambda one, actor: deny(one.pk, actor, "no"), DECIDERS),
    "answer": (World.waiting, lambda one, actor: answer(one.pk, actor, "no"), DECIDERS),
    "extend": (
        lambda world: world.waiting(tools=[timed]),
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
    "hold": (World.waiting, lambda one, actor: hold_run(one.run_id, actor), {"superuser"}),
    "adopt": (World.waiting, lambda one, actor: adopt_definition(one.run_id, actor), {"superuser"}),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", SERVICES)
def test_a_service_asks_by_itself(world: World, name: str, role: str) -> None:
    make, ask, allowed = SERVICES[name]
    actor, made = AnonymousUser() if role == "anonymous" else user(role), make(world)
    before, error = snapshot(), None
    try:
        ask(made, actor)
    except AgentRunsError as raised:
        error = raised
    if role in allowed:
        assert not isinstance(error, PermissionDeniedError)
        assert snapshot() != before or name == "adopt", "adopting what is in force already is a conflict"
    else:
        assert isinstance(error, PermissionDeniedError)
        assert snapshot() == before


def test_the_requester_may_be_kept_from_deciding(world: World, settings: Any) -> None:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    for number, decide in enumerate((approve, lambda key, who: deny(key, who, "no"))):
        approval = world.waiting(f"own-{number}", actor=user("decider"))
        with pytest.raises(PermissionDeniedError, match="requesters may not decide"):
            decide(approval.pk, user("decider"))
        assert decide(approval.pk, user("superuser")).status in ("approved", "denied")
