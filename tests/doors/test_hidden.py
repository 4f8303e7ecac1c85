"""What a policy hides is nowhere: no row, title, filter, figure, search, warning or e-mail tells of it."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core import mail
from django.db import connection
from django.db.models.functions import Now

from agentruns import Agent, Policy, approve, cancel_run, fork_run, run_agent, send_message, start_run, tool
from agentruns.exceptions import DurableRunNotFoundError, NotFoundError, RunStateError
from agentruns.models import Approval, Message, Notification, Run, triggers
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.pages import read, url
from tests.admin.world import dying
from tests.api.http import Api, make_user
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "BobMiller"
GATED = {"tools": [call("refund", cents=5000)]}


class HidesHr(Policy):
    """Runs of the agent "hr" are there for superusers only."""

    def visible(self, user: Any, runs: Any) -> Any:
        seen = super().visible(user, runs)
        return seen if user.is_superuser else seen.exclude(agent="hr")


def chat(name: str, *turns: Any, **options: Any) -> Agent:
    model = ScriptedModel([*turns, *[{"text": "one"}] * 5])
    given = {"instructions": "Serve.", "tools": TOOLS, "starters": "anyone", **options}
    return Agent(name, model=model, **given)


def text_of(user: Any, path: str, form: Any = None, status: int = 200) -> str:
    """Read a page of the console, or send a form to it."""
    client = Api(user).client
    page: Any = client.get(path) if form is None else client.post(path, form)
    assert page.status_code == status, path
    return str(page.getvalue().decode())


def boss() -> Any:
    return User.objects.filter(username="boss").first() or User.objects.create_superuser("boss")


@pytest.fixture
def mixed(settings: Any) -> tuple[Any, Run, Run]:
    """A session whose first run is hidden from whoever may see all others, and that reader."""
    settings.AGENTRUNS_POLICY = f"{__name__}.HidesHr"
    chat("hr", {"text": f"{NAME} is fired."})
    chat("chat")
    ann = make_user("ann")
    hidden = run_agent("hr", f"Fire {NAME}", "s1", actor=ann)
    seen = run_agent("chat", "hello", "s1", actor=ann)
    reader = make_user("reader", "view_run", "fork_run", "start_run", is_staff=True)
    assert Api(reader).get(f"/runs/{hidden.run_id}")[0] == 404
    return reader, *(Run.objects.get(pk=one.run_id) for one in (hidden, seen))


def test_the_title_is_not_that_of_a_hidden_run(mixed: Any) -> None:
    reader, _hidden, _seen = mixed
    run_agent("chat", "a title", "s2", owner=reader)
    for path in ("/sessions", "/sessions/s1"):
        assert NAME not in str(Api(reader).get(path))
        assert NAME in str(Api(boss()).get(path)), "who may see it"
        assert "a title" in str(Api(reader).get(path.replace("s1", "s2")))


def test_the_console_reads_no_rows_of_a_hidden_run(mixed: Any) -> None:
    reader, hidden, seen = mixed
    for door in ("export", "at", "replay"):
        path, form = f"/admin/agentruns/run/{seen.pk}/{door}/", None if door == "at" else {"who": "code"}
        shown = text_of(reader, path, form, 403)
        assert (NAME in shown, str(hidden.pk) in shown) == (False, False)
        assert (NAME in text_of(boss(), path, form)) is (door != "replay")
    with triggers.lifted(connection):
        Message.objects.filter(run=hidden, seq=2).update(hash="0" * 64)
    for user, is_shown in ((reader, False), (boss(), True)):
        text = text_of(user, f"/admin/agentruns/run/{seen.pk}/verify/", {})
        assert (f"{hidden.pk}/rows/2/" in text) is is_shown, "nor is a damaged row linked"


def test_a_fork_copies_no_rows_of_a_hidden_run(mixed: Any) -> None:
    reader, hidden, seen = mixed
    last = seen.messages.latest("seq").seq
    status, problem = Api(reader).post(f"/runs/{seen.pk}/fork", {"at": last, "text": "and?"})
    assert (status, problem["type"]) == (403, "urn:agentruns:permission-denied")
    assert str(hidden.pk) not in str(problem)
    assert Api(boss()).post(f"/runs/{seen.pk}/fork", {"at": last, "text": "and?"})[0] == 201


def test_rows_before_the_hidden_ones_may_be_read(mixed: Any) -> None:
    reader, _hidden, _seen = mixed
    first = run_agent("chat", "good day", "s3", actor=reader)
    run_agent("hr", f"Fire {NAME}", "s3", actor=reader)
    status, fork = Api(reader).post(f"/runs/{first.run_id}/fork", {"at": 2, "text": "and?"})
    assert status == 201
    assert NAME not in str(Api(reader).get(f"/runs/{fork['id']}/messages"))
    assert text_of(reader, f"/admin/agentruns/run/{first.run_id}/at/?seq=2")


@tool
def fails(note: str) -> str:
    """Fail, and leave a doubt."""
    raise RuntimeError(f"{note} is not there")


def test_the_page_of_a_run_lists_no_doubt_of_a_hidden_one(mixed: Any) -> None:
    reader, _hidden, _seen = mixed
    chat("hr", {"tools": [{"name": "fails", "input": {"note": NAME}}]}, tools=[fails], version="2")
    hidden = run_agent("hr", "x", "s4", actor=reader)
    seen = run_agent("chat", "hello", "s4", actor=reader)
    for user, shown in ((reader, False), (boss(), True)):
        text = text_of(user, f"/admin/agentruns/run/{seen.run_id}/change/")
        assert (str(hidden.run_id) in text) is shown


def test_the_key_of_a_message_does_not_tell_of_a_hidden_run(settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.HidesHr"
    chat("hr", GATED)
    chat("chat")
    ann, reader = make_user("ann"), make_user("reader", "view_run", "start_run")
    hidden = run_agent("hr", f"Fire {NAME}", "s1", actor=ann).run_id
    send_message("s1", "and Eve", owner=ann, idempotency_key="m1")
    cancel_run(hidden)
    chat("chat", GATED, version="2")
    run_agent("chat", "hello", "s1", actor=ann)
    for text, refusal in (("and Eve", 404), ("another text", 409)):
        sent = {"content": text, "idempotency_key": "m1"}
        status, answer = Api(reader).post("/sessions/s1/messages", sent)
        assert (status, "you may not see" in str(answer)) == (refusal, True)
        assert str(hidden) not in str(answer)
        assert NAME not in str(answer)


def test_a_key_does_not_tell_of_a_hidden_run_in_another_session(mixed: Any) -> None:
    reader, hidden, seen = mixed
    ann = type(reader).objects.get(username=hidden.owner_name)
    other = start_run("hr", "Fire Carl", "s2", owner=ann, idempotency_key="payroll")
    body, first = {"idempotency_key": "payroll"}, seen.messages.earliest("seq").seq
    for who, path, more in (
        (reader, "/sessions/s1/messages", {"content": "x"}),
        (ann, "/runs", {"agent": "chat", "input": "x"}),
        (ann, f"/runs/{seen.pk}/fork", {"at": first}),
    ):
        status, answer = Api(who).post(path, {**more, **body})
        assert status in (403, 409), path
        for secret in (str(other.pk), "hr", "s2", "queued"):
            assert secret not in str(answer), answer


def test_the_program_is_told_of_every_run(mixed: Any) -> None:
    _reader, hidden, seen = mixed
    other = start_run("hr", "Fire Carl", "s2", idempotency_key="payroll")
    with pytest.raises(RunStateError, match=str(other.pk)):
        start_run("chat", "x", "s2", idempotency_key="payroll")
    owner = User.objects.get(username=hidden.owner_name)
    assert fork_run(seen.pk, seen.messages.latest("seq").seq, text="and?", owner=owner)


def test_refusals_do_not_name_a_hidden_open_run(settings: Any) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.HidesHr"
    chat("hr", GATED)
    chat("chat")
    ann = make_user("ann")
    run_agent("chat", "hello", "s1", actor=ann)
    hidden = run_agent("hr", "Fire", "s1", actor=ann).run_id
    for agent in ("chat", "hr"):
        said, asked = {"content": "x"}, {"input": "x", "session": "s1"}
        for path, body in (("/sessions/s1/messages", said), ("/runs", asked)):
            status, problem = Api(ann).post(path, {"agent": agent, **body})
            assert (status, problem["type"]) == (409, "urn:agentruns:session-busy")
            assert str(hidden) not in str(problem)
            assert "run_id" not in problem
    assert Message.objects.filter(run=hidden, kind="user").count() == 1, "nothing was said in it"


APPROVALS, RUNS = "/admin/agentruns/approval/", "/admin/agentruns/run/"


class Tenants(Policy):
    """A tenant is the beginning of a name; every permission ends at its border."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(owner_name__startswith=user.get_username().partition("-")[0])


def staff(name: str) -> User:
    made: User = make_user(name, is_staff=True, email=f"{name}@example.org")
    made.user_permissions.set(Permission.objects.filter(content_type__app_label="agentruns"))
    return made


class Broken(Policy):
    def visible(self, user: Any, runs: Any) -> Any:
        """Fail."""
        raise LookupError("no such tenant")


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
    client = Api(staff("bolt-bob")).client
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
    assert "acme-agent" in read(Api(User.objects.get(username="acme-ann")).client.get(RUNS)).text


def test_figures_and_counts(acme: Approval) -> None:
    about = {"event": "run.paused", "run_id": acme.run_id, "notifier": "x", "attempts": 10}
    Notification.objects.create(created_at=Now(), **about)
    bob = Api(staff("bolt-bob")).client
    text = " ".join(read(bob.get("/admin/")).text.split())
    assert "acme" not in text
    for label in ("waiting for you", "in doubt"):
        assert f"0 {label}" in text, text
    assert "waiting for a decision" not in text, "it stands there where it is more"
    assert "given up" not in text
    assert "a call is in doubt" not in read(bob.get(APPROVALS)).text
    assert Api(User.objects.get(username="bolt-bob")).get("/runs")[1]["items"] == []
    ann = Api(User.objects.get(username="acme-ann")).client
    assert "1 waiting for you" in " ".join(read(ann.get("/admin/")).text.split())


def test_cards_warn_of_what_may_be_seen_only(acme: Approval) -> None:
    """The same call, by digest, and calls of a tool of the same name in doubt, of another tenant."""
    twin = _story("bolt")
    ann = Api(User.objects.get(username="acme-ann")).client
    Approval.objects.filter(run__agent="bolt-agent").update(digest=acme.digest, tool_name="acme_pay")
    text = read(ann.get(url(acme))).text
    assert "bolt" not in text
    assert "another session" in text, "its own"
    assert text.count("1 approved") == 1
    assert ann.get(url(twin)).status_code == 404
    assert ann.get(f"{APPROVALS}turn/{twin.run_id}/").status_code == 302


def test_a_service_hides_it_too_and_a_policy_that_fails_shows_nothing_and_says_so(
    acme: Approval, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bob, ann = staff("bolt-bob"), User.objects.get(username="acme-ann")
    with pytest.raises(NotFoundError, match="There is no approval"):
        approve(acme.pk, bob)
    with pytest.raises(DurableRunNotFoundError, match="There is no run"):
        cancel_run(acme.run_id, bob)
    assert Run.objects.get(pk=acme.run_id).status == "awaiting-approval"
    settings.AGENTRUNS_POLICY = f"{__name__}.Broken"
    assert Api(ann).get("/runs") == (200, {"items": [], "next": None})
    assert Api(ann).client.get(url(acme)).status_code == 404
    assert "AGENTRUNS_POLICY failed in visible()" in caplog.text


def test_mail_goes_to_users_who_may_see_it(settings: Any, effects: Effects) -> None:
    settings.AGENTRUNS_POLICY = f"{__name__}.Tenants"
    settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]
    staff("bolt-bob")
    settings.AGENTRUNS_NOTIFY_EMAILS = ["Bolt-Bob@example.org", "acme-ann@example.org", "desk@example.org"]
    _story("acme")
    sweep()
    told = {address for message in mail.outbox for address in message.to}
    assert told == {"acme-ann@example.org", "desk@example.org"}
