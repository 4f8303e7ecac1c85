"""Nothing is added, edited or deleted in the admin, and looking changes nothing."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.test import RequestFactory
from django.urls import reverse

from agentruns.models import Approval, Definition, Message, Run, Session
from tests.admin.pages import snapshot, url
from tests.admin.people import browser
from tests.admin.world import World

MODELS = ["run", "approval"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["get", "post"])
def test_add_change_and_delete_are_refused(world: World, model: str, method: str) -> None:
    approval, client = world.waiting(), browser("superuser")
    obj = approval if model == "approval" else approval.run
    before = snapshot()
    send = getattr(client, method)
    assert send(reverse(f"admin:agentruns_{model}_add")).status_code == 403
    assert send(url(obj, "delete"), {"post": "yes"}).status_code == 403
    if method == "post":
        assert client.post(url(obj), {"status": "completed", "_save": "1"}).status_code == 403
    assert snapshot() == before


@pytest.mark.parametrize("model", MODELS)
def test_there_are_no_bulk_actions(world: World, model: str) -> None:
    approval = world.waiting()
    key = approval.pk if model == "approval" else approval.run_id
    before = snapshot()
    data = {"action": "delete_selected", "_selected_action": str(key), "post": "yes"}
    listing = reverse(f"admin:agentruns_{model}_changelist")
    browser("superuser").post(listing, data)
    assert snapshot() == before
    assert b"delete_selected" not in browser("superuser").get(listing).content


def test_the_journal_has_no_pages_of_its_own() -> None:
    assert not any(admin.site.is_registered(model) for model in (Message, Definition, Session))


def test_looking_changes_nothing(world: World) -> None:
    approval, run = world.waiting(), world.orphaned()
    before, client = snapshot(), browser("superuser")
    for target in (
        reverse("admin:index"),
        reverse("admin:agentruns_run_changelist"),
        reverse("admin:agentruns_approval_changelist"),
        url(approval), url(run), url(run, "row", 1), url(run, "history"),
    ):  # fmt: skip
        assert client.get(target).status_code == 200, target
    assert snapshot() == before


@pytest.mark.parametrize("method", ["get", "head"])
def test_the_buttons_targets_only_lead_back_when_they_are_read(world: World, method: str) -> None:
    approval, run, client = world.waiting(), world.paused(), browser("superuser")
    before = snapshot()
    for obj, action in ((approval, "approve"), (approval, "deny"), (run, "resume"), (run, "cancel")):
        response = getattr(client, method)(url(obj, action))
        assert (response.status_code, response.url) == (302, url(obj))
    assert snapshot() == before


@pytest.mark.parametrize("key", ["0", "nonsense", "01a20063-1614-7366-bffc-9410caa63bce", "_5F"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_not_there_is_a_404(world: World, model: str, key: str) -> None:
    client = browser("superuser")
    for action in ("change", *{"run": ("resume", "cancel"), "approval": ("approve", "deny")}[model]):
        target = reverse(f"admin:agentruns_{model}_{action}", args=[key])
        assert client.get(target).status_code == 404
        if action != "change":
            assert client.post(target, {"digest": "x", "reason": "x", "seq": 1}).status_code == 404


@pytest.mark.parametrize("seq", ["0", "9999", str(2**63 - 1), str(2**63), str(10**30)])
def test_a_row_that_is_not_there_is_a_404(world: World, seq: str) -> None:
    run = world.queued()
    target = url(run, "row", 1).replace("/rows/1/", f"/rows/{seq}/")
    assert browser("superuser").get(target).status_code == 404


def test_another_runs_row_is_not_shown_under_this_one(world: World) -> None:
    run, other = world.completed(), world.waiting("other").run
    last = run.messages.order_by("-seq").first().seq
    assert not other.messages.filter(seq=last).exists()
    assert browser("superuser").get(url(other, "row", last)).status_code == 404


def test_no_permission_to_write_is_ever_granted() -> None:
    request = RequestFactory().get("/")
    request.user = user_like()
    for model in (Run, Approval):
        model_admin = admin.site.get_model_admin(model)
        assert model_admin.get_model_perms(request) == {
            "add": False, "change": False, "delete": False, "view": True,
        }  # fmt: skip
        assert set(model_admin.get_actions(request)) <= {
            "approve_selected", "deny_selected", "resume_selected", "pause_selected", "cancel_selected",
        }  # fmt: skip


def user_like() -> object:
    class Superuser:
        is_active = is_authenticated = is_staff = is_superuser = True

        def has_perm(self, name: str) -> bool:
            return True

        def has_module_perms(self, label: str) -> bool:
            return True

    return Superuser()
