"""What a model, a tool or a caller wrote is text: escaped, visible, never markup, never a 500."""

from __future__ import annotations

from itertools import product

import pytest
from django.urls import reverse

from agentruns import approve, deny
from agentruns.models import Approval, Run, Session
from agentruns.services.sweep import sweep
from tests.admin.pages import look, says, send, url
from tests.admin.people import browser, user
from tests.admin.texts import HOSTILE, explode, write
from tests.admin.world import ran
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)
LISTS = [reverse(f"admin:agentruns_{model}_changelist") for model in ("run", "approval")]


def started(text: str) -> Approval:
    """Let everybody write a text; return the call that waits for a decision."""
    turns = [
        {"text": text, "tools": [call("write", text=text), call("explode", text=text)]},
        {"tools": [call("write", text=text + "!")]},
        {"text": f"done {text}"},
    ]
    options = {"instructions": text, "tools": [write, explode], "actor": user("viewer")}
    run = ran("hostile", *turns, text=f"do {text}", **options)
    # Names that are refused today may be in rows of yesterday.
    name = "".join(character for character in text if character not in "\x00\ud800")
    Session.objects.update(key=f"s {name}")
    Run.objects.update(owner_name=f"u {name}", idempotency_key=f"k {name}")
    return run.approvals.get()


def assert_all_pages_are_sound(run: Run) -> str:
    """Read every page there is of a run, and return the text of them all."""
    client, text = browser("superuser"), ""
    paths = [*LISTS, LISTS[1] + "?status=all", url(run), url(run, "history"), reverse("admin:index")]
    for path in (*paths, *map(url, run.approvals.all())):
        page = says(client.get(path))
        assert not {"object", "iframe", "base", "embed"} & set(page.tags), path
        assert not [link for link in page.links if "evil" in link or "javascript" in link], path
        text += page.text
    for row in run.messages.all():
        response = client.get(url(run, "row", row.seq))
        assert response.status_code == 200
        assert response["Content-Type"].startswith("text/plain")
    return text


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_every_field_of_a_run_that_waits_and_has_ended(hostile: str) -> None:
    first = started(hostile)
    before = assert_all_pages_are_sound(first.run)
    approve(first.pk, user("superuser"), digest=first.digest, reason=hostile)
    sweep()
    run = Run.objects.get(pk=first.run_id)
    second = run.approvals.get(status="pending")
    deny(second.pk, user("superuser"), hostile, digest=second.digest)
    sweep()
    run.refresh_from_db()
    assert run.status == "completed"
    after = assert_all_pages_are_sound(run)
    if hostile.isprintable():
        assert hostile in before
        assert f"done {hostile}" in after


def test_what_a_person_typed_is_shown_as_it_is_and_kept_by_a_refused_form() -> None:
    approval, reason = started(HOSTILE["bidi"]), "</textarea><script>alert(1)</script>"
    page = look(approval, "pay U+202E0005U+202C to U+2066AnnU+2069")
    assert 'title="RIGHT-TO-LEFT OVERRIDE"' in page.html, "hidden characters have names"
    says(send(approval, "deny", digest="", reason=reason), reason, status=400)
    assert send(approval, "deny", reason="<b>no</b> \u202eoN").status_code == 302
    assert "<b>no</b> U+202EoN" in look(approval).text
    client = browser("superuser")
    for query, path, key in product(HOSTILE.values(), LISTS, ("q", "status", "agent")):
        response = client.get(path, {key: query.encode(errors="replace")})
        assert response.status_code in (200, 302), (key, query)
