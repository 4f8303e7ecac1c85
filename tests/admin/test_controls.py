"""Pause, Adopt and Verify chain: whose clicks count, and what is said of a journal that was altered."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.utils import timezone

from agentruns import approve
from agentruns.engine.leases import Lease, claim
from agentruns.engine.loop import drive_run
from agentruns.engine.worker import agent_for
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session, triggers
from agentruns.services.control import cancel_run
from agentruns.services.sweep import sweep
from tests.admin.pages import page, read, snapshot, url
from tests.admin.people import browser, user
from tests.admin.world import World, drifted, seen, status
from tests.effects import Effects
from tests.rows import change

pytestmark = pytest.mark.django_db(transaction=True)

EVERY = ["view_run", "pause_run", "adopt_definition", "resume_run", "cancel_run"]
PEOPLE: dict[str, tuple[list[str], dict[str, int]]] = {
    "superuser": ([], {"verify": 200, "adopt": 302, "pause": 302}),
    "reader": (["view_run"], {"verify": 200, "adopt": 403, "pause": 403}),
    "pauser": (["view_run", "pause_run"], {"verify": 200, "adopt": 403, "pause": 302}),
    "adopter": (["view_run", "adopt_definition"], {"verify": 200, "adopt": 302, "pause": 403}),
    "blind": (["pause_run", "adopt_definition"], {"verify": 403, "adopt": 403, "pause": 403}),
    "customer": (EVERY, {}),  # not staff
    "anonymous": ([], {}),
}
LOGIN = 302


def somebody(name: str) -> Client:
    """Somebody with the permissions of that name, logged in."""
    codenames, _allowed = PEOPLE[name]
    if not codenames:
        return browser(name)
    made = get_user_model().objects.create_user(name, is_staff=name != "customer")
    made.user_permissions.set(
        Permission.objects.filter(content_type__app_label="agentruns", codename__in=codenames)
    )
    client = Client()
    client.force_login(made)
    return client


def press(run: Run, action: str, **data: Any) -> Any:
    return browser("superuser").post(url(run, action), {"reason": "at night", **data}, follow=True)


@pytest.mark.parametrize("name", PEOPLE)
def test_whose_clicks_count(world: World, name: str) -> None:
    run, client = drifted(world), somebody(name)
    _codenames, allowed = PEOPLE[name]
    before = snapshot()
    for action in ("verify", "adopt", "pause"):
        if allowed.get("verify") == 200:
            assert client.get(url(run, action)).url == url(run)
        response = client.post(url(run, action), {**seen(run), "reason": "at night"})
        assert response.status_code == allowed.get(action, LOGIN), action
        if not allowed:
            assert response.url.startswith("/admin/login/")
        changed = action != "verify" and allowed.get(action) == 302
        assert (snapshot() != before) == changed, action
        if changed:
            row = run.messages.latest("seq")
            assert (row.payload["actor"]["name"], row.payload["reason"]) == (name, "at night")
            assert LogEntry.objects.get().object_id == str(run.pk)
            LogEntry.objects.all().delete()
        assert LogEntry.objects.count() == 0
        before = snapshot()
    assert status(run) == ("paused" if allowed.get("pause") == 302 else "queued")


def test_requests_without_a_token_are_refused_and_an_ended_run_stays_as_it_is(world: World) -> None:
    run, done = drifted(world), world.completed()
    before = snapshot()
    strict = browser("superuser", enforce_csrf_checks=True)
    for action in ("verify", "adopt", "pause"):
        assert strict.post(url(run, action), seen(run)).status_code == 403
    for action in ("adopt", "pause"):
        response = press(done, action, hash="0" * 64, seq=done.messages.latest("seq").seq)
        assert response.status_code == 409
        assert "Nothing was changed. It has ended: completed." in read(response).text
    assert press(done, "pause", reason="x" * 2001).status_code == 409
    assert not {url(done, verb) for verb in ("resume", "pause", "cancel")} & set(page(done).forms)
    assert snapshot() == before


def test_the_requester_may_pause_what_they_see(world: World) -> None:
    run = world.waiting(actor=user("viewer")).run
    assert "People can still decide meanwhile." in page(run, "viewer").text
    assert browser("viewer").post(url(run, "pause"), {}).status_code == 302
    assert status(run) == "paused"


def test_a_pause_waits_for_the_worker_and_ends_with_resume(world: World, effects: Effects) -> None:
    run = world.queued()
    lease = claim("default", run.pk)
    assert isinstance(lease, Lease)
    assert "The worker pauses it before its next tool starts." in page(run).text
    shown = read(press(run, "pause"))
    assert "Pause requested. The worker pauses it before its next tool starts." in shown.text
    assert "superuser asked" in shown.text
    assert "It is being paused." in shown.text
    before = snapshot()
    assert press(run, "pause").status_code == 409
    assert snapshot() == before
    run.refresh_from_db()
    drive_run(run, agent_for(run, "default"), lease)
    assert (status(run), effects.count()) == ("paused", 0)
    assert "It is paused already." in page(run).text
    assert press(run, "pause").status_code == 409
    press(run, "resume", seq=run.messages.latest("seq").seq)
    assert url(run, "pause") in page(run).forms
    assert "Paused. It goes on when somebody resumes it." in read(press(run, "pause")).text
    cancel_run(run.pk, None)
    assert press(run, "pause").status_code == 409


def test_a_stalled_run_says_when_its_worker_was_last_heard(world: World) -> None:
    run = world.queued()
    assert claim("default", run.pk)
    assert "stalled" not in page(run).text
    over = timezone.now() - timedelta(minutes=6, seconds=30)
    Run.objects.filter(pk=run.pk).update(lease_expires_at=over)  # a lease is a minute
    shown = page(run)
    assert "stalled Its worker has fallen silent." in " ".join(shown.text.split())
    assert "(7\xa0minutes ago)" in shown.text.split("Worker last heard")[1]


def test_what_is_intact_says_up_to_which_head(world: World) -> None:
    approval = world.waiting()
    approve(approval.pk, user("superuser"))
    sweep()
    run = approval.run
    session, before = Session.objects.get(pk=run.session_id), snapshot()
    shown = read(press(run, "verify"))
    rows = run.messages.count()
    assert f"The journal of this session is intact: all {rows} rows" in shown.text
    assert f"Headrow {rows}" in "".join(shown.text.split("\n")).replace("  ", "")
    assert session.head in shown.text
    assert timezone.localtime().strftime("%Y-%m-%d %H:%M") in shown.text.split("Checked")[1]
    assert (snapshot(), LogEntry.objects.count()) == (before, 0)
    Run.objects.filter(pk=run.pk).update(step=99)
    shown = read(press(run, "verify"))
    assert "The journal itself is intact, but runs or approvals are not shown as it says:" in shown.text
    assert "step is '99', the journal says '2'." in shown.text


def test_an_altered_row_is_named_with_a_way_to_it(world: World) -> None:
    run = world.completed()
    row = run.messages.get(kind="tool_result")
    with triggers.lifted(connection):
        change(row, content="nothing\u202e happened")
    response = press(run, "verify")
    shown = read(response)
    assert response.status_code == 200
    assert f"seq {row.seq} (tool_result) was altered." in shown.text
    assert url(run, "row", row.seq) in shown.links
    assert read(browser("superuser").get(url(run))).text.count("was altered") == 0, "only who asks is told"


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_the_page_opens_when_the_journal_cannot_be_read(world: World, text: str) -> None:
    run = world.orphaned()
    seq = run.messages.get(kind="orphan_found").seq
    with triggers.lifted(connection), connection.cursor() as cursor:
        cursor.execute("UPDATE agentruns_message SET facts = %s WHERE seq = %s", [text, seq])
    client, before = browser("superuser"), snapshot_of_columns()
    assert "post it" in page(run).text, "the task"
    assert "Its journal cannot be read." in page(run).text
    shown = read(client.post(url(run, "verify")))
    assert f"seq {seq} (orphan_found) was altered." in shown.text
    assert url(run, "row", seq) in shown.links
    row = client.get(url(run, "row", seq))
    assert row.status_code == 200
    assert "orphan_found" in row.content.decode()
    for action in ("resume", "pause", "cancel"):
        response = press(run, action, seq=run.messages.order_by("-seq").values_list("seq", flat=True)[0])
        assert response.status_code == 409, action
    assert snapshot_of_columns() == before
    assert problems(run.session_id) == [f"Session orphaned: seq {seq} (orphan_found) was altered."]


def snapshot_of_columns() -> Any:
    """What a page could have changed, without what cannot be read."""
    rows = Message.objects.order_by("pk").values_list("pk", "seq", "hash")
    return list(rows), list(Run.objects.order_by("pk").values())
