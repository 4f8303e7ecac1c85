"""Who gets which page, and whose clicks count."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from agentruns.models import Message
from tests.admin.pages import read, snapshot, url
from tests.admin.people import ROLES, browser
from tests.admin.world import World, secretive, timed

LOGIN = 302
SEES_RUNS = {"viewer", "operator", "resolver", "superuser"}
SEES_APPROVALS = {"viewer", "decider", "superuser"}


def expected(role: str, allowed: set[str], done: int = 200) -> int:
    if role in ("anonymous", "outsider"):
        return LOGIN
    return done if role in allowed else 403


@pytest.mark.parametrize("role", ROLES)
def test_pages(world: World, role: str) -> None:
    approval, client = world.waiting(), browser(role)
    pages = {
        reverse("admin:agentruns_run_changelist"): SEES_RUNS,
        url(approval.run): SEES_RUNS,
        url(approval.run, "row", 1): SEES_RUNS,
        url(approval.run, "history"): SEES_RUNS,
        reverse("admin:agentruns_approval_changelist"): SEES_APPROVALS,
        url(approval): SEES_APPROVALS,
        url(approval, "history"): SEES_APPROVALS,
    }
    before = snapshot()
    for page, allowed in pages.items():
        response = client.get(page)
        assert response.status_code == expected(role, allowed), page
        if response.status_code == LOGIN:
            assert response.url.startswith(reverse("admin:login")), page
    assert snapshot() == before


DECIDED = {
    "approve": "approved",
    "edit": "approved",
    "answer": "answered",
    "deny": "denied",
    "extend": "pending",
}
DATA = {
    "reason": "no",
    "text": "ask her",
    "hours": "4",
    "argument-cents": "4000",
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("verb", DECIDED)
def test_decisions(world: World, role: str, verb: str) -> None:
    approval = world.waiting(tools=[timed]) if verb == "extend" else world.waiting()
    before = snapshot()
    seen = approval.expires_at.isoformat() if approval.expires_at else ""
    data = {"digest": approval.digest, "seen": seen, **DATA}
    response = browser(role).post(url(approval, verb), data)
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


def test_a_viewer_reads_why_there_are_no_buttons(world: World) -> None:
    approval = world.waiting()
    page = read(browser("viewer").get(url(approval)))
    assert "viewer lacks the permission agentruns.decide_approval." in page.text
    assert url(approval, "approve") not in page.forms
    run = world.paused()
    page = read(browser("viewer").get(url(run)))
    assert not {url(run, verb) for verb in ("resume", "pause", "cancel")} & set(page.forms)
    assert "Resume: You lack the permission agentruns.resume_run." in page.text
    assert "Pause: It is paused already." in page.text
    assert "Cancel: You lack the permission agentruns.cancel_run." in page.text


def test_a_decider_gets_no_link_to_runs_that_they_may_not_see(world: World) -> None:
    approval = world.waiting()
    page = read(browser("decider").get(url(approval)))
    assert url(approval.run) not in page.links
    assert str(approval.run_id) in page.text


def test_the_owner_may_cancel_what_they_see(world: World) -> None:
    from tests.admin.people import user

    approval = world.waiting(actor=user("viewer"))
    response = browser("viewer").post(url(approval.run, "cancel"), {"reason": ""})
    assert response.status_code == 302
    approval.run.refresh_from_db()
    assert approval.run.status == "cancelled"


def test_requests_without_a_csrf_token_are_refused(world: World) -> None:
    approval, run, client = world.waiting(), world.paused(), browser("superuser", enforce_csrf_checks=True)
    before = snapshot()
    for target in (url(approval, "approve"), url(approval, "deny"), url(run, "resume"), url(run, "cancel")):
        assert client.post(target, {"digest": approval.digest, "reason": "x", "seq": 1}).status_code == 403
    assert snapshot() == before


def test_the_forms_on_the_pages_are_accepted_with_their_token(world: World) -> None:
    approval, client = world.waiting(), browser("superuser", enforce_csrf_checks=True)
    form = read(client.get(url(approval))).forms[url(approval, "approve")]
    assert client.post(url(approval, "approve"), form).status_code == 302
    approval.refresh_from_db()
    assert approval.status == "approved"
    run = world.paused()
    form = read(client.get(url(run))).forms[url(run, "resume")]
    assert client.post(url(run, "resume"), form).status_code == 302
    run.refresh_from_db()
    assert run.status == "queued"
