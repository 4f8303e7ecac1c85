"""The lists: what their rows say, how they are narrowed, and that they never count or ask without end."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from django.test import override_settings
from django.urls import reverse
from django.utils import timezone, translation

from agentruns import deny
from agentruns.admin import base
from agentruns.admin.runs.list import cost, short, tokens
from agentruns.engine.leases import claim
from agentruns.models import Run
from agentruns.services.sweep import sweep
from tests.admin.pages import Page, leads_to, listed, look, queries, read, says, url, words
from tests.admin.people import browser, user
from tests.admin.world import World, many, secretive
from tests.db.helpers import kill

pytestmark = pytest.mark.django_db
RUNS, APPROVALS = (reverse(f"admin:agentruns_{model}_changelist") for model in ("run", "approval"))


def keys(page: Page) -> set[str]:
    """Find the runs on a page."""
    return {link.split("/")[4] for link in leads_to(page) if link.startswith(RUNS)}


def runs(**query: str) -> set[str]:
    """Find the runs in a list."""
    return keys(listed("run", **query))


def approvals(**query: str) -> list[str]:
    """Find the cards in a list."""
    return [link for link in leads_to(listed("approval", **query)) if link.startswith(APPROVALS)]


def keys_of(*given: Run) -> set[str]:
    return {str(run.pk) for run in given}


def test_runs_say_where_they_stand_and_what_they_wait_for(world: World) -> None:
    approval = world.waiting(actor=user("viewer"))
    stopped = [approval.run, world.orphaned(), world.paused()]
    queued, completed = world.queued(), world.completed()
    page = listed("run")
    assert keys(page) == keys_of(*stopped, queued, completed)
    for shown in (
        "waiting", "in doubt", "paused", "queued", "completed", "viewer",
        f"Waits for approval: {approval.title}", "A call of dies is in doubt", "Paused: the bank is down",
        "gated-waiting", "waiting",
    ):  # fmt: skip
        assert shown in page.text
    assert runs(status="awaiting-approval") == runs(agent=approval.run.agent) == keys_of(approval.run)
    assert runs(status="person") == keys_of(*stopped)
    assert any("_changelist_filters=status%3Dpaused" in link for link in listed("run", status="paused").links)
    every = ("Resume selected", "Pause selected", "Cancel selected")
    for role, expected in {"viewer": (), "operator": every[::2], "superuser": every}.items():
        text = listed("run", role).text
        assert tuple(name for name in every if name in text) == expected, role


def test_a_row_says_how_far_a_run_is_what_it_costs_and_who_drives_it(world: World) -> None:
    key = "0198f3a2-7c11-7d6e-9a53-6f1f7e2b4c90"
    live, silent, ended = world.queued(key), world.queued("silent"), world.completed()
    for run in (live, silent):
        assert claim("default", run.pk)
    kill(silent)
    usage = {"input_tokens": 12_000, "output_tokens": 345, "cost": "0.0123456"}
    Run.objects.filter(pk=ended.pk).update(usage=usage, step=3)
    asked = queries(lambda: listed("run"))
    assert not [sql for sql in asked if '"agentruns_run"."usage"' in sql and "WHERE" in sql]
    assert [sql for sql in asked if '"agentruns_run"."agent"' in sql]
    assert not [sql for sql in asked if '"agentruns_run"."input"' in sql], "large columns stay there"
    page = listed("run")
    assert f'<a href="?session={live.session_id}" title="{key}">{key}</a>' in page.html
    text = words(page)
    for shown in (
        "12.3k3 steps", "0.0123", "At work, 0 steps so far", "Silent for", "running stalled", "post it",
    ):  # fmt: skip
        assert shown in text, shown
    assert text.count("stalled") == 2  # the badge, and the filter
    assert runs(status="stalled") == keys_of(silent)
    assert runs(status="running") == keys_of(silent, live)
    sweep()
    assert runs(status="stalled") == set()


def test_by_the_day_of_the_start_and_what_failed_lately(world: World) -> None:
    new, old = world.completed("new"), world.completed("old")
    Run.objects.filter(pk=old.pk).update(created_at=timezone.now() - timedelta(days=5))
    today, before = f"{timezone.localdate()}", f"{timezone.localdate() - timedelta(days=1)}"
    assert runs(started_from=today) == keys_of(new)
    asked = queries(lambda: listed("run", started_from=today))
    assert any('"agentruns_run"."id" >=' in sql for sql in asked)  # what an index serves
    assert runs(started_from=before, started_to=today, status="completed") == keys_of(new)
    assert runs(started_to=before) == keys_of(old)
    for nonsense in ("2026-13-01", "9999-12-31", "0001-01-01", "x", "<b>"):
        read(browser("superuser").get(RUNS, {"started_from": nonsense, "started_to": nonsense}))
    page = listed("run", status="completed", q="new", started_from=today, p="1")
    assert any("started_from=" not in link and "status=completed" in link for link in page.links)
    assert "Past 7 days" in page.text
    Run.objects.update(status="failed")
    Run.objects.filter(pk=old.pk).update(updated_at=timezone.now() - timedelta(hours=25))
    assert runs(status="failed-lately") == keys_of(new)
    assert runs(status="failed") == keys_of(new, old)
    assert runs(status="nonsense") == set()


def test_approvals_show_what_is_pending_unless_asked(world: World) -> None:
    pending, ended = world.waiting("one", actor=user("viewer")), world.waiting("two")
    deny(ended.pk, None, "no")
    assert approvals() == approvals(tool="refund", q="one") == [url(pending)]
    assert {*approvals(status="all")} == {url(pending), url(ended)}
    assert approvals(status="denied") == [url(ended)]
    assert approvals(agent=ended.run.agent) == approvals(tool="nothing") == []
    text = listed("approval").text
    for shown in (pending.title, "refund", "high", "waiting", "viewer", pending.run.agent):
        assert shown in text


@pytest.mark.parametrize("make", ["waiting", "orphaned", "paused", "completed"])
@pytest.mark.parametrize("path", [RUNS, APPROVALS])
def test_more_rows_cost_no_more_queries(world: World, path: str, make: str) -> None:
    client, query = browser("superuser"), {"status": "all"} if path == APPROVALS else {}
    getattr(world, make)("0")
    world.waiting("always")
    few = len(queries(lambda: says(client.get(path, query))))
    for number in range(1, 9):
        getattr(world, make)(str(number))
    assert len(queries(lambda: client.get(path, query))) == few <= 9


def test_lists_filter_by_no_lookup_of_a_url(world: World) -> None:
    world.waiting(actor=user("viewer"))
    for lookup in (
        "run/?input__contains=refund", "run/?input__regex=(r+)%2B$", "run/?session__key__startswith=w",
        "approval/?status=pending&arguments__contains=5000", "approval/?run__input__contains=refund",
        "apitoken/?digest__startswith=a",
    ):  # fmt: skip
        response = browser("superuser").get(f"/admin/agentruns/{lookup}")
        assert response.status_code in (302, 400)  # one that found nothing would tell as much
        assert response.status_code == 400 or response.headers["Location"].endswith("?e=1"), lookup


def test_a_long_list_is_not_counted_to_its_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    many(world.completed(), 60)
    text = listed("run").text
    assert "61 runs" in text
    assert "counted and paged through" not in text
    monkeypatch.setattr(base, "MOST", 55)
    monkeypatch.setattr(base.counted, "__defaults__", (55,))
    for number in ("1", "2"):
        asked = queries(lambda p=number: listed("run", p=p))  # type: ignore[misc]
        page = listed("run", p=number)
        assert "55+ runs" in words(page)
        assert "Only 55 are counted and paged through." in words(page)
        [count] = [sql for sql in asked if "COUNT(" in sql and "agentruns_run" in sql]
        assert "LIMIT 56" in count
        assert "ORDER BY" not in count
    assert len(keys(page)) == 5
    assert browser("superuser").get(RUNS, {"p": "3"}).status_code == 302
    assert str(base.Bounded(10_000, more=True)) == "10,000+"


def test_the_dearest_come_first_and_where_nothing_has_a_price_the_longest(world: World) -> None:
    many(world.completed(), 3)
    client, order = browser("superuser"), []
    figures = [(Decimal("2.5"), 1), (Decimal("0.000001"), 7), (None, 900), (None, 10)]
    for one, (cost_of_it, tokens_of_it) in zip(Run.objects.all(), figures, strict=True):
        Run.objects.filter(pk=one.pk).update(cost=cost_of_it, tokens=tokens_of_it)
        order.append(str(one.pk))
    for column, expected in {"6": order, "-6": order[::-1], "5": [order[2], order[3], *order[1::-1]]}.items():
        page = client.get(RUNS, {"o": column})
        assert [str(one.pk) for one in page.context["cl"].result_list] == expected, column
    opened = client.get(RUNS)
    assert opened.context["cl"].queryset.query.order_by == ("-updated_at", "-pk")
    assert "sorted" not in opened.content.decode(), "no column is what it is ordered by"
    by_start = client.get(RUNS, {"o": "4"}).content.decode()
    [head] = [head for head in by_start.split("<th ")[1:] if "sorted ascending" in head.partition(">")[0]]
    assert "started, requester" in head.lower()
    assert {"?o=5", "?o=6"} <= {link.partition(".")[0] for link in read(opened).links}, "of a first click"


def test_figures_are_short() -> None:
    assert [short(number) for number in (0, 999, 1000, 12_345, 999_999, 1_250_000)] == [
        "0", "999", "1.0k", "12.3k", "999.9k", "1.2M",
    ]  # fmt: skip
    usage = {"input_tokens": 7, "cache_read_input_tokens": 5, "other": 9}
    assert 'title="input_tokens 7, cache_read_input_tokens 5"' in tokens(usage)
    assert tokens({}) == ""
    for given, shown in {
        "1234.5678": "1234.57", "0.00123": "0.0012", "0": "0.0000", "0.00000001": "&lt; 0.0001",
    }.items():  # fmt: skip
        assert cost({"cost": given}) == f'<span title="{given}">{shown}</span>'
    assert [cost({"cost": odd}) for odd in ("NaN", "1E+999999", "<b>")] == ["NaN", "1E+999999", "&lt;b&gt;"]
    with override_settings(AGENTRUNS_CURRENCY="EUR"):
        assert cost({"cost": "0.07"}) == '<span title="0.07">0.0700\xa0EUR</span>'
        assert cost({}) == ""
    assert cost({}) == ""
    with override_settings(LANGUAGE_CODE="de"), translation.override("de"):
        assert short(12_345) == "12,3k"


def second_line() -> str:
    """Return what stands below the first line of the first run in the list."""
    return listed("run").html.split('<br><span class="ar-second">')[1].partition("</span>")[0]


def test_the_second_line_is_the_answer_without_its_markdown_or_why_it_failed(world: World) -> None:
    run = world.completed()
    found = Run.objects.filter(pk=run.pk)
    for answer, shown in {
        "I refunded **24.90 EUR** for `1002`:\n\n- a *mug*\n- <b>more</b>": (
            "I refunded 24.90 EUR for 1002: a mug &lt;b&gt;more&lt;/b&gt;"
        ),
        "# Done\n\n3 * 4 * 5 = 60": "Done 3 * 4 * 5 = 60",
    }.items():
        found.update(output=answer)
        assert second_line() == shown
    for error, shown in {
        "ValueError: parcel 3 has no label": "parcel 3 has no label (ValueError)",
        "The model: it refused": "The model: it refused",
        "KeyError: ": "KeyError:",
    }.items():
        found.update(status="failed", error=error)
        assert second_line() == shown
        assert f"Failed: {shown}" in words(look(run))
    found = Run.objects.filter(pk=world.waiting(tools=[secretive]).run_id)
    for output, shown in {
        "To **DE02**-secret, and *** is **hidden**": "To **DE02**-secret, and *** is **hidden**",
        "To DE02-secret, **at once**": "To ***, at once",
    }.items():
        found.update(status="completed", output=output)
        assert second_line() == shown, "markdown stays where it keeps a masked value apart"


def test_from_a_filtered_list_each_link_of_a_run_leads_where_it_does_from_elsewhere(world: World) -> None:
    run, asked = world.completed("s1"), world.waiting("s2").run
    kept = "?" + urlencode({"_changelist_filters": "status=completed&q=nothing like it"})
    client = browser("superuser")
    for path in (url(run), url(asked), url(run, "at"), url(run, "replay")):
        links = read(client.get(path + kept)).links
        assert [link for link in links if link.count("?") > 1] == []
    shown = look(run, query=kept)
    [session] = {link for link in shown.links if f"session={run.session_id}" in link}
    assert "1 run" in read(client.get(session)).text
    rows = [link for link in shown.links if "/at/" in link and "seq=" in link]
    seqs = list(run.messages.order_by("seq").values_list("seq", flat=True))
    assert [int(parse_qs(urlsplit(link).query)["seq"][0]) for link in rows] == seqs
    for link, seq in zip(rows, seqs, strict=True):
        assert f"Row {seq}" in read(client.get(link)).text
