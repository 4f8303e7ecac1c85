"""The list of runs: what each row says, how it is narrowed, and that it never counts or asks without end."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from agentruns.admin import base
from agentruns.admin.runs.list import cost, short, tokens
from agentruns.engine.leases import claim
from agentruns.models import Run, Session
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, read, url
from tests.admin.people import browser
from tests.admin.world import World, secretive
from tests.db.helpers import kill

pytestmark = pytest.mark.django_db
LIST = "admin:agentruns_run_changelist"


def listed(**query: str) -> Page:
    response = browser("superuser").get(reverse(LIST), query)
    assert response.status_code == 200
    return read(response)


def keys(page: Page) -> set[str]:
    """The runs on a page."""
    return {
        link.split("/")[4] for link in page.links if link.startswith(reverse(LIST)) and "/change/" in link
    }


def driven(world: World, session: str = "live") -> Run:
    """A run that a worker holds."""
    run = world.queued(session)
    assert claim("default", run.pk)
    run.refresh_from_db()
    return run


def many(run: Run, count: int) -> None:
    """Put copies of an ended run into the list."""
    sessions = [Session(key=f"copy-{number}") for number in range(count)]
    Session.objects.bulk_create(sessions)
    columns = {
        field.attname: getattr(run, field.attname)
        for field in Run._meta.concrete_fields
        if field.attname not in ("id", "session_id")
    }
    Run.objects.bulk_create(Run(session=session, **columns) for session in sessions)


def test_a_row_says_how_far_a_run_is_what_it_costs_and_who_drives_it(world: World) -> None:
    live, silent, ended = driven(world), driven(world, "silent"), world.completed()
    kill(silent)
    usage = {"input_tokens": 12_000, "output_tokens": 345, "cost": "0.0123456"}
    Run.objects.filter(pk=ended.pk).update(usage=usage, step=3)
    with CaptureQueriesContext(connection) as queries:
        page = listed()
    assert not [
        query for query in queries if '"agentruns_run"."usage"' in query["sql"] and "WHERE" in query["sql"]
    ]
    text = " ".join(page.text.split())
    for shown in (
        "12.3k3 steps",
        "0.0123",
        "At work, 0 steps so far",
        "Silent for",
        "running stalled",
        "post it",
    ):
        assert shown in text, shown
    assert text.count("stalled") == 2  # the badge, and the filter
    assert keys(listed(status="stalled")) == {str(silent.pk)}
    assert keys(listed(status="running")) == {str(silent.pk), str(live.pk)}
    sweep()
    assert keys(listed(status="stalled")) == set()


def test_what_needs_a_person_and_what_failed_lately(world: World) -> None:
    waiting = {str(run.pk) for run in (world.waiting().run, world.orphaned(), world.paused())}
    failed, old = world.completed("failed"), world.completed("old")
    day = timezone.now() - timedelta(hours=25)
    Run.objects.filter(pk__in=[failed.pk, old.pk]).update(status="failed")
    Run.objects.filter(pk=old.pk).update(updated_at=day)
    assert keys(listed(status="person")) == waiting
    assert keys(listed(status="failed-lately")) == {str(failed.pk)}
    assert keys(listed(status="failed")) == {str(failed.pk), str(old.pk)}
    assert keys(listed(status="nonsense")) == set()


def test_by_the_day_of_the_start(world: World) -> None:
    new, old = world.completed("new"), world.completed("old")
    then = timezone.now() - timedelta(days=5)
    Run.objects.filter(pk=old.pk).update(created_at=then)
    with CaptureQueriesContext(connection) as queries:
        assert keys(listed(started_from=f"{timezone.localdate()}")) == {str(new.pk)}
    assert any('"agentruns_run"."id" >=' in query["sql"] for query in queries)  # what an index serves
    today, before = timezone.localdate(), timezone.localdate() - timedelta(days=1)
    assert keys(listed(started_from=f"{before}", started_to=f"{today}", status="completed")) == {str(new.pk)}
    assert keys(listed(started_to=f"{before}")) == {str(old.pk)}
    for nonsense in ("2026-13-01", "9999-12-31", "0001-01-01", "x", "<b>"):
        read(browser("superuser").get(reverse(LIST), {"started_from": nonsense, "started_to": nonsense}))
    page = listed(status="completed", q="new", started_from=f"{today}", p="1")
    assert any("started_from=" not in link and "status=completed" in link for link in page.links)
    assert "Past 7 days" in page.text


def test_a_long_list_is_not_counted_to_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    many(world.completed(), 60)
    assert "61 runs" in listed().text
    assert "counted and paged through" not in listed().text
    monkeypatch.setattr(base, "MOST", 55)
    monkeypatch.setattr(base.counted, "__defaults__", (55,))
    for number in ("1", "2"):
        with CaptureQueriesContext(connection) as queries:
            page = listed(p=number)
        assert "55+ runs" in " ".join(page.text.split())
        assert "Only 55 are counted and paged through." in " ".join(page.text.split())
        counts = [
            query["sql"] for query in queries if "COUNT(" in query["sql"] and "agentruns_run" in query["sql"]
        ]
        assert len(counts) == 1
        assert "LIMIT 56" in counts[0]
        assert "ORDER BY" not in counts[0]
    assert len(keys(page)) == 5
    assert browser("superuser").get(reverse(LIST), {"p": "3"}).status_code == 302
    assert str(base.Bounded(10_000, more=True)) == "10,000+"


def test_a_hundred_runs_cost_no_more_queries_than_one(world: World) -> None:
    client, run = browser("superuser"), world.completed()

    def queries_of() -> int:
        with CaptureQueriesContext(connection) as queries:
            read(client.get(reverse(LIST), {"all": ""}))
        return len(queries)

    one = queries_of()
    many(run, 99)
    assert len(keys(listed(all=""))) == 100
    assert queries_of() == one == 6


def test_the_dearest_come_first_and_where_nothing_has_a_price_the_longest(world: World) -> None:
    run, order = world.completed(), []
    many(run, 3)
    figures = [(Decimal("2.5"), 1), (Decimal("0.000001"), 7), (None, 900), (None, 10)]
    for one, (cost_of_it, tokens_of_it) in zip(Run.objects.all(), figures, strict=True):
        Run.objects.filter(pk=one.pk).update(cost=cost_of_it, tokens=tokens_of_it)
        order.append(str(one.pk))
    for column, expected in {"6": order, "-6": order[::-1], "5": [order[2], order[3], *order[1::-1]]}.items():
        page = browser("superuser").get(reverse(LIST), {"o": column})
        assert [str(one.pk) for one in page.context["cl"].result_list] == expected, column
    opened = browser("superuser").get(reverse(LIST))
    assert opened.context["cl"].queryset.query.order_by == ("-updated_at", "-pk")
    assert "sorted" not in opened.content.decode(), "no column is what it is ordered by"
    by_start = browser("superuser").get(reverse(LIST), {"o": "4"}).content.decode()
    [head] = [head for head in by_start.split("<th ")[1:] if "sorted ascending" in head.partition(">")[0]]
    assert "started, requester" in head.lower()
    first_clicks = {link.partition(".")[0] for link in listed().links}
    assert {"?o=5", "?o=6"} <= first_clicks


def test_figures_are_short() -> None:
    assert [short(number) for number in (0, 999, 1000, 12_345, 999_999, 1_250_000)] == [
        "0", "999", "1.0k", "12.3k", "999.9k", "1.2M",
    ]  # fmt: skip
    assert 'title="input_tokens 7, cache_read_input_tokens 5"' in tokens(
        {"input_tokens": 7, "cache_read_input_tokens": 5, "other": 9}
    )
    assert tokens({}) == ""
    for given, shown in {
        "1234.5678": "1234.57",
        "0.00123": "0.0012",
        "0": "0.0000",
        "0.00000001": "&lt; 0.0001",
    }.items():
        assert cost({"cost": given}) == f'<span title="{given}">{shown}</span>'
    assert cost({}) == ""
    assert [cost({"cost": odd}) for odd in ("NaN", "1E+999999", "<b>")] == ["NaN", "1E+999999", "&lt;b&gt;"]
    with override_settings(AGENTRUNS_CURRENCY="EUR"):
        assert cost({"cost": "0.07"}) == '<span title="0.07">0.0700\xa0EUR</span>'
        assert cost({}) == ""
    with override_settings(LANGUAGE_CODE="de"):
        from django.utils import translation

        with translation.override("de"):
            assert short(12_345) == "12,3k"


def test_who_may_not_act_sees_no_actions_and_each_only_theirs(world: World) -> None:
    world.paused()
    offered: dict[str, Any] = {
        role: [name for name in ("Resume selected", "Pause selected", "Cancel selected") if name in page.text]
        for role in ("viewer", "operator", "superuser")
        for page in [read(browser(role).get(reverse(LIST)))]
    }
    assert offered == {
        "viewer": [],
        "operator": ["Resume selected", "Cancel selected"],
        "superuser": ["Resume selected", "Pause selected", "Cancel selected"],
    }


def test_the_search_stays(world: World) -> None:
    run = world.queued("ticket-7")
    world.completed()
    for term in (str(run.pk)[:13], "ticket"):
        assert keys(listed(q=term)) == {str(run.pk)}
    assert url(run) in {link.split("?")[0] for link in listed(q="ticket").links}


def second_lines(page: Page) -> list[str]:
    return [text.partition("</span>")[0] for text in page.html.split('<br><span class="ar-second">')[1:]]


def test_an_answer_is_listed_without_its_markdown(world: World) -> None:
    run = world.completed()
    for answer, shown in {
        "I refunded **24.90 EUR** for `1002`:\n\n- a *mug*\n- <b>more</b>": (
            "I refunded 24.90 EUR for 1002: a mug &lt;b&gt;more&lt;/b&gt;"
        ),
        "# Done\n\n3 * 4 * 5 = 60": "Done 3 * 4 * 5 = 60",
    }.items():
        Run.objects.filter(pk=run.pk).update(output=answer)
        assert second_lines(listed())[0] == shown


def test_markdown_is_left_where_it_keeps_a_masked_value_apart(world: World) -> None:
    approval = world.waiting(tools=[secretive])
    Run.objects.filter(pk=approval.run_id).update(
        status="completed", output="To **DE02**-secret, and *** is **hidden**"
    )
    [line, *_rest] = second_lines(listed())
    assert line == "To **DE02**-secret, and *** is **hidden**"
    Run.objects.filter(pk=approval.run_id).update(output="To DE02-secret, **at once**")
    assert second_lines(listed())[0] == "To ***, at once"


def test_a_failed_run_says_why_before_what_kind_of_error_that_is(world: World) -> None:
    run = world.completed()
    for error, shown in {
        "ValueError: parcel 3 has no label": "parcel 3 has no label (ValueError)",
        "The model: it refused": "The model: it refused",
        "KeyError: ": "KeyError:",
    }.items():
        Run.objects.filter(pk=run.pk).update(status="failed", error=error)
        assert second_lines(listed())[0] == shown
        assert f"Failed: {shown}" in " ".join(read(browser("superuser").get(url(run))).text.split())


def test_a_long_session_key_is_whole_in_its_tooltip(world: World) -> None:
    key = "0198f3a2-7c11-7d6e-9a53-6f1f7e2b4c90"
    run = world.completed(key)
    assert f'<a href="?session={run.session_id}" title="{key}">{key}</a>' in listed().html


def test_from_a_filtered_list_each_link_of_a_run_leads_where_it_does_from_elsewhere(world: World) -> None:
    run = world.completed("s1")
    asked = world.waiting("s2").run
    kept = "?" + urlencode({"_changelist_filters": "status=completed&q=nothing like it"})
    client = browser("superuser")
    for page in (
        url(run),
        url(asked),
        f"{url(run)[: -len('change/')]}at/",
        f"{url(run)[: -len('change/')]}replay/",
    ):
        links = read(client.get(page + kept)).links
        assert [link for link in links if link.count("?") > 1] == []
    shown = read(client.get(url(run) + kept))
    [session] = {link for link in shown.links if f"session={run.session_id}" in link}
    assert "1 run" in read(client.get(session)).text
    rows = [link for link in shown.links if "/at/" in link and "seq=" in link]
    seqs = list(run.messages.order_by("seq").values_list("seq", flat=True))
    assert [int(parse_qs(urlsplit(link).query)["seq"][0]) for link in rows] == seqs
    for link, seq in zip(rows, seqs, strict=True):
        assert f"Row {seq}" in read(client.get(link)).text
