"""No page of the console shows what AGENTRUNS_REDACT takes out; the journal, tools and model have it."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client
from django.urls import reverse

from agentruns import approve, pause_run
from agentruns.admin.html import body, plain, pretty, visible
from agentruns.admin.runs.calls import sentence
from agentruns.exceptions import ApprovalStateError
from agentruns.models import Approval, Message
from agentruns.utils.redaction import FAILED, redacted
from tests.admin.pages import look, send, url
from tests.admin.people import browser, user
from tests.redacting import CARD, FAIL, HIDE, KEY, Story, leaks, seen, story

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def told(settings: Any) -> Story:
    settings.AGENTRUNS_REDACT = HIDE
    return story(user("superuser"))


def pages(told: Story) -> list[str]:
    """List the URL of every page about the story."""
    runs, cards = (reverse(f"admin:agentruns_{name}_changelist") for name in ("run", "approval"))
    found = [runs, f"{runs}?status=person", f"{runs}?q=talk", cards, f"{cards}?status=all"]
    found += [reverse("admin:index"), reverse("admin:app_list", args=["agentruns"])]
    for approval in Approval.objects.all():
        found += [url(approval), url(approval, "history")]
    for run in told.runs:
        found += [url(run), url(run, "history"), f"{url(run)}?after=0"]
        found += [url(run, "row", row.seq) for row in run.messages.all()]
    return found


def shown(client: Client, address: str) -> str:
    """Return a page as it was sent and as it is read."""
    response = client.get(address)
    assert response.status_code == 200, (address, response.status_code)
    html = response.content.decode()
    # What stands apart on the page may stand together in the text, such as a mark within a number.
    return html + unescape(html) + re.sub(r"<[^>]*>", "", html)


def test_what_somebody_typed_comes_back_to_them_as_it_is_and_to_nobody_else(told: Story) -> None:
    approval, typed = Approval.objects.filter(status="pending")[0], f"see {KEY}\u202e"
    answer = send(approval, "edit", **{"argument-nothing": "x", "reason": typed})
    assert answer.status_code == 400
    fields = unescape(answer.content.decode())
    assert f">\n{typed}</textarea>" in fields, "else a correction would store the mask"
    assert KEY not in fields.replace(f">\n{typed}</textarea>", "")
    for role in ("superuser", "decider"):
        assert KEY not in shown(browser(role), url(approval))
    approval.refresh_from_db()
    assert approval.status == "pending"


def test_no_page_and_no_answer_to_a_button_shows_a_secret(told: Story) -> None:
    client = browser("superuser")
    found = {address: leaks(shown(client, address)) for address in pages(told)}
    assert {address: one for address, one in found.items() if one} == {}
    look(told.done, "I use [key]", "done with [card]", "no access with [key]", "[key] leaked", "talk [card]")
    pause_run(told.waiting.run_id, None, reason="x" * 185 + f" {KEY}")
    html = shown(client, url(told.waiting))
    assert ("Its run is paused" in html, KEY[:8] in html) == (True, False), "no card cuts it in two"
    given = {"a": "y " * 28, "b": "y " * 28, "c": "y " * 28, "d": f"{'y' * 15} {KEY}"}
    assert leaks(sentence("pay", given)) == []
    answers = [
        send(Approval.objects.get(status="denied"), "deny", reason="late"),
        send(told.waiting, "deny", digest="old", reason="wrong digest"),
        send(told.waiting, "deny", reason=f"no {KEY} here", follow=True),
        client.post(url(told.queued, "cancel"), {"reason": f"no {CARD} here"}, follow=True),
        client.post(url(told.done, "resume"), {"seq": "1"}),
    ]
    assert [answer.status_code for answer in answers] == [409, 409, 200, 200, 409]
    assert [leaks(answer.content.decode()) for answer in answers] == [[]] * 5
    assert Approval.objects.get(pk=told.waiting.pk).reason == f"no {KEY} here"
    entries = "\n".join(f"{one.object_repr} {one.get_change_message()}" for one in LogEntry.objects.all())
    assert leaks(entries) == []
    assert leaks("".join(shown(client, address) for address in pages(told))) == []


def test_the_journal_the_tool_and_the_model_have_the_true_values(told: Story) -> None:
    payloads = "".join(str(row.payload) for row in Message.objects.all())
    assert "[card]" not in payloads and "[key]" not in payloads
    assert (told.done.output, told.done.session.key) == (f"done with {CARD}\nand {KEY}", f"talk {CARD}")
    assert seen[1] == KEY
    assert (CARD, int(CARD), {KEY: [f"line\n{CARD}\nline"]}) in seen
    asked = [str(request.messages) for request in seen if hasattr(request, "messages")]
    assert CARD in asked[0] and f"no access with {KEY}" in asked[1]
    assert f"{KEY} leaked" in asked[3]
    assert "[card]" not in "".join(asked) and "[key]" not in "".join(asked)


def test_an_edit_that_carries_what_was_shown_is_refused(told: Story) -> None:
    approval = told.waiting
    arguments = approval.arguments
    for name in ("card", "note"):
        with pytest.raises(ApprovalStateError, match=f"The edited {name} holds the mask"):
            approve(approval.pk, None, arguments={**arguments, name: redacted(arguments[name])})
    with pytest.raises(ApprovalStateError, match="The edited pin holds the mask"):
        approve(approval.pk, None, arguments={**arguments, "pin": "see [card]"})
    approval.refresh_from_db()
    assert (approval.status, approval.arguments) == ("pending", arguments)
    edited = approve(approval.pk, None, arguments={**arguments, "card": CARD[::-1]})
    assert (edited.status, edited.arguments["card"]) == ("approved", CARD[::-1])


def test_a_function_that_fails_hides_all_and_without_one_pages_show_all(told: Story, settings: Any) -> None:
    settings.AGENTRUNS_REDACT = FAIL
    client = browser("superuser")
    for address in pages(told):
        text = shown(client, address)
        assert leaks(text) == [], address
    assert FAILED in text
    assert FAILED in look(told.waiting).text
    settings.AGENTRUNS_REDACT = None
    look(told.done, f"I use {KEY}", f"done with {CARD}", f"talk {CARD}", f"{KEY} leaked")
    look(told.waiting, f"Charge {CARD}")


def tagged(text: str) -> str:
    return text.replace("<b>", "<i>")


def test_a_text_is_redacted_before_it_is_cut_and_before_it_is_escaped(settings: Any) -> None:
    settings.AGENTRUNS_REDACT = HIDE
    shown = body("It said", f"pay {CARD} now", 8)
    assert (shown.text, shown.left_out) == ("pay [car", 6)
    settings.AGENTRUNS_REDACT = f"{__name__}.tagged"
    assert visible("a <b> c") == "a &lt;i&gt; c"
    assert plain("a <b> c") == "a <i> c"
    assert pretty({"text": "one\n<b>"}) == '{"text": "one\\n<i>"}'
