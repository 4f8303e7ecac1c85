"""What an open page asks for: the page anew if something changed, and next to nothing if not."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from agentruns import approve
from agentruns.engine.leases import claim
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, read, snapshot, url
from tests.admin.people import ROLES, browser, user
from tests.admin.world import World

pytestmark = pytest.mark.django_db(transaction=True)


def ask(run: Run, role: str = "superuser", **query: Any) -> Any:
    return browser(role).get(url(run, "live"), query)


def tag(response: Any) -> str:
    found = re.search(r'data-seen="([0-9a-f]{16})"', response.content.decode())
    assert found
    return found[1]


def seen(run: Run) -> str:
    """What the page of a run that is opened now carries."""
    return tag(browser("superuser").get(url(run)))


def cards(page: Page) -> list[str]:
    return re.findall(r'id="row-([0-9]+)"', page.html)


def test_nothing_new_costs_next_to_nothing(world: World) -> None:
    run = world.waiting().run
    client, known = browser("superuser"), seen(run)
    with CaptureQueriesContext(connection) as queries:
        response = client.get(url(run, "live"), {"after": 4, "seen": known})
    assert (response.status_code, response.content) == (204, b"")
    asked = [query["sql"] for query in queries if query["sql"].startswith("SELECT")]
    assert len(asked) == 4, asked  # the session, the user, the run, its last row


def test_what_is_new_is_the_page_without_the_site_around_it(world: World) -> None:
    approval = world.waiting()
    run, known = approval.run, seen(approval.run)
    last = run.messages.latest("seq").seq
    approve(approval.pk, user("superuser"), digest=approval.digest)
    sweep()
    response = ask(run, after=last, seen=known)
    fragment = read(response)
    assert "Completed. It waits for nobody." in fragment.text
    assert cards(fragment) == [str(seq) for seq in range(last + 1, run.messages.latest("seq").seq + 1)]
    assert not {"html", "body", "script", "link", "nav"} & set(fragment.tags)
    assert 'data-ended data-end data-after="' in response.content.decode()
    assert ask(run, after=last, seen=tag(response)).status_code == 204


def test_what_writes_no_row_is_news_too(world: World) -> None:
    run = world.queued()
    known = [seen(run)]

    def changed() -> bool:
        response = ask(run, seen=known[-1])
        if response.status_code == 200:
            known.append(tag(response))
        return response.status_code == 200

    assert not changed()
    assert claim("default", run.pk)
    assert changed()
    Run.objects.filter(pk=run.pk).update(lease_expires_at=timezone.now() - timedelta(minutes=1))
    assert changed()
    assert not changed()
    assert len(set(known)) == 3


def test_that_the_time_of_a_new_run_has_come_is_news(world: World) -> None:
    run = world.queued()
    Run.objects.filter(pk=run.pk).update(not_before=timezone.now() + timedelta(hours=1))
    known = seen(run)
    assert ask(run, seen=known).status_code == 204
    Run.objects.filter(pk=run.pk).update(not_before=timezone.now() - timedelta(seconds=1))
    assert ask(run, seen=known).status_code == 200


def test_it_is_asked_for_and_changes_nothing(world: World) -> None:
    run, before = world.paused(), snapshot()
    assert browser("superuser").post(url(run, "live")).status_code == 405
    assert browser("superuser").head(url(run, "live")).status_code == 200
    for odd in ("-1", "x", "9" * 30):
        assert ask(run, after=odd, seen=odd).status_code == 200
    assert snapshot() == before


@pytest.mark.parametrize("role", ROLES)
def test_who_sees_the_run_may_follow_it(world: World, role: str) -> None:
    run = world.completed()
    status = ask(run, role).status_code
    assert status == browser(role).get(url(run)).status_code
    assert status == (200 if role in ("viewer", "operator", "resolver", "superuser") else status)


def test_the_page_says_how_to_follow_it(world: World) -> None:
    run = world.queued()
    html = browser("superuser").get(url(run)).content.decode()
    assert f'data-url="{url(run, "live")}"' in html
    assert 'data-interval="2000"' in html
    assert "data-ended" not in html
    assert html.count("agentruns/live.js") == 1
    assert "data-ended" in browser("superuser").get(url(world.completed())).content.decode()
