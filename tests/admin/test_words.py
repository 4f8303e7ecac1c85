"""Pages, mails and messages are in people's words: what is inside the engine stays under *Raw*."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from agentruns import approve, cancel_run, deny, fork_run
from agentruns.models import Approval, Run
from agentruns.services.approvals.decisions import answer
from agentruns.services.sweep import sweep
from tests.admin import doubts
from tests.admin.pages import url
from tests.admin.people import browser, user
from tests.admin.world import World
from tests.browser.desk import CARD, CREDIT, MAIL, QUESTION, REFUND, Desk
from tests.packaging.translations import PACKAGE, called, sources, templates
from tests.shop.agents import call, shop_agent

ENGINE = re.compile(
    r"\b(epochs?|sweep\w*|fold(ed|s)?|surfac\w+|orphan\w*|digests?|seq|leases?|append\w*|payloads?|handlers?)\b",
    re.IGNORECASE,
)
# Not in words of ours: rows as stored, what a tool or a model wrote, the names of permissions and agents.
RAW = re.compile(
    r"<details>\s*<summary>Raw.*?</details>|<(pre|code|style|script)\b.*?</\1>"
    r'|<option value="([^"]+)"[^>]*>\2</option>',
    re.DOTALL,
)
SAID = re.compile(r'{% translate "([^"]*)"|{% blocktranslate[^%]*%}(.*?){% endblocktranslate', re.DOTALL)
RUNS, QUEUE = "/admin/agentruns/run/", "/admin/agentruns/approval/"


def test_no_text_for_people_names_the_inside_of_the_engine() -> None:
    """The names of columns, in `models`, stand on no page."""
    said = [
        (path.relative_to(PACKAGE), text)
        for path, tree in sources()
        if path.parent.name != "models"
        for _call, texts in called(tree)
        for text in texts
    ]
    said += [(path.name, "".join(found)) for path, html in templates() for found in SAID.findall(html)]
    assert said
    placeholder = re.compile(r"%\(\w+\)|{{.*?}}")
    assert [(path, text) for path, text in said if ENGINE.search(placeholder.sub("", text))] == []


@pytest.mark.django_db(transaction=True)
def test_no_page_that_people_work_with_does(settings: Any, mailoutbox: list[Any]) -> None:
    settings.AGENTRUNS_NOTIFIERS = ["agentruns.contrib.mail.MailNotifier"]
    settings.AGENTRUNS_NOTIFY_EMAILS = ["ops@shop.example"]
    shop_agent("surfaces")  # any project may call an agent so
    _history()
    sweep()
    client = browser("superuser")
    for path in _paths():
        response = client.get(path)
        assert response.status_code in (200, 409), path
        text = re.sub(r"<[^>]*>", " ", RAW.sub(" ", response.content.decode()))
        assert not ENGINE.search(text), (path, ENGINE.search(text), text)
    assert mailoutbox
    assert [letter.body for letter in mailoutbox if ENGINE.search(f"{letter.subject} {letter.body}")] == []


def _history() -> None:
    """Let runs end, wait, fail and be in doubt in every way, and people decide in every way."""
    desk, world, maria, jonas = Desk(), World(), user("superuser"), user("decider")
    done, half = desk.kettle(), desk.one(CREDIT)
    approve(done.pk, maria, digest=done.digest, reason="He is right.")
    approve(half.pk, jonas, digest=half.digest)
    deny(desk.one(MAIL).pk, maria, "Call him.")
    asked = desk.one(QUESTION)
    answer(asked.pk, jonas, "Yes, a new one", digest=asked.digest)
    cancel_run(desk.one(CARD).run_id, maria, reason="Wrong customer.")
    desk.ask(REFUND, MAIL)
    desk.one(QUESTION)
    late = desk.one(CARD)
    Approval.objects.filter(pk=late.pk).update(expires_at="2026-01-01T00:00Z")
    desk.in_doubt()
    doubts.uncleared("uncleared")
    doubts.timed_out("sent")[1].report()
    for verdict in ("occurred", "not_occurred"):
        doubts.give(doubts.in_doubt(session=verdict), verdict, result="sent")
    world.paused()
    world.queued()
    fork_run(world.completed().pk, at=3, actor=maria, text="And now?")
    doubts.start({"tools": [call("post", text="a")]}, session="limit", max_steps=1)
    shop_agent("queued-changed", {"text": "x"})
    world.queued("changed")
    shop_agent("queued-changed", {"text": "x"}, instructions="Something else.")


def _paths() -> Iterator[str]:
    yield from ("/admin/", "/admin/agentruns/", "/admin/agentruns/apitoken/", QUEUE, f"{QUEUE}?status=all")
    yield from (RUNS, f"{RUNS}start/", f"{RUNS}costs/", f"{RUNS}in-doubt/", f"{RUNS}?q=nothing")
    for approval in Approval.objects.all():
        yield url(approval)
        yield url(approval, "history")
        if approval.status == "pending":
            yield f"{QUEUE}turn/{approval.run_id}/"
    for run in Run.objects.all():
        yield from (url(run), url(run, "at"), url(run, "replay"), url(run, "history"))
        if run.messages.exists():
            yield url(run, "erase", run.messages.filter(kind="user")[0].seq)
        for call_id in set(run.messages.filter(kind="tool_started").values_list("call_id", flat=True)):
            yield url(run, "call", call_id)
