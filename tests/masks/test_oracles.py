"""What somebody without `reveal_arguments` asks the mask by texts of their own."""

from __future__ import annotations

from typing import Any

import pytest

from agentruns import Agent, approve, run_agent, tool
from agentruns.journal import masking
from agentruns.models import Approval
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.api.http import Api, make_user
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)

PIN = "7306"


@tool(requires_approval=True, sensitive=["pin"])
def unlock(pin: str, door: str) -> str:
    """Open a door."""
    return "open"


def doors(**arguments: Any) -> Agent:
    turns = [{"tools": [call("unlock", **arguments)]}, {"text": "Done."}, {"text": "Done again."}]
    return Agent("doors", instructions="Open.", tools=[unlock], starters="anyone", model=ScriptedModel(turns))


def masked_card() -> Approval:
    return run_agent(doors(pin=PIN, door="front"), "open it", "s1").pending[0]


def test_a_text_of_ones_own_tells_which_of_all_pins_it_is() -> None:
    card = masked_card()
    api = Api(make_user("decider", "decide_approval", "view_run"))
    every = " ".join(f"{number:04}" for number in range(10_000))
    status, _ = api.post(f"/approvals/{card.pk}/answer", {"digest": card.digest, "text": every})
    assert status == 200
    shown = str(api.get(f"/runs/{card.run_id}/messages")[1])
    missing = [pin for pin in every.split() if pin not in shown]
    assert missing != [PIN], "the mask points at the one PIN of all"


def test_the_owner_asks_the_mask() -> None:
    owner = make_user("owner")
    agent = doors(pin=PIN, door="front")
    (card,) = run_agent(agent, "open it", "s1", actor=owner).pending
    approve(card.pk, None)
    sweep()
    api = Api(owner)
    every = " ".join(f"{number:04}" for number in range(10_000))
    status, run = api.post("/runs", {"agent": "doors", "input": every, "session": "s1"})
    assert status == 201, run
    missing = [pin for pin in every.split() if pin not in run["input"]]
    assert missing != [PIN], "one POST of one's own text tells the PIN"


def test_what_differs_only_in_its_digits_is_masked_in_a_text_by_a_person() -> None:
    mask = masking.Mask([{"tools": {"unlock": unlock.policy()}}])
    mask.know("unlock", {"pin": "12-34", "door": "front"})
    assert mask.said("of 12-12-34 or 99-99, not 123-45; 12") == "of *** or ***, not 123-45; 12"
    assert mask.said({"n": [1234, "50-60 %"]}) == {"n": [1234, "*** %"]}
    assert mask.value("12-34, 99-99") == "***, 99-99"  # the model's words and a card's values stay readable
    mask.know("unlock", {"pin": 880077003311, "door": "front"})
    assert mask.said("1880077003311 and 5") == "*** and 5"  # at any place of a longer number
    assert mask.said([990011223344, 12]) == ["***", 12]
