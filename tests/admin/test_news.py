"""An open list says what is newer than itself, and every page writes times in its reader's zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.urls import reverse
from django.utils import timezone

from agentruns.models import Run
from agentruns.utils.ids import uuid7
from tests.admin.pages import read, url
from tests.admin.people import browser, user
from tests.admin.world import World

pytestmark = pytest.mark.django_db
RUNS, QUEUE = "admin:agentruns_run_changelist", "admin:agentruns_approval_changelist"


@pytest.mark.parametrize("name", [RUNS, QUEUE])
def test_what_came_since_a_list_was_opened_is_counted_under_its_filters(world: World, name: str) -> None:
    world.waiting("old")
    client = browser("superuser")
    html = client.get(reverse(name), {"agent": "gated-new", "o": "1", "p": "1"}).content.decode()
    asked = html.partition('data-poll="')[2].partition('"')[0].replace("&amp;", "&")
    assert parse_qs(urlsplit(asked).query).keys() == {"agent", "o", "since"}
    assert client.get(asked).status_code == 204
    new = world.waiting("new")
    world.waiting("other")
    answer = client.get(asked)
    if name == QUEUE:  # what a filter did not offer finds nothing: the list has to be opened anew
        html = client.get(reverse(name), {"agent": "gated-new"}).content.decode()
        assert answer.status_code == 200
    assert (answer.status_code, answer.content.decode()) == (200, "1 new since you opened this")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert new.run.agent == "gated-new"


def test_news_are_of_what_one_may_see(world: World) -> None:
    since = uuid7()
    world.waiting("one", actor=user("viewer"))
    for name, roles in (
        ("run", {"viewer": 200, "decider": 403, "staff": 403, "operator": 200}),
        ("approval", {"viewer": 200, "decider": 200, "staff": 403, "operator": 403}),
    ):
        where = reverse(f"admin:agentruns_{name}_news")
        for role, status in roles.items():
            assert browser(role).get(where, {"since": str(since)}).status_code == status, (name, role)
        assert browser("anonymous").get(where).status_code == 302
        for query in ({"since": "x"}, {}, {"since": str(since), "input__contains": "x"}):
            assert browser("superuser").get(where, query).status_code == 204


AT = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("cookie", "project", "hour"),
    [
        ("Asia/Tokyo", "UTC", "21:00:00 JST"),
        ("", "UTC", "12:00:00 UTC"),
        ("../etc/passwd", "UTC", "12:00:00 UTC"),
        ("Asia", "UTC", "12:00:00 UTC"),
        ("Asia/Tokyo", "Europe/Berlin", "13:00:00 CET"),
    ],
)
def test_times_are_in_the_readers_zone_unless_the_project_has_one(
    world: World, settings: Any, cookie: str, project: str, hour: str
) -> None:
    run = world.completed()
    Run.objects.update(created_at=AT)
    settings.TIME_ZONE = project
    client = browser("superuser")
    client.cookies["agentruns_zone"] = cookie
    for where in (reverse(RUNS), url(run)):
        response = client.get(where)
        assert f"2026-03-04 {hour}" in response.content.decode(), where
    assert timezone.get_current_timezone_name() == project


def test_a_zone_that_the_project_activates_stays(world: World, settings: Any) -> None:
    world.completed()
    Run.objects.update(created_at=AT)
    settings.TIME_ZONE = "UTC"
    client = browser("superuser")
    client.cookies["agentruns_zone"] = "Asia/Tokyo"
    with timezone.override(timezone.get_fixed_timezone(timedelta(hours=5))):
        assert "2026-03-04 17:00:00" in read(client.get(reverse(RUNS))).text + str(
            client.get(reverse(RUNS)).content
        )
