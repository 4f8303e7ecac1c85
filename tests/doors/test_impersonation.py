"""Staff who act in somebody's name: the journal names both, and both count where two people are wanted."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import path
from ninja.security import django_auth

from agentruns import Policy, approve, deny, export_run, run_agent, tool
from agentruns.checks.settings import check_impersonation
from agentruns.exceptions import ApprovalStateError, PermissionDeniedError
from agentruns.journal import policy
from agentruns.journal.deciders import why_not_decide
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run, Session
from agentruns.services import permissions
from agentruns.services.api_tokens import create_token
from agentruns.services.reviews import review_run
from agentruns.services.runs import starting
from agentruns.services.sweep import sweep
from tests.admin.pages import url
from tests.api.hosting import host
from tests.api.http import Api, make_user, refused
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

RIGHTS = ("decide_approval", "view_approval", "view_run", "start_run", "cancel_run")


@tool(requires_approval=True)
def pay(cents: int) -> str:
    """Pay."""
    return "paid"


@tool(requires_approval=True, approvals=2)
def pay_much(cents: int) -> str:
    """Pay what two people approve."""
    return "paid"


@pytest.fixture
def eve() -> Any:
    return make_user("eve", *RIGHTS, is_staff=True)


@pytest.fixture
def boss() -> Any:
    return make_user("boss", *RIGHTS, is_staff=True)


@pytest.fixture(autouse=True)
def agent(settings: Any) -> Any:
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    return shop_agent("payer", {"tools": [call("pay", cents=5)]}, tools=[pay])


def as_(person: Any, user: Any) -> Api:
    """Sign in as `user` as django-hijack does: the session keeps who released themselves as somebody else."""
    api = Api(user)
    session = api.client.session
    session["hijack_history"] = [str(person.pk)]
    session.save()
    return api


def noted(person: Any, user: Any) -> Any:
    """The user of such a request, as the doors pass it to the services."""
    user.agentruns_person = person
    return user


def actors(run: Any) -> list[Any]:
    return [
        row.payload["actor"]
        for row in Message.objects.filter(run=run).order_by("seq")
        if "actor" in row.payload
    ]


def pending() -> Approval:
    return Approval.objects.get(status="pending")


def approved(api: Api) -> tuple[int, Any]:
    return api.post(f"/approvals/{pending().pk}/approve", {"digest": pending().digest})


def test_starts_messages_and_cancels_name_both(eve: Any, boss: Any) -> None:
    api, both = as_(eve, boss), {"id": str(boss.pk), "name": "eve as boss", "by": str(eve.pk)}
    run = api.post("/runs", {"agent": "payer", "session": "s1", "input": "pay"})[1]["id"]
    sweep()
    assert api.post("/sessions/s1/messages", {"content": "and?"})[0] == 201
    for person in (eve, boss):  # both requested it
        refused(
            Api(person).post(f"/approvals/{pending().pk}/approve", {"digest": pending().digest}),
            403,
            "permission-denied",
        )
        assert not permissions.decidable_by(person, Approval.objects.all()).exists()
    assert api.post(f"/runs/{run}/cancel", {})[0] in (200, 202)
    sweep()
    assert len(actors(run)) >= 3 and all(actor == both for actor in actors(run))
    assert Session.objects.get().owner_id == boss.pk
    exported = [line for line in export_run(run) if "eve as boss" in str(line)]
    assert len(exported) >= 3 and problems(Session.objects.get().pk) == []


@pytest.mark.parametrize("door", ["api", "console"])
def test_nobody_approves_their_own_request_as_somebody_else(
    door: str, agent: Any, eve: Any, boss: Any
) -> None:
    run_agent(agent, "pay", "s1", actor=eve, idempotency_key="k")
    card, api = pending(), as_(eve, boss)
    if door == "api":
        refused(approved(api), 403, "permission-denied")
    else:
        answer = api.client.post(url(card, "approve"), {"digest": card.digest, "reason": ""})
        assert answer.status_code == 403
    assert pending() == card
    assert not permissions.decidable_by(noted(eve, boss), Approval.objects.all()).exists()


@pytest.mark.parametrize("door", ["api", "console"])
def test_a_decision_names_both(door: str, agent: Any, eve: Any, boss: Any) -> None:
    run = run_agent(agent, "pay", "s1", idempotency_key="k").run_id
    card, api = pending(), as_(eve, boss)
    if door == "api":
        assert approved(api)[0] == 200
    else:
        api.client.post(url(card, "approve"), {"digest": card.digest, "reason": ""})
    assert actors(run)[-1] == {"id": str(boss.pk), "name": "eve as boss", "by": str(eve.pk)}
    assert Api(eve).get(f"/approvals/{card.pk}")[1]["decided_by_name"] == "eve as boss"
    assert "eve as boss" in Api(boss).client.get(url(card)).content.decode()


def test_reveals_exports_and_reviews_name_both(agent: Any, eve: Any, boss: Any, caplog: Any) -> None:
    boss.is_superuser = True
    boss.save()
    run_agent(agent, "pay", "s1", idempotency_key="k")
    card, api = pending(), as_(eve, boss)
    with caplog.at_level("INFO", "agentruns"):
        assert api.get(f"/approvals/{card.pk}", reveal="true")[0] == 200
    assert f"to user={boss.pk} acted-by={eve.pk} door=api" in caplog.text
    assert api.client.post(url(card.run, "export")).status_code == 200
    assert LogEntry.objects.get().get_change_message() == "eve as boss: Exported for an auditor."
    assert review_run(card.run_id, noted(eve, boss), note="fine").author_name == "eve as boss"


def test_one_person_is_no_two_under_any_name(eve: Any, boss: Any) -> None:
    agent = shop_agent("much", {"tools": [call("pay_much", cents=5)]}, tools=[pay_much])
    run_agent(agent, "pay", "s1", idempotency_key="k")
    card = pending().pk
    approve(card, noted(eve, boss))
    third = noted(eve, make_user("third", *RIGHTS))
    for again in (eve, noted(None, boss), third, noted(boss, make_user("fourth", *RIGHTS))):
        with pytest.raises(ApprovalStateError, match=r"approved .* already"):
            approve(card, again)
        assert not permissions.decidable_by(again, Approval.objects.all()).exists()
    deny(card, eve, "on second thought")


def test_who_becomes_a_requester_loses_what_they_gave(eve: Any, boss: Any) -> None:
    agent = shop_agent("much", {"tools": [call("pay_much", cents=5)]}, tools=[pay_much])
    run = run_agent(agent, "pay", "s1", idempotency_key="k").run_id
    card = pending()
    approve(card.pk, noted(eve, boss))
    starting.send_message(eve, card.run.session, "faster")
    assert "requesters may not decide" in why_not_decide(eve, Approval.objects.get())
    approve(card.pk, make_user("third", *RIGHTS))
    assert (Approval.objects.get().status, Approval.objects.get().approved_count) == ("pending", 1)
    approve(card.pk, noted(None, boss))
    sweep()
    assert Run.objects.get().status == "completed" and problems(Run.objects.get(pk=run).session_id) == []


def test_it_is_asked_again_before_the_call_runs(agent: Any, eve: Any, boss: Any) -> None:
    run_agent(agent, "pay", "s1", idempotency_key="k")
    card = pending()
    approve(card.pk, noted(eve, boss))
    starting.send_message(eve, card.run.session, "faster")
    sweep()
    assert (pending().pk, pending().approved_count) == (card.pk, 0)


def dismiss(person: Any) -> None:
    person.is_active = False
    person.save()


@pytest.mark.parametrize("leave", [dismiss, lambda person: person.delete()], ids=["inactive", "deleted"])
def test_what_a_dismissed_person_gave_as_another_lapses(leave: Any, agent: Any, eve: Any, boss: Any) -> None:
    run_agent(agent, "pay", "s1", idempotency_key="k")
    card = pending()
    approve(card.pk, noted(eve, boss))
    leave(eve)
    sweep()
    assert (pending().pk, pending().approved_count) == (card.pk, 0)


@pytest.mark.parametrize("leave", [dismiss, lambda person: person.delete()], ids=["inactive", "deleted"])
def test_a_person_who_is_gone_lets_nobody_in(leave: Any, agent: Any, eve: Any, boss: Any) -> None:
    run_agent(agent, "pay", "s1", idempotency_key="k")
    api = as_(eve, boss)
    leave(eve)
    refused(
        api.post(f"/approvals/{pending().pk}/approve", {"digest": pending().digest}), 403, "permission-denied"
    )
    assert api.client.get(url(pending())).status_code == 403


@pytest.mark.parametrize("auth", [None, django_auth], ids=["our auth", "theirs"])
def test_in_somebody_elses_api_too(auth: Any, agent: Any, eve: Any, boss: Any, urlconf: Any) -> None:
    urlconf(path("theirs/", host(auth=auth, errors=False).urls))
    run = run_agent(agent, "pay", "s1", idempotency_key="k").run_id
    api = as_(eve, boss)
    api.root = "/theirs/agents"
    assert approved(api)[0] == 200
    assert actors(run)[-1] == {"id": str(boss.pk), "name": "eve as boss", "by": str(eve.pk)}
    eve.delete()
    assert api.client.get("/theirs/agents/runs").status_code == 403


def test_nobody_makes_a_token_in_another_name(eve: Any, boss: Any) -> None:
    with pytest.raises(PermissionDeniedError, match="another person's name"):
        create_token(noted(eve, boss), ["approvals:decide"])


class Loginas(Policy):
    """A project with django-loginas or the like."""

    def impersonator(self, request: Any) -> Any:
        key = request.session.get("loginas")
        return None if key is None else policy.user_of_key(key)


@pytest.mark.parametrize("known", [False, True])
def test_an_app_for_acting_in_others_names_wants_the_hook(
    known: bool, settings: Any, monkeypatch: Any
) -> None:
    assert check_impersonation(None) == []
    monkeypatch.setattr(apps, "is_installed", lambda name: name == "loginas")
    settings.AGENTRUNS_POLICY = f"{__name__}.Loginas" if known else "agentruns.journal.policy.Policy"
    assert [each.id for each in check_impersonation(None)] == ([] if known else ["agentruns.W023"])


def test_the_hook_of_a_project_and_django_impersonate(eve: Any, boss: Any, settings: Any, rf: Any) -> None:
    request = rf.get("/")
    request.user, request.session, request.impersonator = boss, {"loginas": str(eve.pk)}, None
    assert policy.identify(request).agentruns_person is None
    request.impersonator = eve
    assert policy.identify(request).agentruns_person == eve
    request.impersonator = boss
    assert policy.identify(request).agentruns_person is None, "themselves"
    settings.AGENTRUNS_POLICY = f"{__name__}.Loginas"
    assert policy.identify(request).agentruns_person == eve
    assert Client().get("/admin/").status_code == 302
