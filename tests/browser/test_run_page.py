"""The page of a run: its limits, its definition, the buttons that ask and record, and looking back."""

from __future__ import annotations

from datetime import timedelta

from django.db import connection

from agentruns import approve, start_run
from agentruns.models import Message, Run, triggers
from agentruns.services.sweep import sweep
from tests.admin.people import user
from tests.browser.desk import REFUND, Desk
from tests.browser.sound import assert_sound
from tests.browser.visitor import Visitor
from tests.effects import Effects
from tests.shop.agents import call, shop_agent

TURN = {"tools": [call("lookup", number="A1")], "usage": {"input_tokens": 900, "output_tokens": 20}}
LONG = "Search the knowledge base before you answer. " * 20


def served(version: str = "1", **options: object) -> Run:
    """A run that has not been driven yet, of an agent with limits."""
    limits = {"token_budget": 1000, "deadline": timedelta(hours=2), "max_steps": 3}
    return start_run(shop_agent("front-desk", TURN, TURN, **{**limits, **options}), "look A1 up", "s1")


def test_another_definition_is_read_adopted_paused_resumed_and_verified(desk: Desk, visitor: Visitor) -> None:
    run = served(model_params={"style": LONG + "Be brief."})
    shop_agent("front-desk", TURN, token_budget=5000, model_params={"style": LONG + "Take your time."})
    assert sweep().blocked == 1
    page = visitor.open(run)
    standing = page.locator("#ar-now").inner_text()
    assert standing == "queued It is queued, but cannot go on here as it is."
    assert "the next free worker takes it" not in visitor.text
    visitor.wait_for("It was started with another definition of agent 'front-desk' version 1:")
    replies = page.get_by_role("meter", name="Model replies")
    assert replies.get_attribute("aria-valuetext") == "0 of 3"
    assert [row.inner_text() for row in page.locator(".ar-drift tbody th").all()] == [
        "deadline", "max_steps", "model_params", "token_budget",
    ]  # fmt: skip
    visitor.unfold()
    assert_sound(page)
    visitor.open(run)
    visitor.choose("Adopt")
    visitor.wait_for("Adopted. The run now follows the definition of version 1.")
    visitor.choose("Pause", **{"Reason, shown while it is paused (optional)": "the shop is closed"})
    visitor.wait_for("Paused: the shop is closed")
    visitor.choose("Resume")
    visitor.wait_for("Resumed. A worker picks it up.")
    assert sweep().completed == 1
    visitor.open(run)
    visitor.choose("Verify chain")
    visitor.wait_for("The journal of this session is intact: all")
    assert_sound(page)


def test_a_used_up_limit_and_a_journal_that_cannot_be_read(desk: Desk, visitor: Visitor) -> None:
    run = served(token_budget=500)
    assert sweep().completed == 0
    page = visitor.open(run)
    visitor.wait_for("It was stopped by this limit: Tokens.")
    assert_sound(page)
    row = Message.objects.filter(run=run, kind="assistant").get()
    with triggers.lifted(connection), connection.cursor() as cursor:
        cursor.execute("UPDATE agentruns_message SET content = '{' WHERE id = %s", [row.pk])
    visitor.open(run)
    visitor.wait_for("Its journal cannot be read.")
    visitor.click(visitor.link(f"Look at row {row.seq}"))
    visitor.wait_for("cannot be read, so it is not shown.")
    page.go_back()
    assert_sound(page)


def test_she_says_she_was_charged_twice(desk: Desk, visitor: Visitor, effects: Effects) -> None:
    approval = desk.one(REFUND, session="ticket-4", actor=user("operator"))
    approve(approval.pk, user("decider"), digest=approval.digest)
    sweep()
    page = visitor.open("/admin/agentruns/run/?q=ticket-4")
    visitor.click(page.locator("#result_list tbody th a").first)
    visitor.wait_for("No effect of this session ran twice with equal arguments.")
    assert "decider: Approved" in page.locator(".ar-line").inner_text()
    visitor.click(page.locator("summary", has_text="Steps"))
    decided = page.locator("li.ar-step", has_text="Approved").first
    assert "decider" in decided.inner_text()
    assert_sound(page)

    visitor.click(page.locator("summary", has_text="More…"))
    visitor.click(visitor.link("Look back, or fork from a row"))
    reply = Message.objects.filter(run=approval.run, kind="assistant").order_by("seq").last()
    assert reply is not None
    slider = page.get_by_label("Row", exact=True)
    slider.evaluate(
        "(range, to) => { range.value = to; range.dispatchEvent(new Event('input')); "
        "range.dispatchEvent(new Event('change')); }",
        str(reply.seq),
    )
    visitor.wait_for("What the model was sent for this reply")
    assert page.url.endswith(f"seq={reply.seq}")
    visitor.wait_for("its fingerprint is the one in this row")
    visitor.click(visitor.link("Previous row"))
    visitor.wait_for("The conversation, as the model would get it next")
    visitor.unfold()
    assert_sound(page)

    visitor.open(approval.run)
    visitor.click(page.locator("summary", has_text="More…"))
    visitor.click(visitor.link("Look back, or fork from a row"))
    visitor.wait_for("Fork from here")
    visitor.choose("Fork", **{"Next message to the agent": "Was it charged twice?"})
    visitor.wait_for("A worker picks it up.")
    fork = Run.objects.get(origin=approval.run)
    assert page.url.endswith(f"/{fork.pk}/change/") or str(fork.pk) in page.url
    assert_sound(page)

    visitor.open(approval.run)
    visitor.click(page.locator("summary", has_text="More…"))
    visitor.click(page.get_by_role("link", name="Replay", exact=True))
    visitor.click(visitor.button("Replay"))
    visitor.wait_for("Every request and every call would be the same.")
    assert_sound(page)
    assert effects.count() == 1
