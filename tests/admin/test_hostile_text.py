"""What a model, a tool or a caller wrote is text: escaped, visible, never markup, never a 500."""

from __future__ import annotations

import pytest
from django.urls import reverse

from agentruns import Agent, approve, deny, run_agent
from agentruns.models import Approval, Run, Session
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.admin.pages import read, url
from tests.admin.people import browser, user
from tests.admin.texts import HOSTILE, explode, write
from tests.admin.world import World
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=list(HOSTILE))
def hostile(request: pytest.FixtureRequest) -> str:
    return HOSTILE[request.param]


def agent_saying(text: str) -> Agent:
    turns = [
        {"text": text, "tools": [call("write", text=text), call("explode", text=text)]},
        {"tools": [call("write", text=text + "!")]},
        {"text": f"done {text}"},
    ]
    return Agent("hostile", instructions=text, tools=[write, explode], model=ScriptedModel(turns))


def started(text: str) -> Approval:
    approval = run_agent(agent_saying(text), f"do {text}", "s1", actor=user("viewer")).pending[0]
    # Names that are refused today may be in rows of yesterday.
    name = "".join(character for character in text if character not in "\x00\ud800")
    Session.objects.update(key=f"s {name}")
    Run.objects.update(owner_name=f"u {name}", idempotency_key=f"k {name}")
    return Approval.objects.get(pk=approval.pk)


def assert_all_pages_are_sound(run: Run) -> str:
    """Read every page there is of a run, and return the text of them all."""
    client = browser("superuser")
    lists = [reverse("admin:agentruns_run_changelist"), reverse("admin:agentruns_approval_changelist")]
    pages = [*lists, lists[1] + "?status=all", url(run), url(run, "history"), reverse("admin:index")]
    pages += [url(approval) for approval in run.approvals.all()]
    text = ""
    for page in pages:
        response = client.get(page)
        assert response.status_code == 200, page
        parsed = read(response)
        assert not {"object", "iframe", "base", "embed"} & set(parsed.tags), page
        assert not [link for link in parsed.links if "evil" in link or "javascript" in link], page
        text += parsed.text
    for row in run.messages.all():
        response = client.get(url(run, "row", row.seq))
        assert response.status_code == 200
        assert response["Content-Type"].startswith("text/plain")
    return text


def test_every_field_of_a_run_that_waits(world: World, hostile: str) -> None:
    approval = started(hostile)
    text = assert_all_pages_are_sound(approval.run)
    if hostile.isprintable():
        assert hostile in text


def test_every_field_of_a_run_that_ended(world: World, hostile: str) -> None:
    first = started(hostile)
    approve(first.pk, user("superuser"), digest=first.digest, reason=hostile)
    sweep()
    run = Run.objects.get(pk=first.run_id)
    second = run.approvals.get(status="pending")
    deny(second.pk, user("superuser"), hostile, digest=second.digest)
    sweep()
    run.refresh_from_db()
    assert run.status == "completed"
    text = assert_all_pages_are_sound(run)
    if hostile.isprintable():
        assert f"done {hostile}" in text


def test_a_reason_typed_by_a_person_is_shown_as_it_is(world: World) -> None:
    approval = started("x")
    reason = "<b>no</b> \u202eoN"
    data = {"digest": approval.digest, "reason": reason}
    assert browser("superuser").post(url(approval, "deny"), data).status_code == 302
    page = read(browser("superuser").get(url(approval)))
    assert "<b>no</b> U+202EoN" in page.text


def test_a_refused_form_keeps_what_was_typed(world: World) -> None:
    approval = started("x")
    data = {"digest": "", "reason": "</textarea><script>alert(1)</script>"}
    response = browser("superuser").post(url(approval, "deny"), data)
    assert response.status_code == 400
    page = read(response)
    assert "</textarea><script>alert(1)</script>" in page.text


def test_hidden_characters_of_arguments_have_names(world: World) -> None:
    approval = started(HOSTILE["bidi"])
    response = browser("superuser").get(url(approval))
    assert "pay U+202E0005U+202C to U+2066AnnU+2069" in read(response).text
    assert 'title="RIGHT-TO-LEFT OVERRIDE"' in response.content.decode()


def test_hidden_characters_in_the_search_and_in_filters(world: World) -> None:
    approval, client = started("x"), browser("superuser")
    for query in HOSTILE.values():
        for name in ("run", "approval"):
            listing = reverse(f"admin:agentruns_{name}_changelist")
            for key in ("q", "status", "agent"):
                response = client.get(listing, {key: query.encode(errors="replace")})
                assert response.status_code in (200, 302), (key, query)
    assert Approval.objects.filter(pk=approval.pk).exists()
