"""API tokens: the list and a token's page are usable by everybody, and Revoke works."""

from __future__ import annotations

from datetime import timedelta

from agentruns.services.api_tokens import authenticate, create_token, revoke
from tests.admin.people import user
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitor

TOKENS = "/admin/agentruns/apitoken/"


def test_a_token_is_found_and_revoked(visitor: Visitor) -> None:
    owner = user("decider")
    _inbox, text = create_token(owner, ["runs:read", "approvals:decide"], name="Inbox of the night shift")
    ended, _text = create_token(user("viewer"), ["runs:read"], expires_in=timedelta(days=30))
    revoke(ended.pk, None)
    authenticate(text)
    visitor.open(TOKENS)
    assert_sound(visitor.page)
    visitor.click(visitor.link(text[:15]))
    visitor.unfold()
    assert_sound(visitor.page)
    visitor.choose("Revoke the token")
    visitor.wait_for("Revoked. No request with it is accepted any more.")
    assert authenticate(text) is None
