"""The card: everything that a decision needs, nothing that misleads, and all four verbs."""

from __future__ import annotations

import re
from typing import Annotated, Any

import pytest
from django import forms
from django.contrib.admin.models import LogEntry
from django.db import connection, connections, transaction
from django.urls import reverse
from pydantic import AfterValidator

from agentruns import (
    Agent,
    Policy,
    ToolContext,
    adopt_definition,
    approve,
    ask_human,
    deny,
    pause_run,
    run_agent,
    tool,
)
from agentruns.admin.approvals.card import Preview, brief, preview
from agentruns.admin.forms import ValueField
from agentruns.admin.html import named, spoken
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.masking import Mask
from agentruns.models import Approval, Message, Run
from agentruns.services.runs.lifecycle import result_of, resume_run
from agentruns.services.runs.starting import send_message
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.tools import card
from agentruns.utils import json as canonical
from agentruns.utils.lanes import Lane
from tests.admin.pages import Page, listed, look, queries, read, says, send, unchanged, url, words
from tests.admin.people import browser, user
from tests.admin.world import World, asked, dying, secretive, timed
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import act, call, refund, shop_agent
from tests.shop.models import Order
from tests.waiting import Hanging

pytestmark = pytest.mark.django_db
ELSEWHERE = pytest.mark.django_db(transaction=True)  # beside the request, as outside a TestCase


def told(approval: Approval) -> Any:
    sweep()
    return Message.objects.get(kind="tool_result", call_id=approval.call_id).payload["content"]


def turn(approval: Approval) -> Page:
    """Read the page of all calls of a reply."""
    return read(browser("superuser").get(f"/admin/agentruns/approval/turn/{approval.run_id}/"))


def above(page: Page) -> str:
    """Return what stands before the buttons, with single spaces."""
    return " ".join(page.text[: page.text.index("Approve A")].split())


@tool(
    requires_approval=True,
    preview=lambda args: {
        "before": {"note": Order.objects.get(number=args["number"]).note, "total": 100},
        "after": {"note": args["note"], "total": 100},
        "links": [
            {"label": "The order", "url": "/admin/shop/order/1/"}, "javascript:alert(1)", "//evil.example",
        ],
    },
)  # fmt: skip
def note_down(number: str, note: str) -> str:
    """Write on an order.

    Args:
        note: in at most ten words
    """
    return "noted"


@ELSEWHERE
def test_a_preview_that_is_no_longer_true_is_shown_anew_and_flagged(world: World) -> None:
    Order.objects.create(number="A1", customer="Ada", total_cents=100, note="old")
    approval = asked(call("note_down", number="A1", note="new"), tools=[note_down])[0]
    page = look(approval, "What it changes")
    assert page.cells("ar-preview") == [["note", "old", "new"], ["total", "100", "100"]]
    assert "/admin/shop/order/1/" in page.links
    assert not [link for link in page.links if "alert" in link or "evil" in link]
    assert "in at most ten words" in page.text, "what the tool says of its argument"
    assert "has changed since the agent asked" not in page.text
    Order.objects.update(note="newer")
    page = look(approval, "The preview has changed since the agent asked.")
    assert page.cells("ar-preview")[0] == ["note", "newer", "new"]
    Order.objects.all().delete()
    assert look(approval, "The preview cannot be refreshed").cells("ar-preview")[0] == ["note", "old", "new"]
    deny(approval.pk, None, "no")
    assert look(approval).cells("ar-preview")[0] == ["note", "old", "new"], "as it was decided upon"


HANGS = Hanging()
ASKED: set[int] = set()


def hang(args: dict[str, Any]) -> dict[str, Any]:
    """Answer at once when the model asks, and to a page only when the test is over."""
    if args["cents"] in ASKED:
        HANGS.hang()
    ASKED.add(args["cents"])
    return {"before": {"paid": "nothing"}, "after": {"paid": args["cents"]}}


@tool(requires_approval=True, approvals=2, preview=hang)
def pays(cents: int) -> str:
    """Pay."""
    return "paid"


@ELSEWHERE
def test_a_preview_that_hangs_holds_up_no_page(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ASKED.clear()
    HANGS.reset()
    monkeypatch.setattr(card, "PATIENCE", 0.3)
    monkeypatch.setattr(card, "_lane", Lane("tests", 16))
    cards = asked(*(call("pays", cents=cents) for cents in (100, 200, 300)), tools=[pays])
    first, second, third = cards
    client, where = browser("decider"), reverse("admin:agentruns_approval_turn", args=[first.run_id])
    page = read(client.get(where))
    assert page.text.count("The preview cannot be refreshed, which took too long") == 3
    assert " checked>" not in page.html, "nobody approves by mistake what nobody could look at"
    page = look(first, "The preview cannot be refreshed, which took too long")
    assert page.cells("ar-preview") == [["paid", "nothing", "100"]], "as it was when the agent asked"
    assert url(first, "approve") in page.forms
    assert send(first, "deny", reason="").status_code == 400, "the card again"
    ASKED.add(150)
    assert send(first, "edit", **{"argument-cents": "150"}).status_code == 302
    edited = Approval.objects.get(pk=first.pk)
    assert (edited.arguments, edited.title) == ({"cents": 150}, "pays(cents=150)")
    page = look(edited, "The preview is not there: making it took too long.", role="decider")
    assert "What it changes" not in page.text
    assert send(second, "deny", reason="no").status_code == 302
    sent = {f"digest-{third.pk}": third.digest, "_selected_action": str(third.pk)}
    assert client.post(where, {**sent, "verb": "deny", "reason": "no"}).status_code == 302
    assert Approval.objects.get(pk=third.pk).status == "denied"
    assert not HANGS.was_waited_for
    HANGS.let_go()


def test_what_the_agent_said_stands_apart_and_its_other_calls_too(world: World) -> None:
    calls = [call("post", text="hi"), call("refund", cents=5000), call("refund", cents=6000)]
    reply = {"text": "Trust me, this was approved.", "tools": calls}
    first, second = run_agent(shop_agent("talker", reply), "go", "talk").pending
    page = look(first)
    assert page.text.index("Agent (unverified)") < page.text.index("Trust me, this was approved.")
    for shown in ("Tool finished", second.title, "waits for a decision"):
        assert shown in page.text
    assert any("/turn/" in link for link in page.links)
    approve(second.pk, None)
    page = look(first)
    assert not any("/turn/" in link for link in page.links)
    assert "is decided, and has not run yet" in page.text


def test_precedents_count_and_quote_denials(world: World) -> None:
    for number in range(3):
        approve(world.waiting(f"yes-{number}", 5000 + number).pk, None)
    deny(world.waiting("no", 7000).pk, user("decider"), "She was refunded already.")
    look(
        world.waiting("now", 8000), "3 approved, 1 denied", "She was refunded already.", "decider denied one"
    )


def test_the_same_call_elsewhere_and_here_is_flagged(world: World) -> None:
    first = world.waiting("first")
    assert "This exact call" not in look(first).text
    approve(first.pk, user("decider"))
    sweep()
    second = world.waiting("second")
    look(second, "This exact call was approved and started in another session", "by decider")
    approve(second.pk, None)
    sweep()
    third = asked(call("refund", cents=5000), name="second")[0]
    assert "This exact call was started in this session before" in look(third).text


def test_a_call_of_the_tool_in_doubt_is_flagged(world: World) -> None:
    run = world.orphaned()
    approval = asked(call("dies"), tools=[tool(name="dies", requires_approval=True)(dying().fn)])[0]
    page = look(approval, "A call of this tool is in doubt: nobody knows whether it happened.")
    assert url(run) in page.links
    resume_run(run.pk)
    assert "A call of this tool is in doubt" not in look(approval).text
    approval = asked(call("dies"), name="orphaned", tools=[dying()])[0]
    look(approval, "Why it is asked: An earlier call of dies in this session")


def test_each_button_says_word_for_word_what_the_model_will_get(world: World, effects: Effects) -> None:
    denied, answered, edited = (
        world.waiting(name, cents=n) for name, n in (("d", 5000), ("a", 6000), ("e", 7000))
    )
    page = look(denied)
    send(denied, "deny", reason="(your reason)")
    assert " ".join(told(denied).split()) in words(page)
    assert send(answered, "answer", text=" Pay her 20 EUR\r\nby hand. ").status_code == 302
    assert told(answered) == " Pay her 20 EUR\nby hand. ", "to the letter"
    for entered, refusal in {
        "7000": "You changed nothing.", "": "This field is required.", "many": "Enter a whole number.",
    }.items():  # fmt: skip
        with unchanged():
            response = send(edited, "edit", **{"argument-cents": entered, "reason": "because I say so"})
            says(response, refusal, "because I say so", status=400)
    assert send(edited, "edit", **{"argument-cents": " 2000 ", "reason": "enough"}).status_code == 302
    assert LogEntry.objects.latest("pk").get_change_message() == "Approved with edited arguments."
    told(edited)
    assert [line["cents"] for line in effects.lines()] == [2000]
    messages = str(result_of(edited.run_id).messages)
    assert 'Executed with the arguments a person set: {"cents":2000}' in messages
    rows = {row.kind: row.payload for row in edited.run.messages.all()}
    decided = rows["approval_decided"]
    assert (decided["edited"], decided["arguments"]) == ({"cents": 2000}, {"cents": 2000})
    assert (decided["actor"]["name"], decided["reason"]) == ("superuser", "enough")
    look(edited, "Edited by a person. The model had proposed:", "7000")


@tool(requires_approval=True)
def everything(
    text: str, lines: str, flag: bool, ratio: float, hidden: str, tags: list[str], maybe: str | None
) -> str:
    """Take one of each."""
    return "done"


@tool(requires_approval=True)
def letter(copies: int, body: str) -> str:
    """Write."""
    return "written"


def test_every_kind_of_argument_can_be_edited_and_what_is_left_alone_stays(world: World) -> None:
    given = {
        "text": "short", "lines": "one\ntwo", "flag": True, "ratio": 0.1, "hidden": "abc\u202edef",
        "tags": ["a", "b"], "maybe": None,
    }  # fmt: skip
    approval = asked(call("everything", **given), tools=[everything])[0]
    fields = look(approval).forms[url(approval, "edit")]
    sent = {
        name: value.replace("\n", "\r\n") for name, value in fields.items() if name.startswith("argument-")
    }
    response = send(approval, "edit", **{**sent, "argument-flag": "true", "reason": ""})
    assert "You changed nothing." in read(response).text, "a round trip through the page changes nothing"
    changed = {"argument-flag": "false", "argument-tags": '["c"]', "argument-maybe": '"x"'}
    assert send(approval, "edit", **{**sent, **changed}).status_code == 302
    approval.refresh_from_db()
    assert approval.arguments == {**given, "flag": False, "tags": ["c"], "maybe": "x"}
    bodies = ("  - indented\n- list\n\n", "\t tab", "line\n", "\nlead", " ", "")
    for name in ("sent as shown", "not sent"):
        calls = [call("letter", copies=1, body=body) for body in bodies]
        for approval in asked(*calls, name=name, tools=[letter]):
            body = approval.arguments["body"]
            shown = look(approval).forms[url(approval, "edit")]["argument-body"].replace("\n", "\r\n")
            sent = {"argument-body": shown} if name == "sent as shown" else {}
            assert send(approval, "edit", **sent, **{"argument-copies": "2"}).status_code == 302
            approval.refresh_from_db()
            assert approval.arguments == {"copies": 2, "body": body}


@tool(name="letter", requires_approval=True)
def addressed(text: str, pages: float, to: str, copies: int = 1) -> str:
    """Write to somebody: the body has another name, and there are more parameters."""
    return f"written to {to}"


def test_a_call_that_fits_its_tool_no_more_is_edited_in_a_form_of_what_the_tool_takes(world: World) -> None:
    (approval,) = asked(call("letter", copies=1, body="Dear"), tools=[letter])
    shop_agent(approval.run.agent, tools=[addressed])
    assert "Approve A" in look(approval).text, "this process lacks the definition of the run"
    adopt_definition(approval.run_id)
    page = look(approval, "letter cannot run this call as it is: text: Field required; ", "Edit and approve")
    assert "Approve A" not in page.text
    fields = page.forms[url(approval, "edit")]
    named = {name: value for name, value in fields.items() if name.startswith("argument-")}
    assert named == {"argument-text": "", "argument-pages": "null", "argument-to": "", "argument-copies": "1"}
    says(send(approval, "edit", **named), "The edited arguments do not fit letter", status=409)
    given = {**named, "argument-text": "Dear", "argument-to": "Ada", "argument-pages": "2"}
    assert send(approval, "edit", **given).status_code == 302
    approval.refresh_from_db()
    assert approval.arguments == {"text": "Dear", "pages": 2.0, "to": "Ada", "copies": 1}
    (question,) = asked(call("ask_human", question="Why?"), tools=[ask_human], name="asks")
    shop_agent(question.run.agent, tools=[letter])
    adopt_definition(question.run_id)
    assert "cannot run this call" not in look(question).text
    assert send(question, "answer", text="Because.").status_code == 302, "an answer needs no tool"


def test_what_is_masked_survives_an_edit_of_the_others(world: World, effects: Effects) -> None:
    approval = world.waiting(tools=[secretive])
    page = look(approval, role="decider")
    assert "DE02-secret" not in page.text
    assert "***" in page.text
    assert "agentruns.reveal_arguments" in page.text
    assert "argument-iban" not in page.forms[url(approval, "edit")]
    sent = {"argument-cents": "2000", "argument-iban": "DE99", "revealed": "1"}
    says(send(approval, "edit", "decider", **sent), "An argument that you sent is masked now.", status=400)
    assert send(approval, "edit", "decider", **{"argument-cents": "2000"}).status_code == 302
    sweep()
    assert [(line["cents"], line["iban"]) for line in effects.lines()] == [(2000, "DE02-secret")]
    assert "DE02-secret" not in look(approval, role="decider").html


def plausible(iban: str) -> str:
    if iban.startswith("BAD"):
        raise ValueError(f"{iban} is no account")
    return iban


@tool(name="refund", requires_approval=True, sensitive=["iban"])
def picky(
    ctx: ToolContext, cents: int, iban: Annotated[str, AfterValidator(plausible)] = "DE02-secret"
) -> str:
    """Refund to an account that is looked at."""
    return act("refund", ctx, cents=cents, iban=iban)


def test_what_was_revealed_stays_so_in_a_refusal_and_is_logged(world: World, effects: Effects) -> None:
    approval = world.waiting(tools=[picky])
    form = read(browser("revealer").post(url(approval, "reveal"))).forms[url(approval, "edit")]
    assert (form["revealed"], form["argument-iban"]) == ("1", "DE02-secret")
    LogEntry.objects.all().delete()
    sent = {"argument-cents": "2000", "argument-iban": "BAD1", "revealed": "1"}
    page = says(send(approval, "edit", "revealer", **sent), status=409)
    assert "Saw the sensitive arguments." in LogEntry.objects.get().get_change_message()
    fields = page.forms[url(approval, "edit")]
    assert (fields["revealed"], fields["argument-iban"]) == ("1", "BAD1")
    sent["argument-iban"] = "DE-RIGHT"
    assert send(approval, "edit", "revealer", **sent).status_code == 302
    sweep()
    assert [(line["cents"], line["iban"]) for line in effects.lines()] == [(2000, "DE-RIGHT")]
    with pytest.raises(ApprovalStateError) as refused:
        approve(world.waiting("b", tools=[picky]).pk, None, arguments={"cents": 1, "iban": "BAD-99-17"})
    assert "BAD-99-17" not in str(refused.value)
    assert "***" in str(refused.value)


def test_more_time(world: World) -> None:
    approval = world.waiting(tools=[timed])
    page = look(approval, "Extend")
    seen = page.forms[url(approval, "extend")]["seen"]
    assert send(approval, "extend", hours="4", seen=seen).status_code == 302
    # A double click gives no more time.
    says(send(approval, "extend", hours="4", seen=seen), "was given more time already", status=409)
    for odd in ("", "2026-13-45T00:00:00", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00"):
        refused = send(approval, "extend", hours="4", seen=odd)
        says(refused, "The page does not say what it showed.", status=400)
    later = Approval.objects.get()
    assert approval.expires_at is not None and later.expires_at is not None
    assert (later.expires_at - approval.expires_at).total_seconds() == 4 * 3600
    assert "More time given" in look(later).text
    assert send(approval, "extend", hours="5", seen=seen).status_code == 400


def test_what_no_parser_takes_is_no_json_and_is_shown_again() -> None:
    class Edit(forms.Form):
        value = ValueField()

    for sent in ("[" * 100_000, "1" * 5000, "{"):
        form = Edit({"value": sent})
        assert form.errors == {"value": ["This is not JSON."]}
        assert sent in str(form["value"])


def test_a_question_is_answered_or_denied_and_never_approved(world: World) -> None:
    asks = call("ask_human", question="Which colour?", choices=["red", "blue"])
    approval = asked(asks, tools=[ask_human])[0]
    page = look(approval, "Which colour?")
    assert "red A" in words(page), "a button for each choice"
    assert "Answer, told to the model" not in page.text, "and no other answer"
    assert sorted(form for form in page.forms if "approval" in form) == [
        url(approval, "answer"), url(approval, "deny"),
    ]  # fmt: skip
    with unchanged():
        for verb in ("approve", "edit"):
            sent = {"argument-question": "Which size?", "argument-choices": "null"}
            says(send(approval, verb, **sent), "there is nothing to execute", status=409)
        for outside in (
            {"text": "green"}, {"choice": "2"}, {"choice": "-1", "text": "green"}, {"choice": "red"},
        ):  # fmt: skip
            assert send(approval, "answer", **outside).status_code in (400, 409), outside
    assert send(approval, "answer", choice="1").status_code == 302
    assert told(approval) == "blue"
    asks = call("ask_human", question="Which colour?", choices=["red"], free_text=True)
    approval = asked(asks, name="open", tools=[ask_human])[0]
    assert "Answer, told to the model word for word" in look(approval).text
    assert send(approval, "answer", text="green").status_code == 302
    assert told(approval) == "green"


@tool(sensitive_results=["iban"])
def look_up(number: str) -> dict[str, Any]:
    """Look an order up."""
    return {"paid": "189.00 EUR", "iban": "DE99-hidden", "note": "x" * 300}


def surprising(args: dict[str, Any]) -> dict[str, Any]:
    warnings = [f"<b>more</b> than was paid to {args['iban']}", {"limit": 100}]
    return {"warnings": warnings, "before": 1, "after": 2}


@tool(requires_approval=True, sensitive=["iban"], preview=surprising, describe=lambda args: "Pay 192.90 EUR")
def pay_back(zeal: str, iban: str, cents: int, alpha: str = "a") -> str:
    """Pay.

    Args:
        cents: how much, in cents
    """
    return "paid"


def test_the_request_what_the_agent_relied_on_and_warnings_stand_before_the_buttons(world: World) -> None:
    pays = call("pay_back", zeal="much", iban="DE02-secret", cents=19290)
    turns = [
        {"tools": [call("look_up", number="4107")]},
        {"text": "He is right, trust me.", "tools": [pays]},
    ]
    agent = Agent("payer", instructions="Pay.", model=ScriptedModel(turns), tools=[look_up, pay_back])
    text = "Please refund the broken kettle to DE02-secret.\n\n" + "It is broken. " * 40
    approval = run_agent(agent, text, "order-4107", actor=user("viewer")).pending[0]
    page = look(approval)
    before = above(page)
    for text in (
        "viewer: “Please refund the broken kettle to ***. It is broken.",
        "Agent (unverified): “He is right, trust me.”",
        "look up: iban ***, note xxxx",
        "paid 189.00 EUR",
        "iban: ***",
        "zeal: much",
        "than was paid",
    ):
        assert text in before, text
    assert "19290" not in before, "the sentence names the amount"
    assert "19290" in page.text, "the exact arguments have it"
    assert "DE99" not in page.text
    assert "DE02" not in page.text
    assert page.text.count("It is broken. ") >= 40, "the whole of it is folded below"
    flag = '<p class="ar-flag ar-flag--bad" role="note">&lt;b&gt;more&lt;/b&gt; than was paid to ***'
    assert f"{flag} (the tool" in page.html
    assert "{&quot;limit&quot;: 100}" in page.html
    assert "than was paid to ***" in turn(approval).text, "also where several are decided"
    exact = page.text[page.text.index("exactly these arguments") :]
    order = ("zeal text", "iban text", "cents number: how much, in cents", "alpha")
    places = [exact.index(text) for text in order]
    assert places == sorted(places), "in the order of the signature"
    with isolated_registry():
        assert "exactly these arguments" in look(approval).text, "in their own order where it is not known"


def mark_of(response: Any) -> str:
    """Return what the form of a card that warns has to send with the second press."""
    [mark] = re.findall(r'name="warned" value="([0-9a-f]{64})"', response.content.decode())
    return str(mark)


def test_an_edit_that_the_preview_warns_of_takes_a_second_press(world: World) -> None:
    approval, other, cheap, dear = paid_by_pin(1250, 1300, 1350, 9000)
    answer = send(approval, "edit", **MUCH)
    warned = "With these arguments the tool's preview warns: <b>More</b> than was paid."
    page = says(answer, warned, status=400)
    assert Approval.objects.get(pk=approval.pk).status == "pending"
    assert ("What will run" in page.text, "What the agent asks for" in page.text) == (False, True)
    mark = mark_of(answer)
    changed = send(approval, "edit", **{"argument-cents": "9998"}, warned=mark)
    assert changed.status_code == 400, "other arguments than those that were warned of"
    assert send(approval, "edit", **MUCH, warned=mark).status_code == 302
    mark = mark_of(send(other, "edit", **MUCH))
    assert send(other, "deny", "decider", reason="no").status_code == 302
    assert send(other, "edit", **MUCH, warned=mark).status_code == 409, "of what another decided since"
    answer = send(cheap, "edit", "viewer", **MUCH)  # who may not decide has no preview asked
    assert (answer.status_code, b"than was paid" in answer.content) == (403, False)
    for one, cents in ((cheap, "1200"), (dear, "9999")):
        assert send(one, "edit", **{"argument-cents": cents}).status_code == 302, "or on the card before"
    assert told(approval).endswith("9999 paid")
    assert "Reason: no" in told(other)


@tool(
    requires_approval=True,
    sensitive=["pin"],
    preview=lambda args: {"warnings": ["<b>More</b> than was paid"] * (args["cents"] > 4990)},
)
def pay_by_pin(cents: int, pin: str) -> str:
    """Pay."""
    return f"{cents} paid"


MUCH = {"argument-cents": "9999"}


def paid_by_pin(*cents: int) -> list[Approval]:
    return asked(*(call("pay_by_pin", cents=one, pin="pin-4711") for one in cents), tools=[pay_by_pin])


def test_the_mark_of_a_second_press_is_of_one_person_and_card_and_tells_nothing(world: World) -> None:
    first, second = paid_by_pin(5, 6)

    def mark(approval: Approval, role: str, **data: str) -> str:
        answer = send(approval, "edit", role, **MUCH, **data)
        assert (answer.status_code, b"pin-4711" in answer.content) == (400, False)
        return mark_of(answer)

    mine = mark(first, "superuser")
    guessed = [{"cents": 9999, "pin": "pin-4711"}, "<b>More</b> than was paid"]
    assert mine != canonical.digest(guessed), "whoever tries all PINs would find it"
    assert len({mine, mark(second, "superuser"), mark(first, "decider", warned=mine)}) == 3
    assert mark(first, "superuser", warned=canonical.digest(guessed)) == mine, "a forged mark is none"
    assert {one.status for one in Approval.objects.all()} == {"pending"}
    assert send(first, "edit", **MUCH, warned=mine).status_code == 302


@pytest.mark.parametrize("is_declared", [False, True], ids=["gone", "of another definition"])
def test_a_call_of_an_unknown_tool_can_be_denied_but_not_edited(world: World, is_declared: bool) -> None:
    approval = world.waiting()
    with isolated_registry():
        if is_declared:
            Agent("gated-waiting", instructions="Else.", model=ScriptedModel([]), tools=[refund])
        assert url(approval, "edit") not in look(approval, "does not have this version of the tool").forms
        assert send(approval, "edit", **{"argument-cents": "1"}).status_code == 409
        assert send(approval, "deny", reason="gone").status_code == 302


def test_a_card_costs_the_same_however_long_the_history_is(world: World) -> None:
    def cost(approval: Approval) -> int:
        return len(queries(lambda: look(approval)))

    alone = cost(world.waiting("s0"))
    for number in range(1, 8):
        approve(world.waiting(f"s{number}").pk, None)
    sweep()
    assert cost(world.waiting("last")) <= alone + 1


def test_another_decision_of_ones_own_is_not_taken_for_a_double_click(world: World) -> None:
    approval = world.waiting()
    assert send(approval, "approve").status_code == 302
    for verb, data in {"edit": {"argument-cents": "1"}, "approve": {"reason": "another note"}}.items():
        told = "Your decision was not recorded. Approved by superuser"
        says(send(approval, verb, **data), told, status=409)
    other = world.waiting("other")
    assert send(other, "answer", text="yes").status_code == 302
    assert send(other, "answer", text="no").status_code == 409
    assert send(other, "answer", text="yes").status_code == 302, "a double click"


def break_it(args: dict[str, Any]) -> dict[str, Any]:
    with transaction.atomic(savepoint=False), connection.cursor() as cursor:  # as an ORM write has it
        cursor.execute("SELECT nonsense FROM nowhere")
    return {}


@tool(requires_approval=True, preview=break_it)
def breaking(number: str) -> str:
    """Do something."""
    return "done"


@ELSEWHERE
def test_a_preview_that_breaks_the_database_breaks_no_page(
    world: World, requests_commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_atomic = connections.settings["default"]["ATOMIC_REQUESTS"]
    if is_atomic and connection.vendor == "sqlite":  # the request keeps the lock that the preview waits for
        monkeypatch.setattr(card, "PATIENCE", 0.5)
    approval = asked(call("breaking", number="A1"), tools=[breaking])[0]
    assert "What will run" in look(approval).text
    assert send(approval, "deny", reason="").status_code == 400
    assert send(approval, "edit", **{"argument-number": "A2"}).status_code == 302
    approval.refresh_from_db()
    assert approval.status == "approved"


def made(value: Any) -> Preview:
    """Build a preview of what a tool returned."""
    found = preview(value)
    assert found is not None
    return found


def test_previews_links_and_quotes_are_in_words_and_amounts_are_written_as_on_the_card() -> None:
    def line(before: Any, after: Any) -> tuple[str, str, str]:
        [one] = made({"before": {"paid_cents": before}, "after": {"paid_cents": after}}).changes
        return one.label, one.before, one.after

    assert line(0, 123_450) == ("paid", "0.00", "1,234.50")
    assert line(None, 990) == ("paid", "", "9.90")
    for odd in ("nothing", 99.5, True):  # of which nobody knows what unit it has
        assert line(990, odd)[:2] == ("paid_cents", "990")
    links = ["/admin/shop/order/27/change/", "https://bank.example/a?b=1", ["Order 27", "/x"]]
    texts = [text for text, _url in made({"links": links}).links]
    assert texts == ["Open the page about it", "Open bank.example", "Order 27"]
    assert named("total_cents", 123456) == ("total", "1,234.56")
    assert named("cents", -5) == ("amount", "-0.05")
    for odd in (True, "12", None, 1.5):
        assert named("total_cents", odd)[0] == "total cents"
    found = [{"title": "Returns", "paid_cents": 2490, "open": True, "tracking": None}, {"title": "Repairs"}]
    assert spoken(found) == "title Returns, paid 24.90, open yes, tracking -;\ntitle Repairs"
    quotes = brief("Refund 1234.56 EUR for order 7", {"order": 7, "amount_cents": 123456, "other_cents": 5})
    assert [(one.label, one.short) for one in quotes] == [("other", "0.05")]


def test_an_endless_or_odd_preview_breaks_nothing_and_masks_what_is_sensitive() -> None:
    values = {f"line {number}": "x" * 5000 for number in range(300)}
    endless = made({"before": values, "after": values})
    assert (len(endless.changes), endless.left_out) == (100, 200)
    assert "and 3000 characters more" in endless.changes[0].before
    for odd in (None, "", [], {}, "one", ["a", None, "", 7, {"x": "<b>"}], {"a": 1}, 5, True, ["w"] * 300):
        warnings = made({"warnings": odd, "after": {"n": 1}}).warnings
        assert len(warnings) <= 100
        assert not [text for text in warnings if "<b>" in text]
    assert made({"warnings": "only one"}).warnings == ["only one"]
    mask = Mask([{"tools": {"pay": {"sensitive": ["iban"]}}}])
    hidden = made(mask.tool_text("pay", {"before": None, "after": {"iban": "DE1", "to": {"iban": "DE2"}}}))
    assert "DE" not in str(hidden)
    mask.know("pay", {"iban": "DE4711"})
    assert "4711" not in str(preview(mask.tool_text("pay", {"note": "to DE4711 today", "other": 5})))


class OnlyCheap(Policy):
    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        """Fail for what is expensive."""
        if arguments["cents"] > 5000:
            raise LookupError("no such price")
        return True


def test_a_rule_of_the_project_that_fails_lets_nobody_decide(world: World, settings: Any) -> None:
    approval, other = world.waiting(), world.waiting("other", 6000)
    settings.AGENTRUNS_POLICY = f"{__name__}.OnlyCheap"
    assert "The project's policy does not let decider decide this." in look(other, role="decider").text
    assert send(other, "approve", "decider").status_code == 403
    assert send(approval, "approve", "decider").status_code == 302
    listed("approval", "decider", mine="yes")


def test_an_approval_that_an_edit_voided_can_be_given_again(world: World) -> None:
    by_two = tool(name="refund", requires_approval=True, approvals=2)(refund.fn)
    approval = world.waiting(tools=[by_two])
    approve(approval.pk, user("decider"), digest=approval.digest)
    edited = approve(approval.pk, user("superuser"), digest=approval.digest, arguments={"cents": 4000})
    approve(approval.pk, user("superuser"), digest=edited.digest, arguments={"cents": 5000})
    assert "You approved it already." not in look(approval, role="decider").text
    assert send(approval, "approve", "decider").status_code == 302
    assert Approval.objects.get(pk=approval.pk).status == "approved"


def test_a_card_of_a_run_that_stands_still_says_so_before_and_after_the_approval(world: World) -> None:
    approval = world.waiting(tools=[secretive])
    assert "what is approved runs only when" not in look(approval).text
    waits = f"It waits for a person to decide: Waits for approval: {approval.title}"
    assert waits in words(look(approval.run))
    pause_run(approval.run_id, user("superuser"), reason="the bank of DE02-secret is closed")
    before = above(look(approval))
    assert "Its run is paused: what is approved runs only when somebody resumes it." in before
    assert "resumes it. Paused by superuser: “the bank of *** is closed”" in before
    shown = turn(approval).text
    assert "Its run is paused" in shown
    assert "Given by the program: “refund the lamp”" in shown, "what began it, once for all calls"
    assert "paused" in listed("approval").text
    Run.objects.update(status="orphaned")
    assert "A call of its run is in doubt: what is approved runs only when" in look(approval).text
    Run.objects.update(status="paused")
    answer = send(approval, "approve", follow=True)
    says(answer, "The call runs when somebody resumes the run, which is paused.")
    assert "when a person lets its run go on" in look(approval).text
    assert f"A worker then carries out what was approved: {approval.title}." in words(look(approval.run))
    chosen = {"action": "resume_selected", "_selected_action": str(approval.run_id)}
    bulk = read(browser("superuser").post("/admin/agentruns/run/", chosen)).text
    assert f"carries out what was approved: {approval.title}." in bulk
    assert "refund the lamp" in bulk, "the first line of its task"


def test_who_only_passed_on_a_text_is_not_its_author_and_nobody_is_the_program(world: World) -> None:
    given, own = world.waiting("given", actor=user("superuser")), world.waiting("own")
    assert "Given by superuser: “refund the lamp”" in look(given).text
    passed = run_agent(given.run.agent, "refund it", "passed", actor=user("superuser"), owner=user("viewer"))
    (card,) = passed.pending
    assert (card.run.owner_name, "Given by superuser: “refund it”" in look(card).text) == ("viewer", True)
    page = look(own)
    for one in (page, listed("approval", tool="refund"), listed("run"), look(own.run)):
        assert "the program" in one.text
    assert "Given by the program: “refund the lamp”" in page.text
    assert "Requesterthe program" in words(page)


def test_equal_calls_that_wait_in_other_sessions_are_said_and_lead_to_their_list(world: World) -> None:
    first, *more = [world.waiting(f"same-{number}") for number in range(3)]
    other, done = world.waiting("other", 6000), world.waiting("done")
    deny(done.pk, None, "no")
    page = look(first)
    assert "2 equal requests wait" in above(page)
    for one in (other, done):
        assert "equal request" not in look(one).text
    [link] = [link for link in page.links if "?same=" in link]
    found = read(browser("superuser").get(link))
    waiting = {url(one) for one in (first, *more)}
    assert {link.partition("?")[0] for link in found.links} & {*map(url, Approval.objects.all())} == waiting
    assert found.text.count("2 more like it wait") == 3
    assert listed("approval").text.count("more like it wait") == 3
    assert "2 equal requests wait" in turn(first).text
    for odd in ("x", "0" * 64):
        assert browser("superuser").get(f"/admin/agentruns/approval/?same={odd}").status_code == 200
    deny(more[0].pk, None, "no")
    assert "1 equal request waits" in look(first).text


def test_what_the_customer_wrote_since_stands_on_the_card(world: World) -> None:
    approval = world.waiting(tools=[secretive])
    session, agent = approval.run.session, approval.run.agent
    for number in range(5):
        text = f"<b>message</b> {number} about DE02-secret, {'please ' * 60}"
        send_message(user("superuser"), session, text, agent, idempotency_key=str(number))
    page = look(approval)
    before = above(page)
    assert "Messages since it was asked: 5" in before
    said = [number for number in range(5) if f"<b>message</b> {number} about ***" in before]
    assert said == [2, 3, 4], "the last of them"
    assert "2 more before" in before
    assert "secret" not in page.text
    html, written = page.html.split('class="ar-written', 1)
    assert html.count("<details") == html.count("</details>"), "they stand open"
    assert written[: written.index("</div>")].count("<summary>") == 3, "only the rest of a long one is folded"
