"""Two tenants in one project: no list, search, count, stream, export or card shows what is the other's."""

from __future__ import annotations

import pytest

from agentruns import start_run
from agentruns.models import Run, Session
from tests.api.http import Api
from tests.tenants.project import KEY, TENANTS, user

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("two")]


RUNS, APPROVALS = "/admin/agentruns/run/", "/admin/agentruns/approval/"
LISTS = [
    "/api/runs", "/api/runs?status=awaiting-approval&agent=shop-south", f"/api/runs?session={KEY}",
    f"/api/runs?session={KEY}&scope=south", "/api/approvals", "/api/approvals?status=pending",
    f"/api/sessions/{KEY}",
]  # fmt: skip
SEARCHED = [f"{each}?q={word}" for each in (RUNS, APPROVALS) for word in (KEY, "plain@south")]
PAGES = ["/admin/", RUNS, APPROVALS, f"{APPROVALS}?mine=yes", *SEARCHED]  # of the console


def test_the_same_keys_are_two_sessions_and_two_runs(two: dict[str, Run]) -> None:
    assert sorted(Session.objects.values_list("scope", "key")) == [("north", KEY), ("south", KEY)]
    assert {tenant: (run.scope, run.context) for tenant, run in two.items()} == {
        tenant: (tenant, {"tenant": tenant}) for tenant in TENANTS
    }


@pytest.mark.parametrize("role", ["plain", "staff"])
def test_lists_show_one_tenant(two: dict[str, Run], role: str) -> None:
    north = Api(user("north", role))
    for path in LISTS + (PAGES if role == "staff" else []):
        shown = north.client.get(path).content.decode()
        assert "secret-south" not in shown, path
        assert str(two["south"].pk) not in shown, path
        for asked in ("q=plain@south", 'value="plain@south"', "No match for <strong>plain@south"):
            shown = shown.replace(asked, "")
        assert "plain@south" not in shown, path
    assert len(north.get("/runs")[1]["items"]) == 1


def test_nobody_starts_in_anothers_scope(two: dict[str, Run]) -> None:
    body = {"agent": "shop-north", "input": "x", "session": KEY}
    south = str(user("south").pk)
    for role in ("plain", "staff"):
        north = Api(user("north", role))
        for members in ({"scope": "south"}, {"owner": south}):
            status, problem = north.post("/runs", {**body, **members})
            assert (status, "south" in problem["detail"]) == (403, False)
    assert start_run("shop-north", "x", KEY).scope == ""  # the program's is a third
