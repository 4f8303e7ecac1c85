"""Two tenants in one project: no list, search, count, stream, export or card shows what is the other's."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils.module_loading import import_string

from agentruns import session_token, start_run
from agentruns.exceptions import NotFoundError, PermissionDeniedError
from agentruns.models import ApiToken, Run, Session
from agentruns.services.api_tokens import create_token, revoke
from agentruns.services.switches import switch, switched_off
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


TOKENS, SWITCHES = "/admin/agentruns/apitoken/", f"{RUNS}switches/"
TTL = timedelta(minutes=5)


@pytest.fixture
def tokens(two: dict[str, Run]) -> dict[str, list[ApiToken]]:
    """Two tokens of each tenant: of a user, and of a session without runs."""
    made = {}
    for tenant in TENANTS:
        token, _text = create_token(user(tenant), ["runs:read"], name=f"secret-{tenant}")
        session_token(f"secret-{tenant}-visitor", TTL, scope=tenant)
        made[tenant] = [token, ApiToken.objects.get(session__scope=tenant)]
    return made


@pytest.mark.parametrize("policy", ["tests.tenants.policy.Policy", "tests.doors.policies.ByName"])
def test_tokens_are_seen_found_and_revoked_by_their_own_tenant(
    tokens: dict[str, list[ApiToken]], policy: str, settings: Any
) -> None:
    settings.AGENTRUNS_POLICY = policy
    north, south = Api(user("north", "staff")).client, tokens["south"]
    searches = [f"?q={each.prefix[:12]}" for each in south] + ["", "?q=secret", "?state=active"]
    for page in (TOKENS + each for each in [*searches, "?_facets=True"]):
        text = north.get(page, follow=True).content.decode()
        for hidden in ("secret-south", "@south", *(f"{each.prefix}…" for each in south)):
            assert hidden not in text, page
    assert "secret-north" in north.get(f"{TOKENS}?q=secret").content.decode()
    for token in south:
        for how, action in ((north.get, "change"), (north.get, "history"), (north.post, "revoke")):
            assert how(f"{TOKENS}{token.pk}/{action}/").status_code in (302, 404)
        with pytest.raises(NotFoundError, match="There is no API token"):
            revoke(token.pk, user("north", "staff"))
    assert not ApiToken.objects.exclude(revoked_at=None).exists()
    assert north.post(f"{TOKENS}{tokens['north'][0].pk}/revoke/").status_code == 302
    assert revoke(tokens["south"][0].pk, user("south")), "one's own"
    assert ApiToken.objects.exclude(revoked_at=None).count() == 2


def test_nobody_makes_a_token_for_others_or_for_anothers_scope(two: dict[str, Run]) -> None:
    ann, plain, session = user("north", "staff"), user("north"), Session.objects.get(scope="south")
    for whose, scopes, actor in (
        (user("south"), ["runs:read"], ann), (plain, ["runs:read"], ann), (plain, ["runs:act_for"], plain),
    ):  # fmt: skip
        with pytest.raises(PermissionDeniedError):
            create_token(whose, scopes, actor=actor)
    for about, scope in ((session, None), ("new", "south"), ("new", "north")):
        with pytest.raises(PermissionDeniedError):
            session_token(about, TTL, scope=scope, actor=plain)
    assert not ApiToken.objects.exists() and not Session.objects.filter(key="new").exists()
    create_token(ann, ["runs:act_for"], actor=ann)
    session_token(Session.objects.get(scope="north"), TTL, actor=ann)


def test_a_tenant_switches_nothing_unless_the_policy_allows_it(
    two: dict[str, Run], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch would stop later runs of others, too."""
    ann, tool = user("north", "staff"), ("tool", "refund")
    own = ("agent", "shop-north")  # all of its runs are of this tenant
    switch("agent", "shop-south", "off", reason="secret-south")
    switch(*tool, "off", reason="secret-south")
    client = Api(ann).client
    text = client.get(SWITCHES).content.decode() + client.get("/admin/").content.decode()
    for hidden in ('value="shop-north"', "south", 'value="refund"', "switched off"):
        assert hidden not in text
    for kind, name in (own, ("agent", "shop-south"), tool, ("agent", "nothing"), ("tool", "nothing")):
        for state in ("on", "off"):
            with pytest.raises(PermissionDeniedError):
                switch(kind, name, state, ann, reason="x")
            data = {"kind": kind, "name": name, "state": state, "reason": "x"}
            assert client.post(SWITCHES, data).status_code == 403
    assert [*switched_off()] == [("agent", "shop-south"), tool]
    assert [*switched_off(ann)] == []
    assert switch(*tool, "on", User.objects.create_superuser("root"))
    policy = import_string(settings.AGENTRUNS_POLICY)
    monkeypatch.setattr(policy, "can", lambda self, user, action, obj: obj == own, raising=False)
    assert switch(*own, "off", ann, reason="x")
    assert [*switched_off(ann)] == [own]
