"""An ordinary refusal never costs a card; an exception that nobody named, after an effect, always does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, strategies as st

from agentruns import (
    Agent,
    NotOccurred,
    Occurred,
    ToolContext,
    ToolRefused,
    approve,
    deny,
    http_refusal,
    start_run,
    tool,
)
from agentruns.journal import events
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message
from agentruns.testing import ScriptedModel
from tests.effects import Effects
from tests.properties.faults import DEATHS, NUMBER, clear, tried_on
from tests.registry import isolated_registry
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)


class Declined(Exception):
    """Named by the tools."""


class Conflict(Exception):
    """An HTTP client's error whose status is no refusal."""

    status = 409


REFUSALS = {
    "tells": ToolRefused("no such card"),
    "declined": Declined("declined"),
    "not found": type("NotFound", (Exception,), {"status": 404})("no"),
}
ERRORS = {"lost": ConnectionError("lost"), "bug": KeyError("bug"), "conflict": Conflict("no")}
FATES = [*REFUSALS, *ERRORS, "done"]


def act(ctx: ToolContext, fate: str) -> str:
    """Refuse before the effect, or let it happen, and then raise what does not say so."""
    ledger, by = Effects.from_environment(), list(ctx.approved_by)
    ledger.record(f"enter {ctx.idempotency_key}", tool=f"enter {ctx.tool_name}", fate=fate, by=by)
    if fate in REFUSALS:
        raise REFUSALS[fate]
    ledger.record(ctx.idempotency_key, tool=ctx.tool_name, fate=fate)
    if fate in ERRORS:
        raise ERRORS[fate]
    return "done"


@tool(refuses=(Declined, http_refusal))
def pay(ctx: ToolContext, fate: str) -> str:
    """Pay; declares nothing."""
    return act(ctx, fate)


def happened(ctx: ToolContext, args: dict[str, Any]) -> Occurred | NotOccurred:
    """Ask the ledger."""
    found = Effects.from_environment().count(ctx.idempotency_key)
    return Occurred("done, says the bank") if found else NotOccurred()


@tool(reconcile=happened, refuses=(Declined, http_refusal))
def book(ctx: ToolContext, fate: str) -> str:
    """Book; the bank can be asked."""
    return act(ctx, fate)


TOOLS = st.sampled_from(["pay", "pay", "book"])
CALLS = st.builds(lambda name, fate: call(name, fate=fate), TOOLS, st.sampled_from(FATES))
TURNS = st.lists(st.lists(CALLS, min_size=1, max_size=3).map(lambda calls: {"tools": calls}), max_size=4)
CLICKS = st.lists(st.sampled_from(["approve", "approve", "deny"]), min_size=1, max_size=6)


@tried_on(60, brief=20, long=1000)
@given(tasks=st.lists(TURNS, min_size=1, max_size=2), clicks=CLICKS, dying=st.just([]) | DEATHS)
def test_only_what_may_have_happened_costs_a_card(
    tasks: list[Any], clicks: list[str], dying: list[Any], effects: Effects, deaths: list[Any]
) -> None:
    key = f"refusals-{next(NUMBER)}"
    effects.path.unlink(missing_ok=True)
    endless = itertools.cycle(clicks)

    def decide(card: Approval) -> None:
        if next(endless) == "approve":
            approve(card.pk, None)
        else:
            deny(card.pk, None, "no")

    with isolated_registry():
        deaths[:] = dying
        for number, turns in enumerate(tasks):
            model = ScriptedModel([*turns, {"text": "all done"}])
            agent = Agent(f"payer-{number}", instructions="Pay.", tools=[pay, book], model=model)
            clear(start_run(agent, "do it", key, idempotency_key=f"{key}-{number}"), decide=decide)
        deaths.clear()
    rows = list(Message.objects.filter(session__key=key).order_by("seq"))
    assert problems(rows[0].session_id) == []
    ledger = effects.lines()
    every_card_has_its_reason(rows, died=bool(dying))
    nothing_is_entered_after_a_doubt_without_a_person(ledger)
    keys = [line["key"] for line in ledger if line["tool"] in ("pay", "book")]
    assert len(keys) == len(set(keys)), "an effect is doubled"
    told_as_it_was(rows, ledger)


def every_card_has_its_reason(rows: list[Message], *, died: bool) -> None:
    """The gate asks about `pay` where a doubt stands, and nowhere else."""
    doubts: set[str] = set()
    for row in rows:
        payload = row.payload
        if row.kind == events.TOOL_RESULT and row.tool_name == "pay" and events.leaves_doubt(payload):
            doubts.add(row.call_id)
        elif row.kind == events.APPROVAL_DECIDED:
            doubts -= set(payload.get("settles", ()))
        elif row.kind == events.ASSISTANT:
            for asked in payload["calls"]:
                verdict = "ask" if doubts and asked["tool"] == "pay" else "run"
                assert asked["verdict"] in (verdict, "refuse"), f"{asked['tool']} with {doubts} in doubt"
                # Refused: what a person denied just before.
                assert asked["verdict"] != "refuse" or asked["tool"] == "pay"
        elif row.kind == events.APPROVAL_REQUESTED:
            assert set(payload.get("settles", ())) <= doubts
            assert died or payload["settles"], "an ordinary refusal costs no card"


def nothing_is_entered_after_a_doubt_without_a_person(ledger: list[dict[str, Any]]) -> None:
    entries = [line for line in ledger if line["tool"] == "enter pay"]
    for before, after in itertools.pairwise(entries):
        assert before["fate"] not in ERRORS or after["by"], "nobody was asked after what may have paid"


def told_as_it_was(rows: list[Message], ledger: list[dict[str, Any]]) -> None:
    """A result says "in doubt" of every failed payment, and that nothing happened only where that is true."""
    acted = {line["key"]: line["fate"] for line in ledger}
    keys = {row.call_id: row.payload["key"] for row in rows if row.kind == events.TOOL_STARTED}
    for row in rows:
        if row.kind != events.TOOL_RESULT or row.call_id not in keys or row.payload["outcome"] == "unknown":
            continue
        fate = acted.get(keys[row.call_id])
        assert row.payload.get("in_doubt", False) == (fate in ERRORS and row.tool_name == "pay")
        if row.payload["outcome"] == "ok":
            assert fate is not None
        if "Nothing happened." in str(row.payload["content"]):
            assert fate is None
