"""What a policy hides is nowhere: no filter, figure, search, warning, precedent or e-mail tells of it."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core import mail
from django.db.models.functions import Now
from django.test import Client

from agentruns import Policy, approve, cancel_run, run_agent, tool
from agentruns.exceptions import DurableRunNotFoundError, NotFoundError
from agentruns.models import Approval, Notification, Run
from agentruns.services.sweep import sweep
from tests.admin.pages import read, url
from tests.admin.world import dying
from tests.api.http import Api
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

APPROVALS, RUNS = "/admin/agentruns/approval/", "/admin/agentruns/run/"


class Tenants(Policy):
    """A tenant is the beginning of a name; every permission ends at its border."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(owner_name__startswith=user.get_username().partition("-")[0])


class Broken(Policy):
    def visible(self, user: Any, runs: Any) -> Any:
        """Fail."""
        raise LookupError("no such tenant")


def staff(name: str) -> User:
    made = User.objects.create_user(name, is_staff=True, email=f"{name}@example.org")
    made.user_permissions.set(Permission.objects.filter(content_type__app_label="agentruns"))
    return User.objects.get(pk=made.pk)


def browser(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def acme(settings: Any, effects: Effects) -> Approval:
    """A run of acme that waits, one that is in doubt, and one that was approved and is done."""
    settings.AGENTRUNS_POLICY = f"{__name__}.Tenants"
    return _story("acme")


def _story(tenant: str) -> Approval:
    @tool(name=f"{tenant}_pay", requires_approval=True)
    def pay(cents: int) -> str:
        """Pay."""
        return "paid"

    ann = staff(f"{tenant}-ann")
    turn = {"tools": [call(f"{tenant}_pay", cents=5)]}
    agent = shop_agent(f"{tenant}-agent", turn, tools=[pay])
    done = run_agent(agent, "pay", f"{tenant}-1", actor=ann)
    approve(done.pending[0].pk, ann)
    sweep()
    doubtful = shop_agent(f"{tenant}-doubt", {"tools": [call("dies")]}, tools=[dying()])
    run_agent(doubtful, "go", f"{tenant}-2", actor=ann)
    waiting = run_agent(agent, "pay", f"{tenant}-3", actor=ann)
    return waiting.pending[0]


def test_lists_filters_and_searches(acme: Approval) -> None:
    client = browser(staff("bolt-bob"))
    for path in (RUNS, APPROVALS, APPROVALS + "?status=all"):
        sign = "&" if "?" in path else "?"
        assert "acme" not in read(client.get(path)).text
        for query in (
            f"q={acme.run_id}", "q=acme", "agent=acme-agent", "tool=acme_pay", "mine=yes", "status=orphaned",
            f"id__exact={acme.pk}",
        ):  # fmt: skip
            answer = client.get(f"{path}{sign}{query}", follow=True)
            text = answer.content.decode()
            assert "acme-3" not in text, query
            assert "acme_pay" in query or "acme_pay" not in text, query
            assert "agent" in query or "acme-agent" not in text, query
    assert "acme-agent" in read(browser(User.objects.get(username="acme-ann")).get(RUNS)).text


def test_figures_and_counts(acme: Approval) -> None:
    about = {"event": "run.paused", "run_id": acme.run_id, "notifier": "x", "attempts": 10}
    Notification.objects.create(created_at=Now(), **about)
    bob = browser(staff("bolt-bob"))
    text = " ".join(read(bob.get("/admin/")).text.split())
    assert "acme" not in text
    for label in ("waiting for you", "in doubt"):
        assert f"0 {label}" in text, text
    assert "waiting for a decision" not in text, "it stands there where it is more"
    assert "given up" not in text
    assert "a call is in doubt" not in read(bob.get(APPROVALS)).text
    assert Api(User.objects.get(username="bolt-bob")).get("/runs")[1]["items"] == []
    assert "1 waiting for you" in " ".join(
        read(browser(User.objects.get(username="acme-ann")).get("/admin/")).text.split()
    )


def test_cards_warn_of_what_may_be_seen_only(acme: Approval) -> None:
    """The same call, by digest, and calls of a tool of the same name in doubt, of another tenant."""
    twin = _story("bolt")
    ann = browser(User.objects.get(username="acme-ann"))
    Approval.objects.filter(run__agent="bolt-agent").update(digest=acme.digest, tool_name="acme_pay")
    text = read(ann.get(url(acme))).text
    assert "bolt" not in text
    assert "another session" in text, "its own"
    assert text.count("1 approved") == 1
    assert ann.get(url(twin)).status_code == 404
    assert ann.get(f"{APPROVALS}turn/{twin.run_id}/").status_code == 302


def test_a_service_called_by_the_project_itself_hides_it_too(acme: Approval) -> None:
    bob = staff("bolt-bob")
    with pytest.raises(NotFoundError, match="There is no approval"):
        approve(acme.pk, bob)
    with pytest.raises(DurableRunNotFoundError, match="There is no run"):
        cancel_run(acme.run_id, bob)
    assert Run.objects.get(pk=acme.run_id).status == "awaiting-approval"


def test_a_policy_that_fails_shows_nothing_and_says_so(
    acme: Approval, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Broken"
    ann = User.objects.get(username="acme-ann")
    assert Api(ann).get("/runs") == (200, {"items": [], "next": None})
    assert browser(ann).get(url(acme)).status_code == 404
    assert "AGENTRUNS_POLICY failed in visible()" in caplog.text


def test_mail_goes_to_users_who_may_see_it(settings: Any, effects: Effects) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Tenants"
    settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]
    staff("bolt-bob")
    settings.AGENTRUNS_NOTIFY_EMAILS = ["Bolt-Bob@example.org", "acme-ann@example.org", "desk@example.org"]
    _story("acme")
    sweep()
    assert mail.outbox
    assert {address for message in mail.outbox for address in message.to} == {
        "acme-ann@example.org",
        "desk@example.org",
    }
