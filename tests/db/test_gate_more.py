"""What a review found at the gate: marks of outsiders' text, rules, caps and masks in rare cases."""

from __future__ import annotations

import pytest

from agentruns import (
    start_run,
)
from agentruns.models import Approval
from agentruns.utils import failpoints
from tests.db.helpers import payloads
from tests.db.outsiders import SEND, acted, drive, reader
from tests.effects import Effects
from tests.shop.agents import call
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

PAY = {"tools": [call("pay", customer="C1", cents=500)]}


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", None)


@pytest.fixture
def order() -> Order:
    return Order.objects.create(number="A1", customer="Ada", total_cents=2000, note="paid")


def asks(effects: Effects, names: list[str]) -> None:
    """Check that a mail waits for a person who is told what was read."""
    (waiting,) = Approval.objects.pending()
    assert payloads(waiting.run, "approval_requested")[-1]["untrusted"] == names
    assert acted(effects) == []


def test_a_model_that_searches_on_its_own_has_read_text_of_outsiders(effects: Effects) -> None:
    """Its name and its parameters do not tell, so the agent does."""
    drive(start_run(reader(SEND, unjournaled_tools=True), "do it", "s1"))
    asks(effects, ["tools of the provider"])
