"""API tokens in the console: who sees them, who ends them, and that nobody sees a secret."""

from __future__ import annotations

from datetime import timedelta

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


def test_who_only_sees_somebody_elses_token_does_not_end_it(requests_commit: str) -> None:
    """Who sees and ends tokens, `tests/doors/test_matrix.py` asks of everybody."""
    user("viewer").user_permissions.add(Permission.objects.get(codename="view_apitoken"))
    token, _text = create_token(user("decider"), ["runs:read"])
    client, before = browser("viewer"), ApiToken.objects.values().get()
    for page in (LIST, url(token), url(token, "history")):
        assert client.get(page).status_code == 200, page
    for ask in (client.get, client.head):
        assert ask(url(token, "revoke")).status_code == 302
    response = client.post(url(token, "revoke"))
    assert response.status_code == 403
    assert "permission agentruns.revoke_api_token is missing" in read(response).text
    page = read(client.get(url(token)))
    assert (page.disabled, url(token, "revoke") in page.forms) == (["ar-revoke-why"], False)
    assert (ApiToken.objects.values().get(), LogEntry.objects.count()) == (before, 0)


def test_everybody_sees_and_ends_their_own_and_no_other() -> None:
    other, _text = create_token(user("viewer"), ["runs:read"], name="other")
    for role in ("staff", "decider"):
        client = browser(role)
        assert "apitoken" not in client.get("/admin/").content.decode(), "who has none finds no list"
        mine, _text = create_token(user(role), ["runs:read"], name="mine")
        page = listed("apitoken", role)
        assert (mine.prefix in page.text, other.prefix in page.text) == (True, False)
        for answer in (client.get(url(other)), client.post(url(other, "revoke"))):
            assert answer.status_code == 404
        assert client.post(url(mine, "revoke")).status_code == 302
        assert list(ApiToken.objects.filter(revoked_at=None)) == [other]
    superuser, counts = browser("superuser"), []
    assert "apitoken" in superuser.get("/admin/").content.decode()
    for number in range(6):
        create_token(user(ROLES[2 + number % 3]), ["runs:read"])
        counts.append(len(queries(lambda: says(superuser.get(LIST)))))
    assert counts[0] == counts[-1], "more tokens cost no more"


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
