"""The link of a mail: a page for one person, which only a press decides, and which anything makes void."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import django
import pytest
import time_machine
from django.contrib.auth import get_user_model
from django.contrib.sessions.models import Session
from django.core import mail
from django.test import Client
from django.urls import path
from django.utils import timezone

from agentruns import Policy, RunResult, ToolContext, approve, deny, run_agent, tool
from agentruns.checks.settings import check_notifiers
from agentruns.models import Approval, Message, Notification
from agentruns.services.approvals import links
from agentruns.services.approvals.decisions import extend
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.db.helpers import the_run
from tests.effects import Effects
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

RIGHT_TO_LEFT = "محمد"
LINK = re.compile(r"Decide without signing in, once: https://shop\.example(/decide/\S+/)\n")
urlpatterns: list[Any] = [path("nothing/", lambda request: None)]


class Lenient(Policy):
    """Lets everything be decided by a link."""

    def without_console(self, approval: Approval, channel: str) -> bool:
        return channel == "mail"


class Own(Policy):
    """Shows people their own runs."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(owner_id=user.pk)


@pytest.fixture(autouse=True)
def _letters(settings: Any) -> None:
    if django.VERSION >= (6, 1):
        settings.MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
    settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]
    get_user_model().objects.filter(pk=user("decider").pk).update(email="decider@shop.example")
    settings.AGENTRUNS_BASE_URL = "https://shop.example"
    settings.AGENTRUNS_MAIL_LINK_SECONDS = 3600


def refund(ctx: ToolContext, cents: int, to: str = "Ada", iban: str = "DE02-secret") -> str:
    """Refund, if somebody says so."""
    return act("refund", ctx, cents=cents)


def titled(args: dict[str, Any]) -> str:
    return f"Refund {args['cents'] / 100:.2f} to {args['to']}"


def asks(name: str, to: str = "Ada", **options: Any) -> tuple[RunResult, str]:
    """Let an agent ask for a refund; return its run and the link of the mail about it, "" without one."""
    made = tool(**{"requires_approval": True, "describe": titled, "sensitive": ["iban"], **options})(refund)
    agent = shop_agent(f"link-{name}", {"tools": [call("refund", cents=4200, to=to)]}, tools=[made])
    text = f"refund the lamp of {to}"
    result = run_agent(agent, text, f"link-{name}", actor=user("superuser"), idempotency_key=name)
    found = LINK.search(mail.outbox[-1].body)
    return result, found[1] if found else ""


def press(link: str, verb: str = "approve", reason: str = "") -> Any:
    """Open the page as somebody who is signed in nowhere, and press a button of it."""
    client = Client(enforce_csrf_checks=True)
    page = client.get(link)
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.content.decode())
    form = {"verb": verb, "reason": reason, "csrfmiddlewaretoken": token[1] if token else ""}
    return client.post(link, form)


def decided(result: RunResult) -> list[dict[str, Any]]:
    rows = Message.objects.filter(run_id=result.run_id, kind="approval_decided").order_by("seq")
    return [row.payload for row in rows]


def test_a_press_on_the_page_approves_and_the_run_goes_on(effects: Effects) -> None:
    result, link = asks("approved")
    page = Client().get(link)
    text = page.content.decode()
    for words in ("Refund 42.00 to Ada", "normal risk", "refund the lamp of Ada", "You decide as decider."):
        assert words in text
    assert "DE02-secret" not in text
    assert "***" in text
    assert press(link).status_code == 302
    (row,) = decided(result)
    assert (row["verb"], row["channel"], row["actor"]["name"]) == ("approve", "mail", "decider")
    sweep()
    assert the_run(result).status == "completed"
    assert effects.count() == 1
    assert "Approved by decider" in Client().get(link).content.decode()
    assert press(link, "deny", "after all").status_code in (403, 409)
    assert len(decided(result)) == 1


def test_a_denial_needs_a_reason(effects: Effects) -> None:
    result, link = asks("denied")
    page = press(link, "deny")
    assert page.status_code == 409
    assert "A denial needs a reason" in page.content.decode()
    assert decided(result) == []
    assert press(link, "deny", "not twice").status_code == 302
    assert decided(result)[0]["reason"] == "not twice"
    sweep()
    assert effects.count() == 0


def test_a_press_of_no_known_button_decides_nothing() -> None:
    result, link = asks("unknown-verb")
    assert press(link, "", "a reason").status_code == press(link, "resolve", "a reason").status_code == 200
    assert decided(result) == []


def test_a_program_that_follows_links_decides_nothing(effects: Effects) -> None:
    result, link = asks("scanned")
    scanner = Client(enforce_csrf_checks=True, headers={"Purpose": "prefetch"})
    before = Message.objects.count()
    for _ in range(3):
        assert scanner.get(link).status_code == 200
        assert scanner.head(link).status_code == 200
        assert scanner.get(f"{link}?verb=approve").status_code == 200
    for method in ("put", "patch", "delete", "options", "trace"):
        assert getattr(scanner, method)(link).status_code in (403, 405)
    assert Client(enforce_csrf_checks=True).post(link, {"verb": "approve"}).status_code == 403, (
        "no CSRF token"
    )
    assert decided(result) == []
    assert Message.objects.count() == before
    assert Session.objects.count() == 0, "no session begins"
    assert press(link).status_code == 302, "and the link is not used up"


def test_the_page_tells_nobody_its_address_and_loads_nothing_from_elsewhere() -> None:
    _result, link = asks("headers")
    for page in (Client().get(link), Client().get("/decide/forged/")):
        assert page["Referrer-Policy"] == "strict-origin"
        assert "no-store" in page["Cache-Control"]
        assert page["Content-Security-Policy"].startswith("default-src 'none'; style-src 'self';")
        text = page.content.decode()
        assert not re.findall(r"<script|<style|\sstyle=|https?://|\son\w+=", text)
        assert {*re.findall(r'<link rel="stylesheet" href="(/static/)', text)} == {"/static/"}


CHANGES: dict[str, Any] = {
    "denied": lambda card, one: deny(card.pk, user("superuser"), "no"),
    "edited": lambda card, one: approve(card.pk, user("superuser"), arguments={"cents": 1}),
    "extended": lambda card, one: extend(card.pk, user("superuser"), timedelta(hours=1)),
    "half approved": lambda card, one: approve(card.pk, user("superuser")),
    "deactivated": lambda card, one: get_user_model().objects.filter(pk=one.pk).update(is_active=False),
    "password": lambda card, one: (one.set_password("other"), one.save()),
    "permission": lambda card, one: one.user_permissions.clear(),
    "deleted": lambda card, one: one.delete(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_makes_a_link_void(change: str, settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Lenient"
    options = {"approvals": 2} if change == "half approved" else {}
    result, link = asks(change, expires_in=timedelta(hours=2), **options)
    assert Client().get(link).status_code == 200
    CHANGES[change](result.pending[0], user("decider"))
    before = len(decided(result))
    assert press(link).status_code in (403, 409, 410)
    assert len(decided(result)) == before
    page = Client().get(link).content.decode()
    assert "<form" not in page
    if change in ("deactivated", "password", "permission", "deleted"):
        assert "Refund" not in page


def test_a_link_ends_in_time_and_is_for_one_approval_and_channel(settings: Any) -> None:
    result, link = asks("timed")
    card = result.pending[0]
    slacks = links.sign(card, links.SLACK)
    for forged in ("x", slacks, link.split("/")[2][:-1], link.split("/")[2].swapcase()):
        assert Client().get(f"/decide/{forged}/").status_code == 410
    with time_machine.travel(timezone.now() + timedelta(seconds=3700)):
        assert Client().get(link).status_code == 410
    settings.AGENTRUNS_MAIL_LINK_SECONDS = None
    assert Client().get(link).status_code == 404
    assert decided(result) == []


def test_another_scope_sees_nothing(settings: Any) -> None:
    result, link = asks("scoped")
    settings.AGENTRUNS_POLICY = f"{__name__}.Own"
    page = press(link)
    assert page.status_code in (403, 410)
    assert "Refund" not in Client().get(link).content.decode()
    assert decided(result) == []


def test_what_the_console_alone_decides_has_no_link_and_opens_there(settings: Any) -> None:
    for name, options in {"high": {"risk": "high"}, "two": {"approvals": 2}}.items():
        assert asks(name, **options)[1] == ""
    settings.AGENTRUNS_POLICY = f"{__name__}.Lenient"
    result, link = asks("high allowed", risk="high")
    assert Client().get(link).status_code == 200
    settings.AGENTRUNS_POLICY = "agentruns.Policy"
    assert press(link).status_code in (403, 409)
    page = Client().get(link).content.decode()
    assert f'href="/admin/agentruns/approval/{result.pending[0].pk}/change/"' in page
    assert "<form" not in page
    settings.AGENTRUNS_POLICY, settings.AGENTRUNS_REAUTH_SECONDS = f"{__name__}.Lenient", 60
    assert "<form" not in Client().get(link).content.decode(), "the console asks for the password"
    assert decided(result) == []


def test_who_may_not_decide_gets_no_link(settings: Any) -> None:
    card = asks("for whom")[0].pending[0]
    assert links.mail_url(card, user("decider"))
    assert [links.mail_url(card, user(who)) for who in ("viewer", "staff")] == ["", ""]
    settings.AGENTRUNS_REQUESTER_MAY_APPROVE = False
    assert links.mail_url(card, user("superuser")) == ""
    settings.AGENTRUNS_MAIL_LINK_SECONDS = None
    assert asks("switched off")[1] == ""
    settings.AGENTRUNS_MAIL_LINK_SECONDS, settings.AGENTRUNS_NOTIFY_EMAILS = 60, ["all@shop.example"]
    assert asks("for a list")[1] == "", "a list is nobody in particular"


def test_a_reminder_changes_nothing_and_brings_a_link_of_its_own(effects: Effects) -> None:
    result, link = asks("reminded", remind_after=timedelta(microseconds=1))
    sweep()
    assert mail.outbox[-1].subject.startswith("[agentruns] Approval still needed")
    assert LINK.search(mail.outbox[-1].body)
    assert press(link).status_code == 302
    sweep()
    assert effects.count() == 1
    assert len(decided(result)) == 1


def test_a_project_that_requires_a_login_everywhere_lets_the_page_in(settings: Any) -> None:
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    result, link = asks("behind a login")
    assert press(link).status_code == 302
    assert len(decided(result)) == 1
    assert Client().post("/slack/").status_code == 404, "it is not set up, which is no login page"


def test_the_page_isolates_and_escapes_what_others_wrote() -> None:
    _result, link = asks("hostile", to=f"<script>alert(1)</script> {RIGHT_TO_LEFT}")
    text = Client().get(link).content.decode()
    assert "<script" not in text
    assert f"<bdi>Refund 42.00 to &lt;script&gt;alert(1)&lt;/script&gt; {RIGHT_TO_LEFT}</bdi>" in text


def test_a_check_names_what_the_links_need(settings: Any) -> None:
    assert check_notifiers(None) == []
    settings.AGENTRUNS_BASE_URL = ""
    (error,) = check_notifiers(None)
    assert (error.id, "needs AGENTRUNS_BASE_URL" in error.msg) == ("agentruns.E031", True)
    settings.AGENTRUNS_BASE_URL = "https://shop.example"
    settings.ROOT_URLCONF = __name__
    (error,) = check_notifiers(None)
    assert "agentruns.admin.links" in error.hint
    assert asks("without urls")[1] == ""
    assert Notification.objects.filter(sent_at=None).count() == 0
