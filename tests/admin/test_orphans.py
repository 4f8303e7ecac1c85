"""Calls in doubt: the card of each, the queue of all, who gets them, and what ended runs left in doubt."""

from __future__ import annotations

from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models import F
from django.utils.html import escape

from agentruns import Occurred, Policy, ToolContext, Unknown, approve, cancel_run, fork_run, tool
from agentruns.admin.html import exact
from agentruns.admin.runs import calls
from agentruns.engine.in_doubt import AFTER_UNKNOWN, UNKNOWN
from agentruns.exceptions import ToolDurabilityError
from agentruns.journal.masking import Mask
from agentruns.journal.read import run_rows
from agentruns.management.timeline import line
from agentruns.models import Approval, Run, Session
from agentruns.services.history import record, state_at
from agentruns.services.runs import waiting
from agentruns.services.runs.control import resolve_orphan
from agentruns.services.sweep import sweep
from tests.admin import doubts
from tests.admin.doubts import card, doubtful, finish, give, in_doubt, last, payload, start, uncleared
from tests.admin.pages import Page, leads_to, listed, look, queries, read, says, unchanged, url, words
from tests.admin.people import browser, user
from tests.admin.texts import HOSTILE
from tests.admin.world import World
from tests.db.helpers import payloads
from tests.rows import write_raw
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)
QUEUE = "/admin/agentruns/run/in-doubt/"


def queue(role: str = "resolver") -> Page:
    return says(browser(role).get(QUEUE))


def in_queue(role: str = "resolver") -> list[str]:
    """Find the calls to which the queue leads."""
    return [link for link in queue(role).links if "/calls/" in link]


def page_of(run: Run) -> str:
    """Build the address of the card of a call in doubt."""
    return url(run, "call", doubtful(run))


@tool(sensitive=["token"])
def charge_card(ctx: ToolContext, token: str, cents: int) -> str:
    """Charge."""
    raise ToolDurabilityError("no answer of the bank")


def charged(*later: Any) -> Run:
    """Find a run whose charge, by a sensitive token, is in doubt."""
    turn = {"tools": [call("charge_card", token="tok_42", cents=7), *later]}
    return start(turn, tools=[charge_card], session="charged")


def test_the_card_has_what_one_looks_up_in_the_outside_world(world: World) -> None:
    run = in_doubt(call("post", text="later"))
    page = card(run)
    key = payload(run, "tool_started")["key"]
    began = run.messages.get(kind="tool_started").created_at
    for shown in (
        "wire: x", "exactly these arguments", "Attempt1", "not limited",
        "nobody: no approval was needed", "The tool says that its outcome is unknown: no answer to x",
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
        key,
        "The tool declares: nothing: it is not repeated by itself, and nothing can be asked about it",
        "How you know",
        "exactly these arguments",
    ]
    places = [below.index(text) for text in order]
    assert places == sorted(places)
    assert url(run) in page.links
    seq = last(run, doubtful(run))
    assert f"{url(run)}?after={seq - 1}#row-{seq}" in page.links
    assert set(page.forms) >= {url(run, "resolve", doubtful(run)), url(run, "cancel")}


@pytest.mark.parametrize("found", [Unknown("the bank is closed"), Occurred("paid")])
def test_what_reconcile_said_stands_on_the_card(world: World, found: Any) -> None:
    @tool(reconcile=lambda ctx, args: found)
    def pay(ctx: ToolContext) -> str:
        """Pay."""
        raise MemoryError

    run = finish(start({"tools": [call("pay")]}, tools=[pay]))
    page = card(run)
    if run.status == "orphaned":
        assert "reconcile does not know: the bank is closed" in page.text
        assert "reconcile: the outside system is asked by the key" in page.text
        assert "each further call of pay" not in page.text
        return
    assert run.status == "completed"
    assert "The outside system is asked by the key." in page.text
    assert "The outside system, asked by the key: it happened, 20" in page.text
    assert "Tool finished" not in page.text


def test_a_call_that_was_approved_says_by_whom_and_has_its_title(world: World) -> None:
    @tool(requires_approval=True, describe=lambda args: f"Pay {args['cents']} cents")
    def pay(ctx: ToolContext, cents: int) -> str:
        """Pay."""
        raise MemoryError

    run = start({"tools": [call("pay", cents=7)]}, tools=[pay])
    approval = run.approvals.get()
    page = says(browser("superuser").get(url(run, "call", approval.call_id)), "It has not been started.")
    assert url(approval) in page.links
    approve(approval.pk, user("decider"))
    finish(run)
    assert url(approval) in card(run, "Pay 7 cents", "decider, 20").links


def test_the_run_and_the_list_lead_to_the_card_and_ask_only_who_may_give_a_verdict(world: World) -> None:
    run = in_doubt()
    target, page = page_of(run), look(run)
    assert target in page.links
    assert "Find out whether it happened, and say so on its card." in page.text
    assert f'<a class="button default" href="{target}">Give a verdict</a>' in page.html
    assert page.html.count("<summary>Resume…</summary>") == 1
    assert '<details class="ar-action ar-quiet">\n      <summary>Resume…</summary>' in page.html
    page = listed("run")
    assert target in page.links
    assert "A call of wire is in doubt" in page.text
    html = look(run, role="viewer").html
    assert f'<a class="button" href="{target}">Look at the call</a>' in html
    assert "Give a verdict" not in html
    assert "Find out whether it happened" not in html
    page = card(run, "You lack the permission agentruns.resolve_orphan.", role="viewer")
    assert url(run, "resolve", doubtful(run)) not in page.forms
    with unchanged():
        assert give(run, "occurred", "operator", result="sent").status_code == 403
    assert in_queue("viewer") == []
    world.waiting("other")
    html = listed("run", "viewer").html
    assert (html.count("Look at it"), "Give a verdict" in html, ">Decide<" in html) == (2, False, False)


@tool(sensitive=["iban"], describe=lambda args: f"Pay {args['to']} by {args['iban']}")
def pay(ctx: ToolContext, to: str, iban: str, about: str) -> dict[str, str]:
    """Pay; the second time nobody knows whether it went out."""
    if about == "twice":
        raise MemoryError
    return {"status": "paid", "iban": iban}


def test_a_call_in_doubt_is_named_as_people_say_it_with_what_its_sentence_leaves_out(world: World) -> None:
    once, twice = (call("pay", to="Ben", iban="DE02-secret", about=about) for about in ("once", "twice"))
    run = start({"tools": [once]}, {"tools": [twice]}, tools=[pay])
    page = card(run, "Pay Ben by ***")
    assert "Run do it in doubt" in words(page).partition("It happened once or not")[0], "of its task"
    assert "about: twice" in page.text.partition("How you know")[0]
    assert 'An earlier call of it returned: {"iban": "***", "status": "paid"}' in page.text
    assert "secret" not in page.text
    assert "pay: do it" in queue("superuser").text
    assert "For example: done by hand" in card(in_doubt(session="other")).text


def without_numbers(text: str) -> str:
    return text.replace("4111", "[number]")


def test_sensitive_arguments_are_revealed_and_redacted_results_are_kept(world: World, settings: Any) -> None:
    run = charged(call("post", text="later"))
    for role in ("resolver", "superuser"):
        page = card(run, role=role)
        assert "tok_42" not in page.text
        assert "charge card: 0.07" in page.text
        assert "token: ***" in page.text
    reveal = url(run, "reveal", doubtful(run))
    assert reveal in page.forms
    assert browser("resolver").post(reveal).status_code == 403
    assert LogEntry.objects.count() == 0
    assert "tok_42" in read(browser("superuser").post(reveal)).text
    assert doubtful(run) in LogEntry.objects.get().get_change_message()
    settings.AGENTRUNS_REDACT = f"{__name__}.without_numbers"
    run, late = doubts.timed_out("card 4111 was charged")
    late.report()
    html = card(run).html
    assert ("card 4111" in html, "card [number] was charged" in html) == (False, True)
    response = give(run, "occurred", result="card [number] was not charged")
    says(response, "Part of it is hidden here.", status=400)
    give(run, "occurred", result="card [number] was charged")
    assert payload(run, "tool_result")["content"] == "card 4111 was charged"


def test_a_call_of_another_run_or_not_in_doubt_is_not_decided(world: World) -> None:
    run, other = in_doubt(), world.completed()
    client = browser("superuser")
    assert client.get(url(other, "call", doubtful(run))).status_code == 404
    for nowhere in ("x", "018f0000-0000-7000-8000-000000000000", "a\x00b", "9" * 99, "'--"):
        for action in ("call", "resolve"):
            assert client.post(url(run, action, nowhere), {}).status_code == 404, nowhere
    assert client.get(url(run, "resolve", doubtful(run))).url == page_of(run)
    call_id = payload(other, "assistant")["calls"][0]["id"]
    assert "once or not at all" not in says(client.get(url(other, "call", call_id)), "Tool finished, on").text
    with unchanged():
        response = give(other, "not_occurred", call_id=call_id)
        says(response, "is not in doubt; there is nothing to decide.", status=409)


@pytest.mark.parametrize("name", ["script", "attribute", "markdown", "bidi", "null", "surrogate"])
def test_every_field_of_the_card(world: World, name: str) -> None:
    text = HOSTILE[name]
    late = doubts.Late({"wrote": text, text: text}, timeout=0.05)
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
    other, late = doubts.timed_out(text)
    late.report()
    shown = card(other)
    for one in (shown, card(run), look(run)):
        assert not {"object", "iframe", "base", "embed"} & set(one.tags)
        assert not [link for link in one.links if "evil" in link or "javascript" in link]
    if text.isprintable():
        assert escape(text) in shown.html


def test_calls_in_doubt_are_a_queue(world: World) -> None:
    first, second, third = (in_doubt(session=f"s{number}", text=f"t{number}") for number in range(3))
    targets = [page_of(run) for run in (first, second, third)]
    assert in_queue() == targets, "who waits longest is first"
    assert "The tool says that its outcome is unknown: no answer to t1" in queue().text
    page = card(second, "2 of 3", role="resolver")
    assert url(second, "resolve", doubtful(second)) in page.forms
    assert [link for link in page.links if link in targets] == [targets[0], targets[2]]
    for run, following in ((second, targets[2]), (third, targets[0]), (first, url(first))):
        assert give(run, "occurred", "resolver", result="sent").redirect_chain[0][0] == following
    assert "No call in doubt waits for you." in queue().text
    ended, other = shipped("ended"), shipped("other")
    sent = give(in_doubt(session="waits"), "occurred", "resolver", result="x")
    assert sent.redirect_chain[0][0] == url(ended[0], "call", ended[1]), "after those that runs wait for"
    sent = give(ended[0], "occurred", "resolver", ended[1], result="x")
    assert sent.redirect_chain[0][0] == url(other[0], "call", other[1])


class OnlyFirst(Policy):
    """Lets people see the runs of one session."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(session__key="s1")


class ResolvesNone(Policy):
    """Lets nobody resolve any of the runs that are there."""

    def can(self, user: Any, action: str, obj: Any) -> bool:
        return not (action == "resolve" and obj is not None)


def test_the_queue_asks_the_policy(world: World, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _other = in_doubt(), charged()
    assert "no answer of the bank" in queue().text
    for policy, seen in (("OnlyFirst", [page_of(run)]), ("ResolvesNone", [])):
        settings.AGENTRUNS_POLICY = f"{__name__}.{policy}"
        assert in_queue("superuser") == seen
    settings.AGENTRUNS_POLICY = "agentruns.Policy"
    monkeypatch.setattr(calls, "MOST_READ", 1)
    page = queue()
    assert "no answer of the bank" not in page.text
    assert "***" in page.text


def test_the_card_and_the_queue_cost_the_same_however_much_there_is(world: World) -> None:
    client = browser("superuser")

    def cost(path: str) -> int:
        return len(queries(lambda: client.get(path)))

    short = cost(page_of(in_doubt(session="short")))
    alone = cost(QUEUE)
    turns = [{"tools": [call("post", text=str(number))]} for number in range(9)]
    later = [call("refund", cents=5000 + number) for number in range(5)]
    long = start(*turns, {"tools": [call("wire", text="x"), *later]}, session="long")
    assert long.status == "orphaned"
    assert cost(page_of(long)) == short <= 15
    for number in range(2, 6):
        in_doubt(session=f"s{number}")
    assert cost(QUEUE) == alone <= 9


FIGURE = "ended in doubt in the last 7 days"
ERROR = "ConnectionError: reset by peer"


@tool
def ship(order: int) -> str:
    """Ship an order; of the first ones the answer of the carrier is lost."""
    if order < 6:
        raise ConnectionError("reset by peer")
    return "shipped"


def shipped(session: str = "s1") -> tuple[Run, str]:
    """Find a run that ended although its call may have happened, and that call."""
    run = start({"tools": [call("ship", order=4)]}, tools=[ship], session=session)
    assert run.status == "completed"
    return run, run.messages.get(kind="tool_result").call_id


def failed() -> tuple[Run, str]:
    """Find a run whose first call failed in doubt and whose second one waits, and that first call."""
    run = start(*({"tools": [call("ship", order=order)]} for order in (4, 6)), tools=[ship])
    assert run.status == "awaiting-approval"
    return run, run.messages.get(kind="tool_result").call_id


def front() -> str:
    return read(browser("superuser").get("/admin/")).text


def ended_in_doubt(**which: Any) -> list[Any]:
    return [wait.run_id for wait in waiting.ended_in_doubt("default", Run.objects.filter(**which))]


def test_a_failed_call_is_on_the_next_card_and_its_run_and_takes_a_verdict(world: World) -> None:
    run, call_id = failed()
    card = look(Approval.objects.get())
    assert f"raised an error and may have happened. Approving settles it. {ERROR}" in card.text
    assert call_id in card.text, "why it is asked"
    page = look(
        run,
        "A call of ship raised an error and is in doubt; nobody has cleared it.",
        "Until then each further call of ship asks a person.",
        "Say what became of it",
    )
    assert url(run, "call", call_id) in page.links
    assert "Say what became of it" not in look(run, role="viewer").text
    about = browser("superuser").get(url(run, "call", call_id))
    page = says(about, "It happened once or not at all.", "The tool raised an error on", ERROR)
    assert url(run, "resolve", call_id) in page.forms
    says(give(run, "not_occurred", call_id=call_id), "The doubt is lifted.")
    page = says(browser("superuser").get(url(run, "call", call_id)), "The doubt is lifted.")
    assert url(run, "resolve", call_id) not in page.forms


def test_an_approval_of_the_next_call_settles_the_failed_one(world: World) -> None:
    run, call_id = failed()
    row = run.messages.get(kind="tool_result")
    (shown,) = [one for one in record(state_at(run.pk, row.seq), Mask())["calls"] if one["id"] == call_id]
    assert (shown["outcome"], shown["in_doubt"]) == ("error", True)
    approve(Approval.objects.get().pk, user("decider"))
    lines = [line(one) for one in run_rows("default", run.pk)]
    for text in (f"error, in doubt: {ERROR}", "which settles the doubt about"):
        assert sum(text in one for one in lines) == 1
    sweep()
    told = "decider, knowing of it, approved the tool's next call on"
    page = says(browser("superuser").get(url(run, "call", call_id)), told, "The doubt is lifted.")
    assert url(run, "resolve", call_id) not in page.forms
    page = look(run, query="?rows=full")
    assert "nobody has cleared it" not in page.text
    assert payloads(run, "approval_decided")[0]["settles"] == [call_id]
    assert "Settles the doubt about" in page.text
    assert "Tool gave an error, in doubt: it may have happened" in page.text


@pytest.mark.parametrize("how", ["raised", "surfaced"])
def test_it_is_counted_listed_and_decided_and_gone_after(world: World, how: str) -> None:
    run, call_id = shipped() if how == "raised" else ((ended := uncleared()), doubtful(ended))
    start(session="harmless")
    page = read(browser("superuser").get("/admin/"))
    assert f"1 {FIGURE}" in page.text
    (link,) = (one for one in page.links if "ended-in-doubt" in one)
    assert leads_to(read(browser("viewer").get(unescape(link)))) == [url(run)]
    page = queue()
    assert url(run, "call", call_id) in page.links
    assert "Its run has ended." in page.text
    give(run, "not_occurred", "resolver", call_id)
    assert FIGURE not in front()
    assert "No call in doubt waits for you." in queue().text


def test_neither_old_ones_nor_records_nor_those_of_others_nor_of_runs_that_go_on(world: World) -> None:
    unknown, call_id = shipped("unknown")
    assert give(unknown, "unknown", "resolver", call_id).status_code == 200
    assert FIGURE not in front(), "what a person said to be unknown is not asked again"
    run, _call = shipped()
    in_doubt(session="waits")
    alone = queries(ended_in_doubt)
    assert ended_in_doubt() == [run.pk]
    assert ended_in_doubt(session__key="waits") == []
    Run.objects.update(updated_at=F("updated_at") - timedelta(days=8))
    assert ended_in_doubt() == []
    Run.objects.update(updated_at=F("updated_at") + timedelta(days=8))
    Session.objects.filter(pk=run.session_id).update(imported_at=F("created_at"))
    assert ended_in_doubt() == []
    for number in range(3):
        shipped(f"s-{number}")
    assert len(queries(ended_in_doubt)) == len(alone) <= 3, "many cost no more"
    assert not any('"agentruns_message"."content",' in one for one in alone), "no contents are read"


@tool
def knock(ctx: ToolContext) -> str:
    """Knock; nobody ever knows whether it was heard."""
    raise ToolDurabilityError("no answer")


def test_a_verdict_on_an_earlier_attempt_is_none_on_the_next(world: World) -> None:
    run = start({"tools": [call("knock")]}, tools=[knock])
    give(run, "not_occurred")
    assert finish(run).status == "orphaned", "it ran again"
    cancel_run(run.pk)
    assert f"1 {FIGURE}" in front()
    assert url(run, "call", doubtful(run)) in queue().links
    give(run, "unknown")
    assert FIGURE not in front()


def test_a_fork_counts_no_call_of_its_origin_again(world: World) -> None:
    run, call_id = shipped()
    assert finish(fork_run(run.pk, run.messages.get(kind="tool_result").seq)).status == "completed"
    assert ended_in_doubt() == [run.pk]
    give(run, "occurred", "resolver", call_id)
    assert FIGURE not in front()


def test_an_approval_in_a_later_run_of_the_session_settles_it(world: World) -> None:
    shipped()
    later = start({"tools": [call("ship", order=5)]}, tools=[ship], key="later")
    assert f"1 {FIGURE}" in front()
    approve(Approval.objects.get().pk, None)
    assert FIGURE not in front()
    finish(later)
    assert ended_in_doubt() == [later.pk]


@pytest.mark.parametrize("ended", [True, False])
def test_a_damaged_row_closes_no_list(world: World, ended: bool) -> None:
    """Not for the week in which the front page looks at it, nor while its run waits."""
    intact, call_id = shipped("intact")
    if ended:
        row = shipped("damaged")[0].messages.get(kind="tool_result")
    else:
        row = in_doubt(session="damaged").messages.get(kind="orphan_found")
    for text in ('{"in_doubt":true', '["in_doubt":true]', '{"in_doubt":true}', "{", "[]"):
        write_raw("agentruns_message", "facts", text, "id", row.pk)
        assert f"1 {FIGURE}" in front(), text
        listed("run")
        says(browser("superuser").get(url(intact, "call", call_id)))
        assert leads_to(listed("run", status="ended-in-doubt")) == [url(intact)], text
        assert url(intact, "call", call_id) in queue().links, text


def test_a_damaged_verdict_is_none(world: World) -> None:
    run, call_id = shipped()
    give(run, "occurred", "resolver", call_id)
    assert FIGURE not in front()
    verdict = run.messages.get(kind="orphan_resolved")
    for text in ("{", "[]", '{"v":1}'):
        write_raw("agentruns_message", "facts", text, "id", verdict.pk)
        assert f"1 {FIGURE}" in front()


def test_five_queries_say_what_any_number_of_runs_wait_for(world: World) -> None:
    """Which the console and the commands share."""
    approval, orphaned, paused = world.waiting(), world.orphaned(), world.paused()
    blocked, both = world.queued(), in_doubt(call("refund", cents=5000))
    Run.objects.filter(pk=blocked.pk).update(blocked_reason="no worker knows its agent")
    world.completed()
    found: dict[Any, Any] = {}
    # One of them for the runs, one for what is masked.
    assert len(queries(lambda: found.update(waiting.waits("default", list(Run.objects.all()))))) == 5
    assert [(wait.kind, wait.tool) for wait in found.pop(both.pk)] == [
        (waiting.ORPHAN, "wire"), (waiting.APPROVAL, "refund"),
    ]  # fmt: skip
    assert {run: [(wait.kind, wait.tool, wait.text) for wait in waits] for run, waits in found.items()} == {
        approval.run_id: [(waiting.APPROVAL, "refund", approval.title)],
        orphaned.pk: [(waiting.ORPHAN, "dies", "MemoryError inside the handler.")],
        paused.pk: [(waiting.PAUSED, "", "the bank is down")],
        blocked.pk: [(waiting.BLOCKED, "", "no worker knows its agent")],
    }
    assert found[approval.run_id][0].approval_id == approval.pk
    assert found[orphaned.pk][0].attempt == 1


def test_a_call_stays_uncleared_until_somebody_clears_it(world: World) -> None:
    run = uncleared()
    found: list[Any] = []
    assert len(queries(lambda: found.extend(waiting.uncleared("default", run)))) == 2
    (wait,) = found
    assert (wait.run_id, wait.call_id, wait.tool) == (run.pk, doubtful(run), "wire")
    assert wait.gates_tool
    resolve_orphan(run.pk, wait.call_id, "unknown", None, evidence="no answer yet")
    assert waiting.uncleared("default", run) == [wait]
    resolve_orphan(run.pk, wait.call_id, "occurred", None, evidence="on the bank's statement")
    assert waiting.uncleared("default", run) == []
