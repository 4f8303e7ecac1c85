"""The card of a call in doubt: what is on it, who gets it, and that hostile text stays text."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils.html import escape

from agentruns import Occurred, Policy, ToolContext, Unknown, approve, tool
from agentruns.admin.html import exact
from agentruns.admin.runs import calls
from agentruns.engine.in_doubt import AFTER_UNKNOWN, UNKNOWN
from agentruns.exceptions import ToolDurabilityError
from agentruns.models import Approval, Run
from agentruns.services.sweep import sweep
from tests.admin.doubts import (
    EVIDENCE,
    Late,
    card,
    doubtful,
    finish,
    give,
    in_doubt,
    last,
    payload,
    start,
    timed_out,
)
from tests.admin.pages import read, snapshot, url
from tests.admin.people import ROLES, browser, user
from tests.admin.texts import HOSTILE
from tests.admin.world import ONCE, World
from tests.shop.agents import call

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("requests_commit")]


@ONCE
def test_the_card_has_what_one_looks_up_in_the_outside_world(world: World) -> None:
    run = in_doubt(call("post", text="later"))
    page = card(run)
    started = payload(run, "tool_started")
    began = run.messages.get(kind="tool_started").created_at
    for shown in (
        "wire: x", "It happened once or not at all.", "exactly these arguments",
        started["key"], "Attempt1", "nothing: it is not repeated by itself", "not limited",
        "nobody: no approval was needed", "The tool says that its outcome is unknown: no answer to x",
        "It waits for somebody who may give verdicts.",
        f"Started: {exact(began)} (", UNKNOWN.format(tool="wire"), AFTER_UNKNOWN,
        "post: later", "The model is told exactly the result that you enter.",
        "as attempt 2, with the same key",
    ):  # fmt: skip
        assert shown in page.text, shown
    below = page.text[page.text.index("A call of wire") :]
    order = [
        "It happened once or not at all.",
        "It waits for somebody who may give verdicts.",
        "What the tool does: Send a wire. Of the first attempt nobody knows whether it went out.",
        started["key"],
        "The tool declares: nothing: it is not repeated by itself, and nothing can be asked about it",
        "How you know",
        "exactly these arguments",
    ]
    places = [below.index(text) for text in order]
    assert places == sorted(places)
    assert url(run) in page.links
    assert f"{url(run)}?after={last(run, doubtful(run)) - 1}#row-{last(run, doubtful(run))}" in page.links
    assert set(page.forms) >= {url(run, "resolve", doubtful(run)), url(run, "cancel")}


@ONCE
def test_what_reconcile_said_stands_on_the_card(world: World) -> None:
    def ask(ctx: ToolContext, args: dict[str, Any]) -> Unknown:
        return Unknown("the bank is closed")

    @tool(reconcile=ask)
    def pay(ctx: ToolContext) -> str:
        """Pay."""
        raise MemoryError

    run = start({"tools": [call("pay")]}, tools=[pay])
    sweep()
    run.refresh_from_db()
    assert run.status == "orphaned"
    page = card(run)
    assert "reconcile does not know: the bank is closed" in page.text
    assert "reconcile: the outside system is asked by the key" in page.text
    assert "the outside system is asked" in page.text
    assert "each further call of pay" not in page.text


@ONCE
def test_a_call_that_was_approved_says_by_whom_and_has_its_title(world: World) -> None:
    @tool(requires_approval=True, describe=lambda args: f"Pay {args['cents']} cents")
    def pay(ctx: ToolContext, cents: int) -> str:
        """Pay."""
        raise MemoryError

    run = start({"tools": [call("pay", cents=7)]}, tools=[pay])
    approval = run.approvals.get()
    approve(approval.pk, user("decider"))
    finish(run)
    page = card(run)
    assert "Pay 7 cents" in page.text
    assert "decider, 20" in page.text
    assert url(approval) in page.links


@ONCE
def test_the_run_and_the_list_lead_to_the_card(world: World) -> None:
    run = in_doubt()
    target = url(run, "call", doubtful(run))
    page = read(browser("superuser").get(url(run)))
    assert target in page.links
    assert "Find out whether it happened, and say so on its card." in page.text
    html = browser("superuser").get(url(run)).content.decode()
    assert f'<a class="button default" href="{target}">Give a verdict</a>' in html
    assert html.count("<summary>Resume…</summary>") == 1
    assert '<details class="ar-action ar-quiet">\n      <summary>Resume…</summary>' in html
    listing = read(browser("superuser").get(reverse("admin:agentruns_run_changelist")))
    assert target in listing.links
    assert "A call of wire is in doubt" in listing.text


@ONCE
def test_who_may_give_no_verdict_is_asked_for_none(world: World) -> None:
    run = in_doubt()
    html = browser("viewer").get(url(run)).content.decode()
    target = url(run, "call", doubtful(run))
    assert f'<a class="button" href="{target}">Look at the call</a>' in html
    assert "Give a verdict" not in html
    assert "Find out whether it happened" not in html
    world.waiting("other")
    listed = browser("viewer").get(reverse("admin:agentruns_run_changelist")).content.decode()
    assert (listed.count("Look at it"), "Give a verdict" in listed, ">Decide<" in listed) == (2, False, False)


@ONCE
def test_the_card_costs_the_same_however_much_there_is(world: World) -> None:
    client = browser("superuser")

    def cost(run: Run) -> int:
        target = url(run, "call", doubtful(run))
        with CaptureQueriesContext(connection) as queries:
            assert client.get(target).status_code == 200
        return len(queries)

    turns = [{"tools": [call("post", text=str(number))]} for number in range(9)]
    later = [call("refund", cents=5000 + number) for number in range(5)]
    short = cost(in_doubt(session="short"))
    long = start(*turns, {"tools": [call("wire", text="x"), *later]}, session="long")
    assert long.status == "orphaned"
    assert cost(long) == short <= 14


@tool(sensitive=["iban"], describe=lambda args: f"Pay {args['to']} by {args['iban']}")
def pay(ctx: ToolContext, to: str, iban: str, about: str) -> dict[str, str]:
    """Pay; the second time nobody knows whether it went out."""
    if about == "twice":
        raise MemoryError
    return {"status": "paid", "iban": iban}


@ONCE
def test_a_call_in_doubt_is_named_as_people_say_it_with_what_its_sentence_leaves_out(world: World) -> None:
    once, twice = (call("pay", to="Ben", iban="DE02-secret", about=about) for about in ("once", "twice"))
    run = start({"tools": [once]}, {"tools": [twice]}, tools=[pay])
    page = card(run)
    assert "Pay Ben by ***" in page.text
    above = " ".join(page.text[: page.text.index("It happened once or not")].split())
    assert "Run do it in doubt" in above, "the first line of its task"
    before = page.text[: page.text.index("How you know")]
    assert "about: twice" in before
    assert 'An earlier call of it returned: {"iban": "***", "status": "paid"}' in page.text
    assert "secret" not in page.text
    listed = read(browser("superuser").get("/admin/agentruns/run/in-doubt/"))
    assert "pay: do it" in listed.text
    assert "For example: done by hand" in card(in_doubt(session="other")).text


@ONCE
def test_sensitive_arguments_are_shown_to_whom_may_see_them(world: World) -> None:
    @tool(sensitive=["token"])
    def charge_card(ctx: ToolContext, token: str, cents: int) -> str:
        """Charge."""
        raise MemoryError

    turn = {"tools": [call("charge_card", token="tok_42", cents=7), call("post", text="later")]}
    run = start(turn, tools=[charge_card])
    masked = card(run, "resolver")
    assert "tok_42" not in masked.text
    assert "charge card: 0.07" in masked.text
    assert "token: ***" in masked.text
    call_id = run.messages.get(kind="orphan_found").call_id
    page = card(run, "superuser")
    assert "tok_42" not in page.text
    assert url(run, "reveal", call_id) in page.forms
    assert browser("resolver").post(url(run, "reveal", call_id)).status_code == 403
    assert LogEntry.objects.count() == 0
    assert "tok_42" in read(browser("superuser").post(url(run, "reveal", call_id))).text
    assert call_id in LogEntry.objects.get().get_change_message()


@ONCE
def test_looking_changes_nothing(world: World) -> None:
    run, client = in_doubt(), browser("superuser")
    before = snapshot()
    for action in ("call", "resolve"):
        assert client.get(url(run, action, doubtful(run))).status_code in (200, 302)
        assert client.head(url(run, action, doubtful(run))).status_code in (200, 302)
    assert client.get(url(run, "resolve", doubtful(run))).url == url(run, "call", doubtful(run))
    assert snapshot() == before


@ONCE
@pytest.mark.parametrize("call_id", ["x", "018f0000-0000-7000-8000-000000000000", "a\x00b", "9" * 99, "'--"])
def test_a_call_that_is_not_there(world: World, call_id: str) -> None:
    run = in_doubt()
    for action in ("call", "resolve"):
        assert browser("superuser").post(url(run, action, call_id), {}).status_code == 404


@ONCE
def test_a_call_of_another_run_is_not_there(world: World) -> None:
    run, other = in_doubt(), in_doubt(session="s2")
    assert browser("superuser").get(url(other, "call", doubtful(run))).status_code == 404


@ONCE
def test_a_call_that_is_not_in_doubt_is_shown_and_not_decided(world: World) -> None:
    run = world.completed()
    call_id = payload(run, "assistant")["calls"][0]["id"]
    page = read(browser("superuser").get(url(run, "call", call_id)))
    assert "Tool finished, on" in page.text
    assert "once or not at all" not in page.text
    before = snapshot()
    data = {"seq": last(run, call_id), "verdict": "not_occurred", "evidence": EVIDENCE}
    response = browser("superuser").post(url(run, "resolve", call_id), data)
    assert response.status_code == 409
    assert "is not in doubt; there is nothing to decide." in read(response).text
    assert snapshot() == before


@ONCE
def test_a_call_that_waits_for_approval_has_a_page_too(world: World) -> None:
    approval = world.waiting()
    page = read(browser("superuser").get(url(approval.run, "call", approval.call_id)))
    assert "It has not been started." in page.text
    assert url(approval) in page.links


@pytest.mark.parametrize("role", ROLES)
def test_roles(world: World, role: str) -> None:
    run, client = in_doubt(), browser(role)
    sees = role in ("viewer", "operator", "resolver", "superuser")
    may = role in ("resolver", "superuser")
    before = snapshot()
    response = client.get(url(run, "call", doubtful(run)))
    target = url(run, "resolve", doubtful(run))
    if role in ("anonymous", "outsider"):
        assert response.url.startswith(reverse("admin:login"))
    else:
        assert response.status_code == (200 if sees else 403)
    if sees:
        page = read(response)
        assert (target in page.forms) == may
        assert ("You lack the permission agentruns.resolve_orphan." in page.text) == (not may)
    data = {"seq": last(run, doubtful(run)), "verdict": "occurred", "result": "sent", "evidence": EVIDENCE}
    response = client.post(target, data)
    expected = 302 if may or role in ("anonymous", "outsider") else 403
    assert response.status_code == expected
    if may:
        assert response.url == url(run)
        assert payload(run, "orphan_resolved")["actor"]["name"] == role
    else:
        assert snapshot() == before


def test_a_verdict_needs_the_token_of_the_page(world: World) -> None:
    run, client = in_doubt(), browser("superuser", enforce_csrf_checks=True)
    target, before = url(run, "resolve", doubtful(run)), snapshot()
    form = read(client.get(url(run, "call", doubtful(run)))).forms[target]
    data = {**form, "verdict": "occurred", "result": "sent", "evidence": EVIDENCE}
    token = data.pop("csrfmiddlewaretoken")
    assert client.post(target, data).status_code == 403
    assert snapshot() == before
    assert client.post(target, {**data, "csrfmiddlewaretoken": token}).status_code == 302


@ONCE
@pytest.mark.parametrize("name", list(HOSTILE))
def test_every_field_of_the_card(world: World, name: str) -> None:
    text = HOSTILE[name]
    late = Late({"wrote": text, text: text}, timeout=0.05)
    turn = {"tools": [call("wire", text=text), call("post", text=text)]}
    run = start(turn, tools=[late.tool], session="hostile")
    assert run.status == "orphaned"
    page = card(run)
    assert not [link for link in page.links if "evil" in link or "javascript" in link]
    if text.isprintable():
        assert page.text.count(text) >= 2
    typed = text.encode(errors="replace").replace(b"\x00", b"").decode()
    give(run, "not_occurred", evidence=typed)
    page = card(run)
    finish(run)
    if typed.isprintable():
        assert typed in page.text
    other, late = timed_out(text)
    late.report()
    for shown in (card(other), card(run), read(browser("superuser").get(url(run)))):
        assert not {"object", "iframe", "base", "embed"} & set(shown.tags)
        assert not [link for link in shown.links if "evil" in link or "javascript" in link]
    if text.isprintable():
        assert escape(text) in browser("superuser").get(url(other, "call", doubtful(other))).content.decode()


@ONCE
def test_the_projects_own_redaction_holds_on_the_card(world: World, settings: Any) -> None:
    settings.AGENTRUNS_REDACT = "tests.admin.test_orphans.without_numbers"
    run, late = timed_out("card 4111 was charged")
    late.report()
    html = browser("superuser").get(url(run, "call", doubtful(run))).content.decode()
    assert "card 4111" not in html
    assert "card [number] was charged" in html
    response = give(run, "occurred", result="card [number] was not charged")
    assert response.status_code == 400
    assert "Part of it is hidden here." in read(response).text
    give(run, "occurred", result="card [number] was charged")
    assert payload(run, "tool_result")["content"] == "card 4111 was charged"
    assert Approval.objects.count() == 0


def without_numbers(text: str) -> str:
    return text.replace("4111", "[number]")


@ONCE
def test_what_reconcile_found_is_said_to_be_its_word(world: World) -> None:
    @tool(reconcile=lambda ctx, args: Occurred("paid"))
    def pay(ctx: ToolContext) -> str:
        """Pay."""
        raise MemoryError

    run = finish(start({"tools": [call("pay")]}, tools=[pay]))
    assert run.status == "completed"
    page = read(browser("superuser").get(url(run, "call", doubtful(run))))
    assert "The outside system is asked by the key." in page.text
    assert "The outside system, asked by the key: it happened, 20" in page.text
    assert "Tool finished" not in page.text


QUEUE = "/admin/agentruns/run/in-doubt/"


@ONCE
def test_calls_in_doubt_are_a_queue(world: World) -> None:
    first, second, third = (in_doubt(session=f"s{number}", text=f"t{number}") for number in range(3))
    client = browser("resolver")
    page = read(client.get(QUEUE))
    targets = [url(run, "call", doubtful(run)) for run in (first, second, third)]
    assert [link for link in page.links if "/calls/" in link] == targets, "who waits longest is first"
    assert "The tool says that its outcome is unknown: no answer to t1" in page.text
    page = card(second, "resolver")
    assert "2 of 3" in page.text
    assert [link for link in page.links if link in targets] == [targets[0], targets[2]]
    data = {"verdict": "occurred", "result": "sent", "evidence": EVIDENCE}
    for run, following in ((second, targets[2]), (third, targets[0]), (first, url(first))):
        sent = {**data, "seq": last(run, doubtful(run))}
        assert client.post(url(run, "resolve", doubtful(run)), sent).url == following
    assert "No call in doubt waits for you." in read(client.get(QUEUE)).text


@ONCE
def test_the_queue_reads_no_whole_journals(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    @tool(sensitive=["token"])
    def charge_card(token: str) -> str:
        """Charge."""
        raise ToolDurabilityError("no answer of the bank")

    start({"tools": [call("charge_card", token="tok_42")]}, tools=[charge_card])
    assert "no answer of the bank" in read(browser("resolver").get(QUEUE)).text
    monkeypatch.setattr(calls, "MOST_READ", 1)
    page = read(browser("resolver").get(QUEUE))
    assert "no answer of the bank" not in page.text
    assert "***" in page.text


@ONCE
@pytest.mark.parametrize("role", ROLES)
def test_who_sees_the_queue_of_calls_in_doubt(world: World, role: str) -> None:
    run = in_doubt()
    response = browser(role).get(QUEUE)
    if role in ("anonymous", "outsider"):
        assert response.url.startswith(reverse("admin:login"))
        return
    sees, may = role in ("viewer", "operator", "resolver", "superuser"), role in ("resolver", "superuser")
    assert response.status_code == (200 if sees else 403)
    assert not sees or (url(run, "call", doubtful(run)) in read(response).links) == may


class OnlyFirst(Policy):
    """Lets people see the runs of one session."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(session__key="s1")


class ResolvesNone(Policy):
    """Lets nobody resolve any of the runs that are there."""

    def can(self, user: Any, action: str, obj: Any) -> bool:
        return not (action == "resolve" and obj is not None)


@ONCE
def test_the_queue_of_calls_in_doubt_asks_the_policy(world: World, settings: Any) -> None:
    run, _other = in_doubt(), in_doubt(session="s2")
    for policy, seen in (("OnlyFirst", [url(run, "call", doubtful(run))]), ("ResolvesNone", [])):
        settings.AGENTRUNS_POLICY = f"{__name__}.{policy}"
        links = read(browser("superuser").get(QUEUE)).links
        assert [link for link in links if "/calls/" in link] == seen


@ONCE
def test_the_queue_costs_the_same_however_many_are_in_doubt(world: World) -> None:
    client = browser("superuser")

    def cost() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert client.get(QUEUE).status_code == 200
        return len(queries)

    in_doubt()
    alone = cost()
    for number in range(2, 6):
        in_doubt(session=f"s{number}")
    assert cost() == alone <= 8
