"""The card: everything that a decision needs, nothing that misleads, and all four verbs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from django import forms
from django.contrib.admin.models import LogEntry
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from pydantic import AfterValidator

from agentruns import (
    Agent,
    Policy,
    ToolContext,
    approve,
    ask_human,
    deny,
    pause_run,
    resume_run,
    run_agent,
    tool,
)
from agentruns.admin.approvals.texts import Preview, brief, preview
from agentruns.admin.forms import ValueField
from agentruns.admin.html import named, spoken
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.masking import Mask
from agentruns.models import Approval, Message, Run
from agentruns.services.runs import result_of
from agentruns.services.starting import send_message
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.tools import card
from agentruns.utils import json as canonical
from agentruns.utils.lanes import Lane
from tests.admin.pages import Page, read, snapshot, url
from tests.admin.people import browser, user
from tests.admin.world import World, dying, secretive, timed
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.shop.agents import act, call, refund, shop_agent
from tests.shop.models import Order
from tests.waiting import Hanging

pytestmark = pytest.mark.django_db
ELSEWHERE = pytest.mark.django_db(transaction=True)  # beside the request, as outside a TestCase


def shown(approval: Approval, role: str = "superuser") -> Page:
    response = browser(role).get(url(approval))
    assert response.status_code == 200
    return read(response)


def send(approval: Approval, verb: str, role: str = "superuser", **data: Any) -> Any:
    return browser(role).post(url(approval, verb), {"digest": approval.digest, **data})


def told(approval: Approval) -> Any:
    sweep()
    return Message.objects.get(kind="tool_result", call_id=approval.call_id).payload["content"]


@tool(
    requires_approval=True,
    preview=lambda args: {
        "before": {"note": Order.objects.get(number=args["number"]).note, "total": 100},
        "after": {"note": args["note"], "total": 100},
        "links": [
            {"label": "The order", "url": "/admin/shop/order/1/"},
            "javascript:alert(1)",
            "//evil.example",
        ],
    },
)
def note_down(number: str, note: str) -> str:
    """Write on an order.

    Args:
        note: in at most ten words
    """
    return "noted"


def noted(world: World) -> Approval:
    Order.objects.create(number="A1", customer="Ada", total_cents=100, note="old")
    agent = shop_agent("noting", {"tools": [call("note_down", number="A1", note="new")]}, tools=[note_down])
    return run_agent(agent, "note it", "noting").pending[0]


def test_the_preview_is_a_comparison_with_links_that_are_safe(world: World) -> None:
    page = shown(noted(world))
    assert "What it changes" in page.text
    assert page.cells("ar-preview") == [["note", "old", "new"], ["total", "100", "100"]]
    assert "/admin/shop/order/1/" in page.links
    assert not [link for link in page.links if "alert" in link or "evil" in link]
    assert "in at most ten words" in page.text, "what the tool says of its argument"


def test_a_preview_that_is_no_longer_true_is_shown_anew_and_flagged(world: World) -> None:
    approval = noted(world)
    assert "has changed since the agent asked" not in shown(approval).text
    Order.objects.update(note="newer")
    page = shown(approval)
    assert "The preview has changed since the agent asked." in page.text
    assert page.cells("ar-preview")[0] == ["note", "newer", "new"]
    deny(approval.pk, None, "no")
    assert shown(approval).cells("ar-preview")[0] == ["note", "old", "new"], "as it was decided upon"


HANGS = Hanging()


def hang(args: dict[str, Any]) -> dict[str, Any]:
    """Answer at once when the model asks, and to a page only when the test is over."""
    if args["cents"] in ASKED:
        HANGS.hang()
    ASKED.add(args["cents"])
    return {"before": {"paid": "nothing"}, "after": {"paid": args["cents"]}}


ASKED: set[int] = set()


@pytest.fixture
def hanging(world: World) -> Iterator[list[Approval]]:
    """Two cards of one reply whose preview hangs."""
    ASKED.clear()
    HANGS.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "PATIENCE", 0.3)
        patch.setattr(card, "_lane", Lane("tests", 4))
        pays = tool(name="pays", requires_approval=True, approvals=2, preview=hang)(paid)
        reply = {"tools": [call("pays", cents=cents) for cents in (100, 200)]}
        yield run_agent(shop_agent("hanging", reply, tools=[pays]), "pay", "hanging").pending
        assert not HANGS.was_waited_for
        HANGS.let_go()


def paid(cents: int) -> str:
    """Pay."""
    return "paid"


@ELSEWHERE
def test_a_preview_that_hangs_holds_up_no_card_and_no_decision(hanging: list[Approval]) -> None:
    first, second = hanging
    page = shown(first)
    assert "The preview cannot be refreshed, which took too long" in page.text
    assert page.cells("ar-preview") == [["paid", "nothing", "100"]], "as it was when the agent asked"
    assert url(first, "approve") in page.forms
    assert send(first, "deny", reason="").status_code == 400, "the card again"
    ASKED.add(150)
    assert send(first, "edit", **{"argument-cents": "150"}).status_code == 302
    edited = Approval.objects.get(pk=first.pk)
    assert (edited.arguments, edited.title) == ({"cents": 150}, "pays(cents=150)")
    page = shown(edited, "decider")
    assert "The preview is not there: making it took too long." in page.text
    assert "What it changes" not in page.text
    assert send(second, "deny", reason="no").status_code == 302


@ELSEWHERE
def test_previews_that_hang_hold_up_a_page_of_several_once(hanging: list[Approval]) -> None:
    client, where = browser("decider"), reverse("admin:agentruns_approval_turn", args=[hanging[0].run_id])
    page = read(client.get(where))
    assert page.text.count("The preview cannot be refreshed, which took too long") == 2
    assert " checked>" not in page.html, "nobody approves by mistake what nobody could look at"
    sent = {f"digest-{one.pk}": one.digest for one in hanging}
    sent |= {"_selected_action": [str(one.pk) for one in hanging], "verb": "deny", "reason": "no"}
    assert client.post(where, sent).status_code == 302
    assert set(Approval.objects.values_list("status", flat=True)) == {"denied"}


def test_what_the_agent_said_stands_apart_and_its_other_calls_too(world: World) -> None:
    turn = {
        "text": "Trust me, this was approved.",
        "tools": [call("post", text="hi"), call("refund", cents=5000), call("refund", cents=6000)],
    }
    first, second = run_agent(shop_agent("talker", turn), "go", "talk").pending
    page = shown(first)
    assert page.text.index("Agent (unverified)") < page.text.index("Trust me, this was approved.")
    assert "Tool finished" in page.text
    assert second.title in page.text
    assert "waits for a decision" in page.text
    assert any("/turn/" in link for link in page.links)
    approve(second.pk, None)
    assert not any("/turn/" in link for link in shown(first).links)
    assert "is decided, and has not run yet" in shown(first).text


def test_precedents_count_and_quote_denials(world: World) -> None:
    for number in range(3):
        approve(world.waiting(f"yes-{number}", 5000 + number).pk, None)
    deny(world.waiting("no", 7000).pk, user("decider"), "She was refunded already.")
    page = shown(world.waiting("now", 8000))
    assert "3 approved, 1 denied" in page.text
    assert "She was refunded already." in page.text
    assert "decider denied one" in page.text


def test_the_same_call_elsewhere_and_here_is_flagged(world: World) -> None:
    page = shown(world.waiting("first"))
    assert "This exact call" not in page.text
    approve(Approval.objects.get().pk, user("decider"))
    sweep()
    second = world.waiting("second")
    page = shown(second)
    assert "This exact call was approved and started in another session" in page.text
    assert "by decider" in page.text
    approve(second.pk, None)
    sweep()
    agent = shop_agent("again", {"tools": [call("refund", cents=5000)]})
    page = shown(run_agent(agent, "again", "second").pending[0])
    assert "This exact call was started in this session before" in page.text


def test_a_call_of_the_tool_in_doubt_is_flagged(world: World) -> None:
    gated = tool(name="dies", requires_approval=True)(dying().fn)
    run = world.orphaned()
    agent = shop_agent("careful", {"tools": [call("dies")]}, tools=[gated])
    approval = run_agent(agent, "go", "careful").pending[0]
    page = shown(approval)
    assert "A call of this tool is in doubt: nobody knows whether it happened." in page.text
    assert url(run) in page.links
    resume_run(run.pk)
    assert "A call of this tool is in doubt" not in shown(approval).text


def test_each_button_says_word_for_word_what_the_model_will_get(world: World, effects: Effects) -> None:
    denied, answered, edited = (
        world.waiting(name, cents=n) for name, n in (("d", 5000), ("a", 6000), ("e", 7000))
    )
    page = shown(denied)
    send(denied, "deny", reason="(your reason)")
    assert " ".join(told(denied).split()) in " ".join(page.text.split())
    assert send(answered, "answer", text=" Pay her 20 EUR\r\nby hand. ").status_code == 302
    assert told(answered) == " Pay her 20 EUR\nby hand. ", "to the letter"
    assert send(edited, "edit", **{"argument-cents": "2000", "reason": "enough"}).status_code == 302
    told(edited)
    assert [line["cents"] for line in effects.lines()] == [2000]
    messages = str(result_of(edited.run_id).messages)
    assert 'Executed with the arguments a person set: {"cents":2000}' in messages


def test_an_edit_keeps_what_was_proposed_what_was_entered_and_what_runs(world: World) -> None:
    approval = world.waiting()
    assert send(approval, "edit", **{"argument-cents": " 2000 ", "reason": "enough"}).status_code == 302
    rows = {row.kind: row.payload for row in Message.objects.filter(run=approval.run)}
    assert rows["assistant"]["calls"][0]["arguments"] == {"cents": 5000}
    decided = rows["approval_decided"]
    assert (decided["edited"], decided["arguments"]) == ({"cents": 2000}, {"cents": 2000})
    assert (decided["actor"]["name"], decided["reason"]) == ("superuser", "enough")
    page = shown(approval)
    assert "Edited by a person. The model had proposed:" in page.text
    assert "5000" in page.text
    assert LogEntry.objects.get().get_change_message() == "Approved with edited arguments."


@pytest.mark.parametrize(
    ("entered", "says"),
    [("5000", "You changed nothing."), ("", "This field is required."), ("many", "Enter a whole number.")],
)
def test_an_edit_that_cannot_be_is_refused_and_keeps_what_was_entered(
    world: World, entered: str, says: str
) -> None:
    approval, before = world.waiting(), snapshot()
    response = send(approval, "edit", **{"argument-cents": entered, "reason": "because I say so"})
    page = read(response)
    assert response.status_code == 400
    assert says in page.text
    assert "because I say so" in page.text
    assert snapshot() == before


def test_every_kind_of_argument_can_be_edited_and_what_is_left_alone_stays(world: World) -> None:
    given = {
        "text": "short", "lines": "one\ntwo", "flag": True, "ratio": 0.1, "hidden": "abc\u202edef",
        "tags": ["a", "b"], "maybe": None,
    }  # fmt: skip
    agent = shop_agent("every", {"tools": [call("everything", **given)]}, tools=[everything])
    approval = run_agent(agent, "go", "every").pending[0]
    fields = shown(approval).forms[url(approval, "edit")]
    sent = {
        name: value.replace("\n", "\r\n") for name, value in fields.items() if name.startswith("argument-")
    }
    response = send(approval, "edit", **{**sent, "argument-flag": "true", "reason": ""})
    assert "You changed nothing." in read(response).text, "a round trip through the page changes nothing"
    response = send(
        approval,
        "edit",
        **{**sent, "argument-flag": "false", "argument-tags": '["c"]', "argument-maybe": '"x"'},
    )
    assert response.status_code == 302
    approval.refresh_from_db()
    assert approval.arguments == {**given, "flag": False, "tags": ["c"], "maybe": "x"}


@tool(requires_approval=True)
def everything(
    text: str, lines: str, flag: bool, ratio: float, hidden: str, tags: list[str], maybe: str | None
) -> str:
    """Take one of each."""
    return "done"


def test_sensitive_arguments_are_masked_and_survive_an_edit_of_the_others(
    world: World, effects: Effects
) -> None:
    approval = world.waiting(tools=[secretive])
    page = shown(approval, "decider")
    assert "DE02-secret" not in page.text
    assert "***" in page.text
    assert "agentruns.reveal_arguments" in page.text
    assert "argument-iban" not in page.forms[url(approval, "edit")]
    sent = {"argument-cents": "2000", "argument-iban": "DE99", "revealed": "1"}
    response = send(approval, "edit", "decider", **sent)
    assert response.status_code == 400
    assert "An argument that you sent is masked now." in read(response).text
    assert send(approval, "edit", "decider", **{"argument-cents": "2000"}).status_code == 302
    sweep()
    assert [(line["cents"], line["iban"]) for line in effects.lines()] == [(2000, "DE02-secret")]
    assert "DE02-secret" not in browser("decider").get(url(approval)).content.decode()


def test_who_may_reveal_may_edit_what_was_revealed(world: World, effects: Effects) -> None:
    approval = world.waiting(tools=[secretive])
    page = read(browser("revealer").post(url(approval, "reveal")))
    assert page.forms[url(approval, "edit")]["argument-iban"] == "DE02-secret"
    assert page.forms[url(approval, "edit")]["revealed"] == "1"
    sent = {"argument-cents": "5000", "argument-iban": "DE99", "revealed": "1"}
    assert send(approval, "edit", "revealer", **sent).status_code == 302
    sweep()
    assert effects.lines()[0]["iban"] == "DE99"


def test_more_time(world: World) -> None:
    approval = world.waiting(tools=[timed])
    assert "Extend" in shown(approval).text
    seen = shown(approval).forms[url(approval, "extend")]["seen"]
    assert send(approval, "extend", hours="4", seen=seen).status_code == 302
    again = send(approval, "extend", hours="4", seen=seen)
    assert again.status_code == 409, "a double click gives no more time"
    assert "was given more time already" in read(again).text
    for odd in ("", "2026-13-45T00:00:00", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+14:00"):
        refused = send(approval, "extend", hours="4", seen=odd)
        assert refused.status_code == 400, odd
        assert "The page does not say what it showed." in read(refused).text
    later = Approval.objects.get()
    assert approval.expires_at is not None
    assert later.expires_at is not None
    assert (later.expires_at - approval.expires_at).total_seconds() == 4 * 3600
    assert "More time given" in shown(later).text
    assert send(approval, "extend", hours="5", seen=seen).status_code == 400


@pytest.mark.parametrize("sent", ["[" * 100_000, "1" * 5000, "{"], ids=["deep", "long", "cut off"])
def test_what_no_parser_takes_is_no_json_and_is_shown_again(sent: str) -> None:
    class Edit(forms.Form):
        value = ValueField()

    form = Edit({"value": sent})
    assert form.errors == {"value": ["This is not JSON."]}
    assert sent in str(form["value"])


def test_a_question_is_answered_or_denied_and_never_approved(world: World) -> None:
    agent = Agent(
        "curious",
        instructions="Ask.",
        model=ScriptedModel(
            [{"tools": [call("ask_human", question="Which colour?", choices=["red", "blue"])]}]
        ),
        tools=[ask_human],
    )
    approval = run_agent(agent, "paint it", "paint").pending[0]
    page = shown(approval)
    assert "Which colour?" in page.text
    assert "red A" in " ".join(page.text.split()), "a button for each choice"
    assert "Answer, told to the model" not in page.text, "and no other answer"
    assert sorted(form for form in page.forms if "approval" in form) == [
        url(approval, "answer"), url(approval, "deny"),
    ]  # fmt: skip
    before = snapshot()
    for verb in ("approve", "edit"):
        response = send(approval, verb, **{"argument-question": "Which size?", "argument-choices": "null"})
        assert response.status_code == 409
        assert "there is nothing to execute" in read(response).text
        assert snapshot() == before
    for outside in ({"text": "green"}, {"choice": "2"}, {"choice": "-1", "text": "green"}, {"choice": "red"}):
        assert send(approval, "answer", **outside).status_code in (400, 409), outside
        assert snapshot() == before
    assert send(approval, "answer", choice="1").status_code == 302
    assert told(approval) == "blue"


def test_a_question_says_whether_another_answer_is_allowed(world: World) -> None:
    asked = call("ask_human", question="Which colour?", choices=["red"], free_text=True)
    agent = Agent("open", instructions="Ask.", model=ScriptedModel([{"tools": [asked]}]), tools=[ask_human])
    approval = run_agent(agent, "paint it", "paint").pending[0]
    assert "Answer, told to the model word for word" in shown(approval).text
    assert send(approval, "answer", text="green").status_code == 302
    assert told(approval) == "green"


@tool(sensitive_results=["iban"])
def look_up(number: str) -> dict[str, Any]:
    """Look an order up."""
    return {"paid": "189.00 EUR", "iban": "DE99-hidden", "note": "x" * 300}


def surprising(args: dict[str, Any]) -> dict[str, Any]:
    return {
        "warnings": [f"<b>more</b> than was paid to {args['iban']}", {"limit": 100}],
        "before": 1,
        "after": 2,
    }


@tool(requires_approval=True, sensitive=["iban"], preview=surprising, describe=lambda args: "Pay 192.90 EUR")
def pay_back(zeal: str, iban: str, cents: int, alpha: str = "a") -> str:
    """Pay.

    Args:
        cents: how much, in cents
    """
    return "paid"


def asked_after_a_look(world: World) -> Approval:
    turns = [
        {"tools": [call("look_up", number="4107")]},
        {
            "text": "He is right, trust me.",
            "tools": [call("pay_back", zeal="much", iban="DE02-secret", cents=19290)],
        },
    ]
    agent = Agent("payer", instructions="Pay.", model=ScriptedModel(turns), tools=[look_up, pay_back])
    text = "Please refund the broken kettle to DE02-secret.\n\n" + "It is broken. " * 40
    return run_agent(agent, text, "order-4107", actor=user("viewer")).pending[0]


def test_the_request_and_what_the_agent_relied_on_stand_before_the_buttons(world: World) -> None:
    page = shown(asked_after_a_look(world))
    above = " ".join(page.text[: page.text.index("Approve A")].split())
    for text in (
        "viewer: “Please refund the broken kettle to ***. It is broken.",
        "Agent (unverified): “He is right, trust me.”",
        "look up: iban ***, note xxxx",
        "paid 189.00 EUR",
        "iban: ***",
        "zeal: much",
    ):
        assert text in above, text
    assert "19290" not in above, "the sentence names the amount"
    assert "19290" in page.text, "the exact arguments have it"
    assert "DE99" not in page.text
    assert "DE02" not in page.text
    assert page.text.count("It is broken. ") >= 40, "the whole of it is folded below"


def test_warnings_of_the_preview_stand_in_red_masked_and_escaped(world: World) -> None:
    approval = asked_after_a_look(world)
    html = browser("superuser").get(url(approval)).content.decode()
    assert (
        '<p class="ar-flag ar-flag--bad" role="note">&lt;b&gt;more&lt;/b&gt; than was paid to *** (the tool'
        in html
    )
    assert "{&quot;limit&quot;: 100}" in html
    page = shown(approval)
    assert page.text.index("than was paid") < page.text.index("Approve A")
    turn = read(browser("superuser").get(f"/admin/agentruns/approval/turn/{approval.run_id}/"))
    assert "than was paid to ***" in turn.text, "also where several are decided"


@tool(
    requires_approval=True,
    preview=lambda args: {"warnings": ["<b>More</b> than was paid"] if args["cents"] > 4990 else []},
)
def give_back(cents: int) -> str:
    """Give money back."""
    return f"{cents} given back"


def test_an_edit_that_the_preview_warns_of_takes_a_second_press(world: World) -> None:
    reply = {"tools": [call("give_back", cents=1250)]}
    approval = run_agent(shop_agent("giving", reply, tools=[give_back]), "give", "giving").pending[0]
    edit = {"argument-cents": "9999"}
    answer = send(approval, "edit", **edit)
    page = read(answer)
    assert answer.status_code == 400
    assert "With these arguments the tool's preview warns: <b>More</b> than was paid." in page.text
    assert Approval.objects.get(pk=approval.pk).status == "pending"
    assert ("What will run" in page.text, "What the agent asks for" in page.text) == (False, True)
    [mark] = re.findall(r'name="warned" value="([0-9a-f]{64})"', answer.content.decode())
    other = send(approval, "edit", **{"argument-cents": "9998"}, warned=mark)
    assert other.status_code == 400, "other arguments than those that were warned of"
    assert send(approval, "edit", **edit, warned=mark).status_code == 302
    assert told(approval).endswith("9999 given back")


@tool(
    requires_approval=True,
    sensitive=["pin"],
    preview=lambda args: {"warnings": ["Much"] * (args["cents"] > 9)},
)
def pay_by_pin(cents: int, pin: str) -> str:
    """Pay."""
    return f"{cents} paid"


def test_the_mark_of_a_second_press_is_of_one_person_and_card_and_gives_no_hidden_argument_away(
    world: World,
) -> None:
    reply = {"tools": [call("pay_by_pin", cents=cents, pin="pin-4711") for cents in (5, 6)]}
    first, second = run_agent(shop_agent("pays", reply, tools=[pay_by_pin]), "pay", "pays").pending
    edit = {"argument-cents": "9999"}

    def mark(approval: Approval, role: str, **data: str) -> str:
        answer = send(approval, "edit", role, **edit, **data)
        assert (answer.status_code, b"pin-4711" in answer.content) == (400, False)
        return str(re.findall(r'name="warned" value="([0-9a-f]{64})"', answer.content.decode())[0])

    mine = mark(first, "superuser")
    guessed = [{"cents": 9999, "pin": "pin-4711"}, "Much"]
    assert mine != canonical.digest(guessed), "whoever tries all PINs would find it"
    assert len({mine, mark(second, "superuser"), mark(first, "decider", warned=mine)}) == 3
    assert mark(first, "superuser", warned=canonical.digest(guessed)) == mine, "a forged mark is none"
    assert {one.status for one in Approval.objects.all()} == {"pending"}
    assert send(first, "edit", **edit, warned=mine).status_code == 302


def test_a_second_press_does_not_overrule_what_another_decided_since(world: World) -> None:
    reply = {"tools": [call("give_back", cents=1250)]}
    approval = run_agent(shop_agent("giving", reply, tools=[give_back]), "give", "giving").pending[0]
    edit = {"argument-cents": "9999"}
    [mark] = re.findall(
        r'name="warned" value="([0-9a-f]{64})"', send(approval, "edit", **edit).content.decode()
    )
    assert send(approval, "deny", "decider", reason="no").status_code == 302
    assert send(approval, "edit", **edit, warned=mark).status_code == 409
    assert "Reason: no" in told(approval)


def test_who_may_not_decide_has_no_preview_asked_about_other_arguments(world: World) -> None:
    reply = {"tools": [call("give_back", cents=1250)]}
    approval = run_agent(shop_agent("giving", reply, tools=[give_back]), "give", "giving").pending[0]
    answer = send(approval, "edit", "viewer", **{"argument-cents": "9999"})
    assert (answer.status_code, b"than was paid" in answer.content) == (403, False)


def test_an_edit_without_a_new_warning_is_one_press(world: World) -> None:
    reply = {"tools": [call("give_back", cents=cents) for cents in (1250, 9000)]}
    result = run_agent(shop_agent("giving", reply, tools=[give_back]), "give", "giving")
    for approval, cents in zip(result.pending, ("1200", "9999"), strict=True):
        assert send(approval, "edit", **{"argument-cents": cents}).status_code == 302, "or on the card before"


def test_arguments_stand_in_the_order_of_the_signature_with_what_the_tool_says_of_them(world: World) -> None:
    approval = asked_after_a_look(world)
    page = shown(approval)
    exact = page.text[page.text.index("exactly these arguments") :]
    places = [
        exact.index(text) for text in ("zeal text", "iban text", "cents number: how much, in cents", "alpha")
    ]
    assert places == sorted(places)
    with isolated_registry():
        assert "exactly these arguments" in shown(approval).text, "in their own order where it is not known"


def test_why_is_said_only_where_it_says_more(world: World) -> None:
    assert "Why it is asked" not in shown(world.waiting()).text
    gated = tool(name="dies")(dying().fn)
    run = world.orphaned()
    resume_run(run.pk)
    agent = shop_agent("careful", {"tools": [call("dies")]}, tools=[gated])
    approval = run_agent(agent, "go", "orphaned").pending[0]
    assert "Why it is asked: An earlier call of dies in this session" in shown(approval).text


@pytest.mark.parametrize("is_declared", [False, True], ids=["gone", "of another definition"])
def test_a_card_of_a_tool_the_run_does_not_know_can_be_denied_but_not_edited(
    world: World, is_declared: bool
) -> None:
    approval = world.waiting()
    with isolated_registry():
        if is_declared:
            Agent("gated-waiting", instructions="Else.", model=ScriptedModel([]), tools=[refund])
        page = shown(approval)
        assert "does not have this version of the tool" in page.text
        assert url(approval, "edit") not in page.forms
        assert send(approval, "edit", **{"argument-cents": "1"}).status_code == 409
        assert send(approval, "deny", reason="gone").status_code == 302


def test_a_card_costs_the_same_however_long_the_history_is(world: World) -> None:
    def cost(approval: Approval) -> int:
        with CaptureQueriesContext(connection) as queries:
            shown(approval)
        return len(queries)

    alone = cost(world.waiting("s0"))
    for number in range(1, 8):
        approve(world.waiting(f"s{number}").pk, None)
    sweep()
    assert cost(world.waiting("last")) <= alone + 1


@tool(name="refund", requires_approval=True, approvals=2)
def by_two(ctx: ToolContext, cents: int) -> str:
    """Refund, if two people say so."""
    return act("refund", ctx, cents=cents)


@tool(requires_approval=True)
def letter(copies: int, body: str) -> str:
    """Write."""
    return "written"


@pytest.mark.parametrize("body", ["  - indented\n- list\n\n", "\t tab", "line\n", "\nlead", " ", ""])
def test_an_edit_of_one_argument_leaves_the_others_to_the_letter(world: World, body: str) -> None:
    agent = shop_agent("writer", {"tools": [call("letter", copies=1, body=body)]}, tools=[letter])
    approval = run_agent(agent, "go", "letter").pending[0]
    fields = shown(approval).forms[url(approval, "edit")]
    sent = {"argument-copies": "2", "argument-body": fields["argument-body"].replace("\n", "\r\n")}
    assert send(approval, "edit", **sent).status_code == 302
    approval.refresh_from_db()
    assert approval.arguments == {"copies": 2, "body": body}
    other = run_agent(agent, "go", "letter-2").pending[0]
    assert send(other, "edit", **{"argument-copies": "3"}).status_code == 302
    other.refresh_from_db()
    assert other.arguments == {"copies": 3, "body": body}, "what is not sent stays"


def test_what_was_revealed_stays_so_when_an_edit_is_refused_and_is_logged(
    world: World, effects: Effects
) -> None:
    approval = world.waiting(tools=[picky])
    sent = {"argument-cents": "2000", "argument-iban": "BAD1", "revealed": "1"}
    response = send(approval, "edit", "revealer", **sent)
    page = read(response)
    assert response.status_code == 409
    assert "Saw the sensitive arguments." in LogEntry.objects.get().get_change_message()
    fields = page.forms[url(approval, "edit")]
    assert (fields["revealed"], fields["argument-iban"]) == ("1", "BAD1")
    sent["argument-iban"] = "DE-RIGHT"
    assert send(approval, "edit", "revealer", **sent).status_code == 302
    sweep()
    assert [(line["cents"], line["iban"]) for line in effects.lines()] == [(2000, "DE-RIGHT")]


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


def test_a_refused_edit_quotes_no_sensitive_value(world: World) -> None:
    with pytest.raises(ApprovalStateError) as refused:
        approve(world.waiting("b", tools=[picky]).pk, None, arguments={"cents": 1, "iban": "BAD-99-17"})
    assert "BAD-99-17" not in str(refused.value)
    assert "***" in str(refused.value)


def test_another_decision_of_ones_own_is_not_taken_for_a_double_click(world: World) -> None:
    approval = world.waiting()
    assert send(approval, "approve").status_code == 302
    for verb, data in {"edit": {"argument-cents": "1"}, "approve": {"reason": "another note"}}.items():
        response = send(approval, verb, **data)
        assert response.status_code == 409, verb
        assert "Your decision was not recorded." in read(response).text
    other = world.waiting("other")
    assert send(other, "answer", text="yes").status_code == 302
    assert send(other, "answer", text="no").status_code == 409
    assert send(other, "answer", text="yes").status_code == 302, "a double click"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("atomic", [False, True])
def test_a_preview_that_breaks_the_database_breaks_no_page(
    world: World, settings: Any, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    if atomic and connection.vendor == "sqlite":  # then the request keeps the lock that the preview waits for
        monkeypatch.setattr(card, "PATIENCE", 0.5)
    agent = shop_agent("breaking", {"tools": [call("breaking", number="A1")]}, tools=[breaking])
    approval = run_agent(agent, "go", "breaking").pending[0]
    assert "What will run" in shown(approval).text
    assert send(approval, "deny", reason="").status_code == 400
    assert send(approval, "edit", **{"argument-number": "A2"}).status_code == 302
    approval.refresh_from_db()
    assert approval.status == "approved"


def break_it(args: dict[str, Any]) -> dict[str, Any]:
    with transaction.atomic(savepoint=False), connection.cursor() as cursor:  # as an ORM write has it
        cursor.execute("SELECT nonsense FROM nowhere")
    return {}


@tool(requires_approval=True, preview=break_it)
def breaking(number: str) -> str:
    """Do something."""
    return "done"


@ELSEWHERE
def test_a_preview_that_is_gone_or_endless_says_so(world: World) -> None:
    approval = noted(world)
    Order.objects.all().delete()
    page = shown(approval)
    assert "The preview cannot be refreshed" in page.text
    assert page.cells("ar-preview")[0] == ["note", "old", "new"]
    values = {f"line {number}": "x" * 5000 for number in range(300)}
    endless = preview({"before": values, "after": values})
    assert endless is not None
    assert (len(endless.changes), endless.left_out) == (100, 200)
    assert "and 3000 characters more" in endless.changes[0].before


def test_a_preview_names_and_writes_amounts_as_the_card_does() -> None:
    def lines(before: Any, after: Any) -> list[tuple[str, str, str]]:
        made = preview({"before": {"paid_cents": before}, "after": {"paid_cents": after}})
        assert made is not None
        return [(one.label, one.before, one.after) for one in made.changes]

    assert lines(0, 123_450) == [("paid", "0.00", "1,234.50")]
    assert lines(None, 990) == [("paid", "", "9.90")]
    for odd in ("nothing", 99.5, True):  # of which nobody knows what unit it has
        ((label, before, _after),) = lines(990, odd)
        assert (label, before) == ("paid_cents", "990")


def test_odd_warnings_of_a_preview_break_nothing() -> None:
    for odd in (None, "", [], {}, "one", ["a", None, "", 7, {"x": "<b>"}], {"a": 1}, 5, True, ["w"] * 300):
        made = preview({"warnings": odd, "after": {"n": 1}})
        assert made is not None
        assert len(made.warnings) <= 100
        assert not [text for text in made.warnings if "<b>" in text]
    warned = preview({"warnings": "only one"})
    assert warned is not None
    assert warned.warnings == ["only one"]


def test_a_preview_masks_what_is_sensitive() -> None:
    mask = Mask([{"tools": {"pay": {"sensitive": ["iban"]}}}])
    hidden = preview(mask.made("pay", {"before": None, "after": {"iban": "DE1", "to": {"iban": "DE2"}}}))
    assert hidden is not None
    assert "DE" not in str(hidden)
    mask.know("pay", {"iban": "DE4711"})
    assert "4711" not in str(preview(mask.made("pay", {"note": "to DE4711 today", "other": 5})))
    assert preview(mask.made("pay", {"note": "to de 47 11", "other": 5})) == Preview(note="***")  # in doubt


def test_a_rule_of_the_project_that_fails_lets_nobody_decide_and_breaks_no_page(
    world: World, settings: Any
) -> None:
    approval, other = world.waiting(), world.waiting("other", 6000)
    settings.AGENTRUNS_POLICY = f"{__name__}.OnlyCheap"
    page = read(browser("decider").get(url(other)))
    assert "The project's policy does not let decider decide this." in page.text
    assert send(other, "approve", "decider").status_code == 403
    assert send(approval, "approve", "decider").status_code == 302
    assert browser("decider").get("/admin/agentruns/approval/?mine=yes").status_code == 200


class OnlyCheap(Policy):
    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        """Fail for what is expensive."""
        if arguments["cents"] > 5000:
            raise LookupError("no such price")
        return True


def test_an_approval_that_an_edit_voided_can_be_given_again(world: World) -> None:
    approval = world.waiting(tools=[by_two])
    approve(approval.pk, user("decider"), digest=approval.digest)
    edited = approve(approval.pk, user("superuser"), digest=approval.digest, arguments={"cents": 4000})
    approve(approval.pk, user("superuser"), digest=edited.digest, arguments={"cents": 5000})
    page = shown(approval, "decider")
    assert "You approved it already." not in page.text
    assert send(approval, "approve", "decider").status_code == 302
    approval.refresh_from_db()
    assert approval.status == "approved"


def test_an_approved_call_of_a_paused_run_says_that_it_waits(world: World) -> None:
    approval = world.waiting()
    pause_run(approval.run_id, None)
    page = read(browser("superuser").post(url(approval, "approve"), {"digest": approval.digest}, follow=True))
    assert "The call runs when somebody resumes the run, which is paused." in page.text
    assert "when a person lets its run go on" in shown(approval).text
    text = " ".join(read(browser("superuser").get(url(approval.run))).text.split())
    assert f"A worker then carries out what was approved: {approval.title}." in text
    listed = {"action": "resume_selected", "_selected_action": str(approval.run_id)}
    bulk = read(browser("superuser").post("/admin/agentruns/run/", listed)).text
    assert f"carries out what was approved: {approval.title}." in bulk
    assert "refund the lamp" in bulk, "the first line of its task"


def test_a_card_says_at_its_top_that_its_run_stands_still(world: World) -> None:
    approval = world.waiting(tools=[secretive])
    assert "what is approved runs only when" not in shown(approval).text
    pause_run(approval.run_id, user("superuser"), reason="the bank of DE02-secret is closed")
    page = shown(approval)
    above = page.text[: page.text.index("Approve A")]
    assert "Its run is paused: what is approved runs only when somebody resumes it." in above
    assert "resumes it. Paused by superuser: “the bank of *** is closed”" in above
    turn = read(browser("superuser").get(f"/admin/agentruns/approval/turn/{approval.run_id}/"))
    assert "Its run is paused" in turn.text
    assert "Given by the program: “refund the lamp”" in turn.text, "what began it, once for all calls"
    assert "paused" in read(browser("superuser").get("/admin/agentruns/approval/")).text
    Run.objects.update(status="orphaned")
    assert "A call of its run is in doubt: what is approved runs only when" in shown(approval).text


def test_what_a_run_waits_for_stands_right_behind_that_it_waits(world: World) -> None:
    approval = world.waiting()
    text = " ".join(read(browser("superuser").get(url(approval.run))).text.split())
    assert f"It waits for a person to decide: Waits for approval: {approval.title}" in text


def test_who_only_passed_on_a_text_is_not_its_author_and_nobody_is_the_program(world: World) -> None:
    given, own = world.waiting("given", actor=user("superuser")), world.waiting("own")
    assert "Given by superuser: “refund the lamp”" in shown(given).text
    passed = run_agent(given.run.agent, "refund it", "passed", actor=user("superuser"), owner=user("viewer"))
    assert (
        passed.pending[0].run.owner_name,
        "Given by superuser: “refund it”" in shown(passed.pending[0]).text,
    ) == ("viewer", True)
    for page in (
        shown(own),
        read(browser("superuser").get("/admin/agentruns/approval/?tool=refund")),
        read(browser("superuser").get("/admin/agentruns/run/")),
        read(browser("superuser").get(url(own.run))),
    ):
        assert "the program" in page.text
    assert "Given by the program: “refund the lamp”" in shown(own).text
    assert "Requesterthe program" in " ".join(shown(own).text.split())


def test_equal_calls_that_wait_in_other_sessions_are_said_and_lead_to_their_list(world: World) -> None:
    first, *more = [world.waiting(f"same-{number}") for number in range(3)]
    other, done = world.waiting("other", 6000), world.waiting("done")
    deny(done.pk, None, "no")
    page = shown(first)
    assert "2 equal requests wait" in page.text[: page.text.index("Approve A")]
    assert "equal request" not in shown(other).text
    assert "equal request" not in shown(done).text
    [link] = [link for link in page.links if "?same=" in link]
    listed = read(browser("superuser").get(link))
    waiting = {url(one) for one in (first, *more)}
    assert {link.partition("?")[0] for link in listed.links} & {*map(url, Approval.objects.all())} == waiting
    assert listed.text.count("2 more like it wait") == 3
    assert read(browser("superuser").get("/admin/agentruns/approval/")).text.count("more like it wait") == 3
    turn = read(browser("superuser").get(f"/admin/agentruns/approval/turn/{first.run_id}/"))
    assert "2 equal requests wait" in turn.text
    for odd in ("x", "%00", "0" * 64):
        assert browser("superuser").get(f"/admin/agentruns/approval/?same={odd}").status_code == 200
    deny(more[0].pk, None, "no")
    assert "1 equal request waits" in shown(first).text


def test_what_the_customer_wrote_since_stands_on_the_card(world: World) -> None:
    approval = world.waiting(tools=[secretive])
    for number in range(5):
        text = f"<b>message</b> {number} about DE02-secret, {'please ' * 60}"
        send_message(
            user("superuser"), approval.run.session, text, approval.run.agent, idempotency_key=str(number)
        )
    page = shown(approval)
    above = page.text[: page.text.index("Approve A")]
    assert "Messages since it was asked: 5" in above
    said = [number for number in range(5) if f"<b>message</b> {number} about ***" in above]
    assert said == [2, 3, 4], "the last of them"
    assert "2 more before" in above
    assert "secret" not in page.text
    before, written = browser("superuser").get(url(approval)).content.decode().split('class="ar-written', 1)
    assert before.count("<details") == before.count("</details>"), "they stand open"
    assert written[: written.index("</div>")].count("<summary>") == 3, "only the rest of a long one is folded"


def test_a_link_of_a_preview_is_in_words_and_so_are_amounts(world: World) -> None:
    made = preview(
        {"links": ["/admin/shop/order/27/change/", "https://bank.example/a?b=1", ["Order 27", "/x"]]}
    )
    assert made is not None
    texts = [text for text, _url in made.links]
    assert texts == ["Open the page about it", "Open bank.example", "Order 27"]
    assert named("total_cents", 123456) == ("total", "1,234.56")
    assert named("cents", -5) == ("amount", "-0.05")
    for odd in (True, "12", None, 1.5):
        assert named("total_cents", odd)[0] == "total cents"
    found = [{"title": "Returns", "paid_cents": 2490, "open": True, "tracking": None}, {"title": "Repairs"}]
    assert spoken(found) == "title Returns, paid 24.90, open yes, tracking -;\ntitle Repairs"
    quotes = brief("Refund 1234.56 EUR for order 7", {"order": 7, "amount_cents": 123456, "other_cents": 5})
    assert [(one.label, one.short) for one in quotes] == [("other", "0.05")]


@pytest.mark.parametrize("filters", ["foo%3Dbar", "run__x%3D1", "id%3Dx", "status%3Dall%26p%3D99"])
def test_filters_that_came_from_no_list_of_ours_break_nothing(world: World, filters: str) -> None:
    approval, client = world.waiting(), browser("superuser")
    kept = f"?_changelist_filters={filters}"
    assert client.get(url(approval) + kept).status_code == 200
    assert client.post(url(approval, "approve") + kept, {"digest": approval.digest}).status_code == 302
