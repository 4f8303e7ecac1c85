"""API tokens in the console: who sees them, who ends them, and that nobody sees a secret."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.urls import reverse

from agentruns.models import ApiToken
from agentruns.services.api_tokens import authenticate, create_token, revoke
from agentruns.testing import frozen_clock
from tests.admin.pages import listed, queries, read, says
from tests.admin.people import ROLES, browser, user

pytestmark = pytest.mark.django_db

LIST = "/admin/agentruns/apitoken/"


def url(token: ApiToken, action: str = "change") -> str:
    return reverse(f"admin:agentruns_apitoken_{action}", args=[token.pk])


# Each role, with the permission it is given: sees everybody's tokens, revokes everybody's tokens.
MATRIX = {
    "anonymous": ("", False, False),
    "outsider": ("revoke_api_token", False, False),
    "staff": ("", False, False),
    "viewer": ("view_apitoken", True, False),
    "resolver": ("revoke_api_token", True, True),
    "superuser": ("", True, True),
}


@pytest.mark.parametrize("role", MATRIX)
def test_who_sees_and_ends_somebody_elses_token(role: str, requests_commit: str) -> None:
    codename, sees, revokes = MATRIX[role]
    if codename:
        user(role).user_permissions.add(Permission.objects.get(codename=codename))
    token, _text = create_token(user("decider"), ["runs:read"])
    client, login = browser(role), role in ("anonymous", "outsider")
    refused = 302 if login else 403
    for page in (LIST, url(token)):
        assert client.get(page).status_code == (200 if sees else refused), page
    assert (client.get(url(token, "history")).status_code == 200) is sees
    before = ApiToken.objects.values().get()
    for method in ("get", "head"):
        response = getattr(client, method)(url(token, "revoke"))
        assert response.status_code == (302 if sees else refused)
    assert ApiToken.objects.values().get() == before
    response = client.post(url(token, "revoke"))
    assert response.status_code == (302 if revokes else refused)
    token.refresh_from_db()
    assert (token.revoked_at is not None) is revokes
    assert LogEntry.objects.count() == revokes
    if sees and not revokes:
        assert "permission agentruns.revoke_api_token is missing" in read(response).text
        page = read(client.get(url(token)))
        assert (page.disabled, url(token, "revoke") in page.forms) == (["ar-revoke-why"], False)


@pytest.mark.parametrize("role", ["staff", "decider"])
def test_everybody_sees_and_ends_their_own_and_no_other(role: str) -> None:
    mine, _text = create_token(user(role), ["runs:read"], name="mine")
    other, _text = create_token(user("viewer"), ["runs:read"], name="other")
    client, page = browser(role), listed("apitoken", role)
    assert mine.prefix in page.text
    assert other.prefix not in page.text
    assert [client.get(url(other)).status_code, client.post(url(other, "revoke")).status_code] == [404, 404]
    assert client.post(url(mine, "revoke")).status_code == 302
    assert list(ApiToken.objects.filter(revoked_at=None)) == [other]


def test_who_has_none_and_may_not_look_finds_no_list() -> None:
    for role, sees in {"viewer": False, "superuser": True}.items():
        assert ("apitoken" in browser(role).get("/admin/").content.decode()) is sees


def test_revoking_ends_it_at_once_is_logged_and_happens_once() -> None:
    token, text = create_token(user("decider"), ["approvals:decide"], name="inbox")
    client = browser("superuser", enforce_csrf_checks=True)
    assert client.post(url(token, "revoke")).status_code == 403
    assert authenticate(text) is not None
    form = read(client.get(url(token))).forms[url(token, "revoke")]
    for said in ("Revoked. No request with it is accepted", "It was revoked already."):
        response = client.post(url(token, "revoke"), form, follow=True)
        assert response.redirect_chain == [(url(token), 302)]
        assert said in read(response).text
        assert authenticate(text) is None
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.get_change_message()) == (
        user("superuser"), str(token.pk), "Revoked.",
    )  # fmt: skip
    page = read(client.get(url(token)))
    assert (page.disabled, url(token, "revoke") in page.forms) == (["ar-revoke-why"], False)


def test_what_the_list_and_the_page_tell() -> None:
    with frozen_clock() as clock:
        owner = user("decider")
        current, text = create_token(owner, ["runs:read"], name="nightly")
        ended, _text = create_token(owner, ["runs:read"], name="ended")
        create_token(owner, ["runs:read"], name="idle", expires_in=timedelta(hours=2))
        create_token(user("staff"), ["runs:read"], name="<b>orphaned\u3164")
        user("staff").delete()
        clock.forward(hours=1)
        assert authenticate(text) is not None
        assert revoke(ended.pk, owner)
        clock.forward(hours=2)
        for state, names in {
            "active": {"nightly", "orphaned"}, "expired": {"idle"}, "revoked": {"ended"}, "made-up": set(),
        }.items():  # fmt: skip
            shown = listed("apitoken", state=state).text
            assert {name for name in ("nightly", "ended", "idle", "orphaned") if name in shown} == names
        page = listed("apitoken")
        for told in ("<b>orphanedU+3164", "owner gone", "never used", "active", "expired", "revoked"):
            assert told in page.text
        assert "idle" not in listed("apitoken", q=current.prefix[:9]).text
        assert "nightly" in listed("apitoken", q=current.prefix[:9]).text
        page = read(browser("superuser").get(url(current)))
        assert "runs:read read runs" in page.text
        assert reverse("admin:auth_user_change", args=[owner.pk]) in page.links
        type(owner).objects.filter(pk=owner.pk).update(is_active=False)
        assert "owner not active" in listed("apitoken").text
    assert browser("superuser").get(LIST + "x/change/").status_code == 404


def test_nobody_sees_a_secret_and_nothing_can_be_added_edited_or_deleted() -> None:
    token, text = create_token(user("decider"), ["runs:read"])
    secret, digest = text.removeprefix(token.prefix + "_"), token.digest
    client = browser("superuser")
    pages = [LIST, url(token), url(token, "history"), f"{LIST}?digest={digest}", f"{LIST}?q={digest}"]
    for page in pages:
        body = client.get(page, follow=True).content.decode()
        assert secret not in body
        assert page.endswith(digest) or digest not in body
    before = ApiToken.objects.values().get()
    assert client.get(LIST + "add/").status_code == 403
    for target in (LIST + "add/", url(token), url(token, "delete")):
        assert client.post(target, {"name": "x", "post": "yes"}).status_code == 403
    client.post(LIST, {"action": "delete_selected", "_selected_action": str(token.pk), "post": "yes"})
    assert ApiToken.objects.values().get() == before


def test_more_tokens_cost_no_more_queries() -> None:
    client, counts = browser("superuser"), []
    for _round in range(2):
        for number in range(3):
            create_token(user(ROLES[2 + number]), ["runs:read"])
        counts.append(len(queries(lambda: says(client.get(LIST)))))
    assert counts[0] == counts[1]


@pytest.mark.django_db(databases=["default", "other"])
def test_tokens_in_the_journals_own_database(settings: Any) -> None:
    settings.AGENTRUNS_DATABASE = "other"
    token, _text = create_token(user("decider"), ["runs:read"])
    assert "decider" in listed("apitoken").text
    assert browser("superuser").post(url(token, "revoke")).status_code == 302
    assert ApiToken.objects.using("other").get().revoked_at is not None
