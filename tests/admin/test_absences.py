"""The page of absences."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from agentruns.models import Absence
from tests.db.helpers import user

pytestmark = pytest.mark.django_db

SPAN = {"begins_at": "2030-01-01T08:00", "ends_at": "2030-01-02T08:00"}


@pytest.fixture
def ann(client: Client) -> Any:
    """Sign in a decider; another one is there."""
    user("bob", "decide_approval", is_staff=True), user("viewer", is_staff=True)
    ann = user("ann", "decide_approval", is_staff=True)
    client.force_login(ann)
    return ann


def post(client: Client, **sent: str) -> Any:
    return client.post(reverse("admin:agentruns_approval_absences"), sent, follow=True)


def test_one_plans_and_ends_ones_own(client: Client, ann: Any) -> None:
    listed = client.get(reverse("admin:agentruns_approval_changelist")).content.decode()
    assert reverse("admin:agentruns_approval_absences") in listed
    page = post(client, delegate="bob", **SPAN).content.decode()
    (row,) = Absence.objects.all()
    assert (row.person_id, row.created_by_id) == (str(ann.pk), str(ann.pk))
    assert "bob" in page and "End it now" in page
    assert "ar-person" not in page, "only with the permission for others"
    page = post(client, end=str(row.pk)).content.decode()
    assert "No absence is planned." in page


@pytest.mark.parametrize(
    "sent",
    [
        {"delegate": "viewer"}, {"delegate": "ann"}, {"delegate": "nobody"}, {"delegate": "a\0b"}, {},
        {"delegate": "bob", "ends_at": "soon"}, {"delegate": "bob", "ends_at": "2029-01-01T08:00"},
        {"delegate": "ann", "person": "bob"}, {"delegate": "ann", "person": "nobody"},
    ],
)  # fmt: skip
def test_what_is_refused_changes_nothing(sent: dict[str, str], client: Client, ann: Any) -> None:
    response = post(client, **{**SPAN, **sent})
    assert response.status_code == 400
    assert "Nothing was changed." in response.content.decode()
    assert not Absence.objects.exists()


def test_with_the_permission_one_plans_those_of_others(client: Client, ann: Any) -> None:
    client.force_login(user("boss", "decide_approval", "plan_absence", is_staff=True))
    page = post(client, person="ann", delegate="bob", **SPAN).content.decode()
    assert "ar-person" in page
    (row,) = Absence.objects.all()
    assert row.person_id == str(ann.pk)
    client.force_login(user("other", "decide_approval", is_staff=True))
    post(client, end=str(row.pk))
    row.refresh_from_db()
    assert row.ends_at.year == 2030
