"""docs/chat: a customer's chat with a session token, under the strictest policy."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from django.db import connections
from playwright.sync_api import Route, expect

from agentruns import Agent, approve, question_to, tool
from agentruns.models import ApiToken, Approval, Message, Run
from agentruns.services.api_tokens import revoke
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, run_until_blocked
from tests.browser.desk import Writer
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitor, Visitors
from tests.pictures import PNG
from tests.shop.agents import call

HOSTILE = "Gone <img src=x onerror=alert(1)> \u202etoday"
QUESTION = "Which order is it?"
ASKS = call("ask_customer", question=QUESTION, choices=["1004", "1007"])


@tool(requires_approval=True, approvers="requester", describe=lambda args: f"Cancel order {args['number']}")
def cancel_order(number: str, reason: str) -> str:
    """Cancel an order."""
    return "cancelled"


@tool(requires_approval=True)
def refund(cents: int) -> str:
    """Pay money back."""
    return "refunded"


# What is in the last message -> the answer to it.
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("broken", {"text": "I am sorry to hear that.", "tools": [ASKS]}),
    ("1007", {"tools": [call("cancel_order", number="1007", reason="The customer asks.")]}),
    ("money", {"text": "I ask for it.", "tools": [call("refund", cents=2490)]}),
    ("cancelled", {"text": HOSTILE}),
    ("refunded", {"text": "Your money is on its way."}),
    ("", {"text": "Hello."}),
]


def turn(request: Any) -> dict[str, Any]:
    last = str(request.messages[-1]["content"])
    return next(answer for words, answer in ANSWERS if words in last)


@pytest.fixture
def chat(visit: Visitors) -> Visitor:
    """A customer in front of the chat, who has said nothing yet."""
    ask = question_to("requester", name="ask_customer")
    model = ScriptedModel([turn] * 9)
    Agent("chat", instructions="Serve.", tools=[ask, cancel_order, refund], model=model)
    visitor = visit("anonymous")
    visitor.open("/chat/index.html")
    return visitor


def say(chat: Visitor, text: str) -> None:
    chat.page.get_by_label("Message").fill(text)
    chat.page.keyboard.press("Enter")
    expect(chat.page.get_by_label("Message")).to_have_value("")


def shown(chat: Visitor) -> list[str]:
    return chat.page.locator("#log p").all_inner_texts()


def test_a_chat_from_the_first_word_to_the_last(chat: Visitor) -> None:
    page = chat.page
    say(chat, "My mug is broken.")
    chat.wait_for("My mug is broken.")
    run_until_blocked()
    card = page.locator("article")
    expect(card.get_by_role("heading", name=QUESTION)).to_be_visible()
    assert_sound(page)
    card.get_by_role("button", name="1007").click()
    expect(card).to_have_count(0)
    run_until_blocked()
    expect(card.get_by_role("heading", name="Cancel order 1007")).to_be_visible()
    assert "The customer asks." in card.inner_text()
    assert_sound(page)
    card.get_by_role("button", name="Yes, go ahead").click()
    expect(card).to_have_count(0)
    run_until_blocked()
    # What a model wrote is a text, and shows what it hides.
    chat.wait_for("Gone <img src=x onerror=alert(1)> \\u{202e}today")
    assert_sound(page)
    before = shown(chat)
    assert before[:2] == ["My mug is broken.", "I am sorry to hear that."]
    assert len(before) == 3

    say(chat, "Thank you")  # the session's next run
    chat.wait_for("Thank you")
    page.reload()  # before it is answered
    chat.wait_for("Thank you")
    assert shown(chat) == [*before, "Thank you"]
    run_until_blocked()
    chat.wait_for("Hello.")
    assert shown(chat) == [*before, "Thank you", "Hello."]
    assert page.evaluate("Object.keys(localStorage).length") == 0

    say(chat, "I want my money back.")  # while a colleague decides, messages are taken
    run_until_blocked()
    chat.wait_for("A colleague looks at this first.")
    expect(page.locator("article")).to_have_count(0)
    say(chat, "It is for order 1004.")
    chat.wait_for("It is for order 1004.")
    page.reload()
    chat.wait_for("A colleague looks at this first.")
    approve(Approval.objects.get(status="pending").pk, None)
    run_until_blocked()
    chat.wait_for("Your money is on its way.")
    assert len(shown(chat)) == len(before) + 6
    expect(page.get_by_role("status").first).to_have_text("")


def test_a_broken_connection_and_a_reply_on_its_way(chat: Visitor) -> None:
    """The stream breaks off after a draft; the page asks for what came since, and for nothing twice."""
    page, held = chat.page, list[Route]()
    with page.expect_request(re.compile("/events$")):
        say(chat, "Hi")
    run = Run.objects.get()
    words = "Hel</p><b>lo"
    draft = f'event: draft\ndata: {{"run": "{run.pk}", "step": 1, "text": "{words}"}}\n\n'

    def breaks_off(route: Route) -> None:
        held.append(route)
        if len(held) == 1:
            route.fulfill(content_type="text/event-stream", body=f"retry: 2000\n\n{draft}id: 9")
        else:
            route.continue_()

    page.route(re.compile("/events$"), breaks_off)
    page.reload()
    expect(page.locator("#draft")).to_have_text(words)
    run_until_blocked()
    chat.wait_for("Hello.")
    expect(page.locator("#draft")).to_be_hidden()
    assert shown(chat) == ["Hi", "Hello."]
    assert held[1].request.headers["last-event-id"] == "2"


def test_words_as_they_are_written_survive_a_reload(chat: Visitor) -> None:
    page, words = chat.page, " ".join(f"word{number}" for number in range(10, 30))
    writer = Writer(words, stops=[4, 13])
    Agent("chat", instructions="Serve.", version="2", model=writer)
    say(chat, "Hi")
    chat.wait_for("Hi")
    worker = threading.Thread(target=lambda: (sweep(), connections.close_all()))
    worker.start()
    draft = page.locator("#draft")
    expect(draft).to_have_text(words[: words.index("word14")].strip())
    page.reload()
    expect(draft).to_have_text(words[: words.index("word14")].strip())
    writer.go_on()
    expect(draft).to_have_text(words[: words.index("word23")].strip())
    writer.go_on()
    chat.wait_for("word29")
    worker.join()
    expect(draft).to_be_hidden()
    assert shown(chat) == ["Hi", words]


def test_a_picture_is_sent_beside_a_text_and_alone(chat: Visitor) -> None:
    page = chat.page
    picture = {"name": "mug.png", "mimeType": "image/png", "buffer": PNG}
    page.get_by_label("Attach a picture").set_input_files(picture)
    chat.wait_for("mug.png")
    say(chat, "Look at my mug.")  # opens the chat, and then sends the picture
    chat.wait_for("Look at my mug.")
    run_until_blocked()
    chat.wait_for("Hello.")
    page.get_by_label("Attach a picture").set_input_files(picture)
    say(chat, "And the other side:")
    run_until_blocked()
    expect(page.locator("#log .assistant")).to_have_count(2)
    said = [row.payload["content"] for row in Message.objects.filter(kind="user").order_by("seq")]
    assert [[block["type"] for block in blocks] for blocks in said] == [
        ["text"],
        ["image"],
        ["text", "image"],
    ]
    assert shown(chat)[1:4:2] == ["📎 mug.png", "And the other side:\n📎 mug.png"]
    page.get_by_label("Attach a picture").set_input_files({**picture, "buffer": b"no picture"})
    with chat.refused(422):
        page.get_by_role("button", name="Send").click()
    chat.wait_for("Not sent")
    assert_sound(page)


def test_what_is_not_sent_stays_and_a_chat_can_be_over(chat: Visitor) -> None:
    page = chat.page
    say(chat, "Hi")
    run_until_blocked()
    chat.wait_for("Hello.")
    page.route("**/messages", lambda route: route.abort())
    page.get_by_label("Message").fill("Are you there?")
    page.get_by_role("button", name="Send").click()
    chat.wait_for("Not sent")
    assert page.get_by_label("Message").input_value() == "Are you there?"
    page.unroute("**/messages")
    page.get_by_role("button", name="Send").click()
    run_until_blocked()
    chat.wait_for("Are you there?")
    page.get_by_label("Message").fill("And now?")
    chat.complaints.clear()
    chat.expected.add(401)  # of the stream and of the message, whichever is answered first
    revoke(ApiToken.objects.get().pk, None)
    page.evaluate("document.querySelector('#say').requestSubmit()")  # unless the stream has closed it already
    chat.wait_for("This chat has ended.")
    assert page.evaluate("sessionStorage.length") == 0
