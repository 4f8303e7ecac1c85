"""Reviews: rated, noted and assigned by who may, shown to who sees the run, and gone when it is."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.urls import reverse

from agentruns import Policy, start_run
from agentruns.exceptions import DurableRunNotFoundError, PermissionDeniedError, RunStateError
from agentruns.models import Message, Review, Run
from agentruns.services import reviews
from agentruns.services.data.erasure import erase_payload
from agentruns.services.data.retention import erase_session
from agentruns.services.reviews import review_run
from agentruns.tools.card import MASK
from tests.admin.pages import leads_to, listed, look, read, says, url, words
from tests.admin.people import browser, user
from tests.admin.world import World, secretive
from tests.shop.agents import shop_agent

pytestmark = pytest.mark.django_db


@pytest.fixture
def reviewer(db: None) -> Any:
    who = user("viewer")
    who.user_permissions.add(Permission.objects.get(codename="review_run"))
    return who


def in_list(role: str = "superuser", **query: str) -> set[str]:
    return set(leads_to(listed("run", role, **query)))


def send(run: Run, role: str = "viewer", **data: str) -> Any:
    form = look(run, role=role).forms.get(url(run, "review"), {})
    sent = {"seen": form.get("seen", ""), "rating": "0", "assignee": "", "note": "", **data}
    return browser(role).post(url(run, "review"), sent, follow=True)


def test_a_run_is_rated_noted_and_assigned(world: World, reviewer: Any) -> None:
    run, other = world.completed("one"), world.completed("two")
    before = Message.objects.count()
    answer = send(run, rating="-1", note="It was rude.\n<b>", assignee="operator")
    assert answer.status_code == 404 or "No user of this name may see the run." in read(answer).text
    assert not Review.objects.exists()
    user("operator")
    answer = send(run, rating="-1", note="It was rude.\n<b>", assignee="operator")
    says(answer, "The review is saved.")
    text = words(look(run, role="operator"))
    assert "Rated: bad. Assigned to operator. viewer," in text
    assert "It was rude. <b>" in text
    assert "Change the review" not in text
    assert in_list("operator", review="mine") == {url(run)}
    assert in_list(review="bad") == {url(run)}
    assert in_list(review="good") == in_list(review="mine") == set()
    assert in_list() == {url(run), url(other)}
    assert "rated bad, for operator" in listed("run").text
    send(run, rating="1", note="No, it was not.")
    review = Review.objects.get()
    assert (review.rating, review.note, review.assignee_id) == (1, "No, it was not.", None)
    assert Message.objects.count() == before, "no row of the journal"


def test_only_who_may_and_who_sees_the_run(world: World, reviewer: Any) -> None:
    run = world.completed()
    for role, status in {"operator": 403, "staff": 403, "decider": 403, "resumer": 403}.items():
        assert browser(role).post(url(run, "review"), {"rating": "1"}).status_code == status, role
        with pytest.raises((PermissionDeniedError, DurableRunNotFoundError)):
            review_run(run.pk, user(role), rating=1)
    assert browser("viewer").get(url(run, "review")).status_code == 302
    assert not Review.objects.exists()
    review_run(run.pk, None, rating=1)
    for wrong in ({"rating": 2}, {"note": "x" * 100_000}, {"assignee": "staff"}, {"assignee": "nobody"}):
        with pytest.raises(ValueError, match=r"rating|No user"):
            review_run(run.pk, None, **wrong)


def test_a_mistake_and_a_race_keep_what_was_typed(world: World, reviewer: Any) -> None:
    run = world.completed()
    told = "No user of this name may see the run."
    page = read(send(run, rating="1", note="kept text", assignee="staff"))
    assert told in page.text
    assert "kept text" in str(page.forms)
    field = page.html[page.html.index('for="review_assignee"') : page.html.index('id="review_assignee"')]
    assert told in field, "beside the field too"
    stale = look(run, role="viewer").forms[url(run, "review")]
    assert send(run, "superuser", rating="1").status_code == 200
    answer = browser("viewer").post(url(run, "review"), {**stale, "rating": "-1", "note": "late"})
    assert "late" in str(says(answer, status=409).forms)
    assert Review.objects.get().rating == 1
    with pytest.raises(RunStateError, match="meanwhile"):
        review_run(run.pk, None, rating=-1)
    for seen in (
        "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59", "x", "2026-02-30",
    ):  # fmt: skip
        sent = {"seen": seen, "rating": "-1", "note": "kept text"}
        answer = browser("viewer").post(url(run, "review"), sent)
        assert answer.status_code in (400, 409), "a moment outside of the calendar"
        assert "kept text" in str(read(answer).forms)
    assert Review.objects.get().rating == 1


def test_the_last_and_the_first_day_of_the_calendar_break_no_page(world: World) -> None:
    last, client = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC), browser("superuser")
    run = start_run(shop_agent("patient", {"text": "x"}), "wait", "patient", not_before=last)
    runs = reverse("admin:agentruns_run_changelist")
    for zone in ("Pacific/Kiritimati", "Etc/GMT+12", ""):
        client.cookies["agentruns_zone"] = zone
        says(client.get(url(run)), "It starts at 9999-12-31 ")
        for path in (runs, reverse("admin:index")):
            assert client.get(path).status_code == 200, path
        for day in ("9999-12-31", "9999-12-30", "0001-01-01", "0001-01-02"):
            for name in ("started_from", "started_to"):
                assert client.get(runs, {name: day}).status_code == 200, (name, day)
            for page in ("costs", "csv"):
                asked = reverse(f"admin:agentruns_run_{page}"), {"first": day, "last": day}
                assert client.get(*asked).status_code == 400, (page, day)


def nameless(text: str) -> str:
    return text.replace("viewer", "[name]")


def test_what_is_masked_of_notes_or_hidden_of_names_stays(world: World, reviewer: Any, settings: Any) -> None:
    run = world.waiting(tools=[secretive]).run
    review_run(run.pk, None, note="to DE02-secret\u202e", assignee="viewer")
    page = look(run, role="viewer")
    assert "secret" not in page.text + str(page.forms)
    assert f"to {MASK}" in page.text
    form = page.forms[url(run, "review")]
    assert form["note"] == f"to {MASK}[U+202E]"
    settings.AGENTRUNS_REDACT = f"{__name__}.nameless"
    hidden = look(run, role="viewer").forms[url(run, "review")]["assignee"]
    assert hidden == "[name]"
    assert send(run, rating="1", note=form["note"], assignee=hidden).status_code == 200
    stored = Review.objects.values_list("rating", "note", "assignee_name").get()
    assert stored == (1, "to DE02-secret\u202e", "viewer")


def offered(run: Run, role: str = "viewer") -> list[str]:
    html = look(run, role=role).html
    return re.findall(r'<option value="(\w+)"', html.partition('<datalist id="ar-people">')[2])


class South(Policy):
    def visible(self, user: Any, runs: Any) -> Any:
        """Hide everything from the operator."""
        return runs.none() if user.get_username() == "operator" else runs


def test_those_who_may_see_the_run_are_offered_and_the_stored_rating_is_ticked(
    world: World, reviewer: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.completed()
    for role in ("operator", "staff", "superuser"):
        user(role)
    assert offered(run) == ["viewer", "operator", "superuser"]
    assert offered(run, "superuser") == ["superuser", "operator", "viewer"]
    assert offered(run, "operator") == [], "who may not review it is told no names"
    html = look(run, role="viewer").html
    assert '<option value="viewer" label="me">' in html
    assert re.findall(r'name="rating" value="(-?\d)"[^>]* checked', html) == ["0"]
    review_run(run.pk, None, rating=-1)
    assert re.findall(r'name="rating" value="(-?\d)"[^>]* checked', look(run, role="viewer").html) == ["-1"]
    with monkeypatch.context() as patch:
        patch.setattr(reviews, "OFFERED", 1)
        assert offered(run) == ["viewer", "operator"]
    settings.AGENTRUNS_POLICY = f"{__name__}.South"
    assert offered(run) == ["viewer", "superuser"]


@pytest.mark.django_db(transaction=True)
def test_it_goes_with_the_session_and_its_note_with_a_row(world: World) -> None:
    run, other = world.completed("one"), world.completed("two")
    for each in (run, other):
        review_run(each.pk, None, note="Ann, Elm Street 7", rating=1)
    erase_payload(run.pk, 2, None, "asked for")
    assert (Review.objects.get(pk=run.pk).note, Review.objects.get(pk=run.pk).rating) == ("[erased]", 1)
    assert Review.objects.get(pk=other.pk).note == "Ann, Elm Street 7"
    erase_session("two")
    assert [each.pk for each in Review.objects.all()] == [run.pk]
