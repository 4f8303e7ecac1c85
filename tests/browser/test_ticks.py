"""The page of several calls: its words follow what is ticked."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns.models import Approval
from tests.browser.desk import REFUND, TICKET, Desk
from tests.browser.visitor import Visitor, Visitors, turn_path
from tests.shop.agents import call


def refunds(desk: Desk, *cents: int) -> list[Approval]:
    return desk.ask(*(call("refund_order", order="1004", cents=one, reason="Broke.") for one in cents))


def said(visitor: Visitor) -> str:
    return visitor.page.get_by_role("status").inner_text()


def test_number_and_sum_follow_the_ticks(desk: Desk, visit: Visitors) -> None:
    visitor = visit()
    page = visitor.open(turn_path(refunds(desk, 123456, 5, 99900)[0].run))
    assert said(visitor) == "3 of 3 calls ticked, amount 2,233.61 EUR in total"
    boxes = page.locator(".ar-lines input[type=checkbox]")
    boxes.nth(2).uncheck()
    assert said(visitor) == "2 of 3 calls ticked, amount 1,234.61 EUR in total"
    boxes.nth(0).uncheck()
    assert said(visitor) == "1 of 3 calls ticked, amount 0.05 EUR in total"
    boxes.nth(1).uncheck()
    assert said(visitor) == "0 of 3 calls ticked, amount 0.00 EUR in total"
    boxes.nth(0).check()
    page.get_by_role("button", name="Approve all ticked").click()
    visitor.wait_for("Approved.")
    visitor.wait_for("2 of 2 calls ticked, amount 999.05 EUR in total")


def test_only_the_number_where_there_is_no_sum(desk: Desk, visit: Visitors) -> None:
    visitor = visit()
    page = visitor.open(turn_path(desk.ask(REFUND, TICKET)[0].run))
    assert said(visitor) == "2 of 2 calls ticked"
    page.locator(".ar-lines input[type=checkbox]").first.uncheck()
    assert said(visitor) == "1 of 2 calls ticked"


@pytest.mark.parametrize(
    ("language", "words"), [("de", "amount 1.234,51 in total"), ("en", "amount 1,234.51 EUR in total")]
)
def test_a_sum_is_written_as_the_page_writes_numbers(
    desk: Desk, visit: Visitors, settings: Any, language: str, words: str
) -> None:
    settings.LANGUAGE_CODE = language
    visitor = visit()
    visitor.open(turn_path(refunds(desk, 123450, 1)[0].run))
    assert said(visitor).endswith(words)


def test_without_a_script_the_words_are_true(desk: Desk, visit: Visitors) -> None:
    visitor = visit(javascript=False)
    visitor.open(turn_path(refunds(desk, 100, 200)[0].run))
    assert said(visitor) == "2 calls can be ticked, amount 3.00 EUR in total"
