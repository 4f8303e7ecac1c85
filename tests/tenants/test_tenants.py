"""Two tenants in one project: no list, search, count, stream, export or card shows what is the other's."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import start_run
from agentruns.models import Approval, Run, Session
from tests.tenants.project import KEY, TENANTS, api, browse, user

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("two")]


def text(response: Any) -> str:
    content = b"".join(response.streaming_content) if response.streaming else response.content
    return str(content.decode())


def lists() -> list[str]:
    """Return the pages that list, search or count."""
    return [
        "/api/runs",
        "/api/runs?status=awaiting-approval&agent=shop-south",
        f"/api/runs?session={KEY}",
        f"/api/runs?session={KEY}&scope=south",
        "/api/approvals",
        "/api/approvals?status=pending",
        f"/api/sessions/{KEY}",
    ]


def pages() -> list[str]:
    """Return the console's pages that list, search or count."""
    runs, approvals = "/admin/agentruns/run/", "/admin/agentruns/approval/"
    searched = [f"{each}?q={word}" for each in (runs, approvals) for word in (KEY, "plain@south")]
    return ["/admin/", runs, approvals, f"{approvals}?mine=yes", *searched]


def of(run: Run) -> list[str]:
    """Return the places of one run and its approval."""
    card = Approval.objects.get(run=run)
    api_run, page = f"/api/runs/{run.pk}", f"/admin/agentruns/run/{run.pk}"
    return [
        api_run,
        f"{api_run}/messages",
        f"{api_run}/state",
        f"{api_run}/events",
        f"/api/approvals/{card.pk}",
        f"{page}/change/",
        f"{page}/at/",
        f"{page}/replay/",
        f"{page}/export/",
        f"/admin/agentruns/approval/{card.pk}/change/",
    ]


def test_the_same_keys_are_two_sessions_and_two_runs(two: dict[str, Run]) -> None:
    assert sorted(Session.objects.values_list("scope", "key")) == [("north", KEY), ("south", KEY)]
    assert {tenant: (run.scope, run.context) for tenant, run in two.items()} == {
        tenant: (tenant, {"tenant": tenant}) for tenant in TENANTS
    }


@pytest.mark.parametrize("role", ["plain", "staff"])
def test_lists_show_one_tenant(two: dict[str, Run], role: str) -> None:
    north = user("north", role)
    for path in lists() + (pages() if role == "staff" else []):
        shown = text(browse(north, "get", path))
        assert "secret-south" not in shown, path
        assert str(two["south"].pk) not in shown, path
        for asked in ("q=plain@south", 'value="plain@south"', "No match for <strong>plain@south"):
            shown = shown.replace(asked, "")
        assert "plain@south" not in shown, path
    assert len(api(north, "get", "/runs")[1]["items"]) == 1


@pytest.mark.parametrize("role", ["plain", "staff"])
def test_what_is_anothers_is_not_there(two: dict[str, Run], role: str) -> None:
    north = user("north", role)
    for path in of(two["south"]):
        if role == "staff" or path.startswith("/api/"):
            for method in ("get", "post"):  # an export is a POST
                response = browse(north, method, path)
                # Django's admin goes home from what is not there; a page that only reads takes no POST.
                assert response.status_code in ((302, 404) if method == "get" else (302, 403, 404, 405)), path
                assert "secret-south" not in text(response), path


@pytest.mark.parametrize("role", ["plain", "staff"])
def test_nothing_is_done_to_anothers(two: dict[str, Run], role: str) -> None:
    north, south = user("north", role), two["south"]
    card = Approval.objects.get(run=south)
    rows = south.messages.count()
    for path, body in (
        (f"/runs/{south.pk}/cancel", {}),
        (f"/runs/{south.pk}/pause", {}),
        (f"/runs/{south.pk}/fork", {"at": 2}),
        (f"/approvals/{card.pk}/approve", {"digest": card.digest}),
        (f"/approvals/{card.pk}/deny", {"digest": card.digest, "reason": "no"}),
    ):
        assert api(north, "post", path, body)[0] == 404, path
    assert south.messages.count() == rows
    assert Run.objects.count() == 2


def test_nobody_starts_in_anothers_scope(two: dict[str, Run]) -> None:
    body = {"agent": "shop-north", "input": "x", "session": KEY}
    south = str(user("south").pk)
    for role in ("plain", "staff"):
        north = user("north", role)
        for members in ({"scope": "south"}, {"owner": south}):
            status, problem = api(north, "post", "/runs", {**body, **members})
            assert (status, "south" in problem["detail"]) == (403, False)
    assert start_run("shop-north", "x", KEY).scope == ""  # the program's is a third
