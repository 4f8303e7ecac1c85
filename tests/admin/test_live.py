"""What an open page asks for: the page anew or what is new in a list, next to nothing if nothing is.

And that every page writes times in its reader's zone.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.urls import reverse
from django.utils import timezone

from agentruns import approve
from agentruns.engine.leases import claim
from agentruns.models import Run
from agentruns.services.sweep import sweep
from agentruns.utils.ids import uuid7
from tests.admin.pages import leads_to, listed, look, queries, read, unchanged, url
from tests.admin.people import browser, user
from tests.admin.world import World

pytestmark = pytest.mark.django_db(transaction=True)


def ask(run: Run, role: str = "superuser", **query: Any) -> Any:
    return browser(role).get(url(run, "live"), query)


def tag(html: str) -> str:
    return re.findall(r'data-seen="([0-9a-f]{16})"', html)[0]


def seen(run: Run) -> str:
    """What the page of a run that is opened now carries."""
    return tag(look(run).html)


def test_what_is_new_is_the_page_without_the_site_around_it(world: World) -> None:
    approval = world.waiting()
    run, known = approval.run, seen(approval.run)
    last = run.messages.latest("seq").seq
    approve(approval.pk, user("superuser"), digest=approval.digest)
    sweep()
    fragment = read(ask(run, after=last, seen=known))
    assert "Completed. It waits for nobody." in fragment.text
    cards = re.findall(r'id="row-([0-9]+)"', fragment.html)
    assert cards == [str(seq) for seq in range(last + 1, run.messages.latest("seq").seq + 1)]
    assert not {"html", "body", "script", "link", "nav"} & set(fragment.tags)
    assert 'data-ended data-end data-after="' in fragment.html
    client, query = browser("superuser"), {"after": last, "seen": tag(fragment.html)}
    response = client.get(url(run, "live"), query)
    assert (response.status_code, response.content) == (204, b"")
    asked = [sql for sql in queries(lambda: client.get(url(run, "live"), query)) if sql.startswith("SELECT")]
    assert len(asked) == 4, asked  # the session, the user, the run, its last row


def test_what_writes_no_row_is_news_too(world: World) -> None:
    run = world.queued()
    known = [seen(run)]

    def changed() -> bool:
        response = ask(run, seen=known[-1])
        if response.status_code == 200:
            known.append(tag(response.content.decode()))
        return response.status_code == 200

    assert not changed()
    Run.objects.filter(pk=run.pk).update(not_before=timezone.now() + timedelta(hours=1))
    assert changed()
    assert not changed()
    Run.objects.filter(pk=run.pk).update(not_before=timezone.now() - timedelta(seconds=1))
    assert changed(), "its time has come"
    assert claim("default", run.pk)
    assert changed()
    Run.objects.filter(pk=run.pk).update(lease_expires_at=timezone.now() - timedelta(minutes=1))
    assert changed()
    assert not changed()
    assert len(set(known)) == 4, "the first again, once its time had come"


def test_the_page_says_how_to_follow_it_and_asking_changes_nothing(world: World) -> None:
    run = world.queued()
    html = look(run).html
    assert f'data-url="{url(run, "live")}"' in html
    assert 'data-interval="2000"' in html
    assert "data-ended" not in html
    assert html.count("agentruns/live.js") == 1
    with unchanged():
        assert browser("superuser").post(url(run, "live")).status_code == 405
        assert browser("superuser").head(url(run, "live")).status_code == 200
        for odd in ("-1", "x", "9" * 30):
            assert ask(run, after=odd, seen=odd).status_code == 200
    assert "data-ended" in look(world.completed()).html


@pytest.mark.parametrize("name", ["run", "approval"])
def test_what_came_since_a_list_was_opened_is_counted_under_its_filters(world: World, name: str) -> None:
    world.waiting("old")
    client = browser("superuser")
    html = listed(name, agent="gated-new", o="1", p="1").html
    asked = html.partition('data-poll="')[2].partition('"')[0].replace("&amp;", "&")
    assert parse_qs(urlsplit(asked).query).keys() == {"agent", "o", "since"}
    assert client.get(asked).status_code == 204
    new = world.waiting("new")
    world.waiting("other")
    answer = client.get(asked)
    assert (answer.status_code, answer.content.decode()) == (200, "1 new since you opened this")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert url(new if name == "approval" else new.run) in leads_to(listed(name, agent="gated-new"))
    where = reverse(f"admin:agentruns_{name}_news")
    for query in ({"since": "x"}, {}, {"since": str(uuid7()), "input__contains": "x"}):
        assert client.get(where, query).status_code == 204


def test_times_are_in_the_readers_zone_unless_the_project_has_one(world: World, settings: Any) -> None:
    run, client = world.completed(), browser("superuser")
    Run.objects.update(created_at=datetime(2026, 3, 4, 12, 0, tzinfo=UTC))
    lists = reverse("admin:agentruns_run_changelist")
    for cookie, project, hour in (
        ("Asia/Tokyo", "UTC", "21:00:00 JST"),
        ("", "UTC", "12:00:00 UTC"),
        ("../etc/passwd", "UTC", "12:00:00 UTC"),
        ("Asia", "UTC", "12:00:00 UTC"),
        ("Asia/Tokyo", "Europe/Berlin", "13:00:00 CET"),
    ):
        settings.TIME_ZONE, client.cookies["agentruns_zone"] = project, cookie
        for where in (lists, url(run)):
            assert f"2026-03-04 {hour}" in client.get(where).content.decode(), where
        assert timezone.get_current_timezone_name() == project
    settings.TIME_ZONE = "UTC"
    with timezone.override(timezone.get_fixed_timezone(timedelta(hours=5))):
        assert "2026-03-04 17:00:00" in client.get(url(run)).content.decode(), "a zone that they activate"
