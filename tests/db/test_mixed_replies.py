"""A reply whose calls end in every different way, in any order, is answered by one valid message."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now

from agentruns import Agent, RunResult, ToolContext, answer, approve, deny, resume_run, run_agent, tool
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run
from agentruns.services.approvals.decisions import expire_due
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.db.doubts import wire
from tests.db.helpers import Checked, payloads
from tests.effects import Effects
from tests.settings import BRIEF
from tests.shop.agents import act, call, post, search
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


@tool(requires_approval=True)
def ask(ctx: ToolContext, what: str) -> str:
    return act("ask", ctx, what=what)


@tool(requires_approval=True, expires_in=timedelta(milliseconds=1))
def ask_briefly(ctx: ToolContext) -> str:
    return act("ask_briefly", ctx)


CALLS: dict[str, dict[str, Any]] = {
    "ok": call("post", text="hello"), "denied": call("ask", what="denied"),
    "parallel": call("search", query="x"), "answered": call("ask", what="answered"),
    "expired": call("ask_briefly"), "unknown": call("wire", text="x"), "edited": call("ask", what="edited"),
    "invalid": call("post", wrong=1), "asked": call("ask", what="asked"), "missing": call("no_such_tool"),
}  # fmt: skip
GATED = ("denied", "answered", "edited", "expired", "asked")
DECIDE: dict[str, Callable[[Approval], object]] = {
    "denied": lambda card: deny(card.pk, None, "no, thank you", digest=card.digest),
    "answered": lambda card: answer(card.pk, None, "it is 42", digest=card.digest),
    "edited": lambda card: approve(card.pk, None, digest=card.digest, arguments={"what": "by hand"}),
    "asked": lambda card: approve(card.pk, None, digest=card.digest),
}
SAID = {
    "ok": "done",
    "denied": "Reason: no, thank you",
    "answered": "it is 42",
    "edited": 'Executed with the arguments a person set: {"what":"by hand"}\nask done',
    "expired": "nobody answered",
    "unknown": '"tool-durability-error"',
    "invalid": "Not executed: Invalid arguments",
    "missing": "there is no tool 'no_such_tool'",
    "parallel": "search done",
    "asked": "ask done",
    "cancelled": "Not run: an earlier call's outcome is unknown.",
}
FAILED = ("unknown", "invalid", "missing", "cancelled")


def begin(order: tuple[str, ...], on_orphan: Any) -> RunResult:
    """Run an agent whose one reply makes the calls in this order, until it waits or ends."""
    session = f"{on_orphan}: {' '.join(order)}"
    turns: list[Any] = [{"tools": [CALLS[kind] for kind in order]}, {"text": "all done"}]
    agent = Agent(
        session[:100],
        instructions="Serve.",
        tools=[post, search, wire, ask, ask_briefly],
        model=Checked(turns),
        on_orphan=on_orphan,
    )
    return run_agent(agent, "do it", session, idempotency_key=session)


def decide(run_id: str | None) -> None:
    """Decide every card, and let the one that has no time expire."""
    for card in Approval.objects.pending().filter(run_id=run_id or ""):
        if card.tool_name == "ask":
            DECIDE[card.arguments["what"]](card)
    brief = Approval.objects.pending().filter(run_id=run_id or "", tool_name="ask_briefly")
    wait_for(lambda: not brief.filter(expires_at__gt=Now()).exists(), "the time of a card to be over")
    expire_due()  # a sweep would drive first, and tell the model of the doubt
    sweep()


def finish(result: RunResult) -> RunResult:
    """Decide what waits, then surface what is in doubt, until the run ends."""
    for _ in range(4):
        decide(result.run_id)
        result = result_of(Run.objects.get(pk=result.run_id or "").pk)
        if result.status == "completed":
            return result
        if result.status == "orphaned":
            result = resume_run(result.run_id or "")
    raise AssertionError(f"{result.session_key} does not end: {result.status}")


def expected(order: tuple[str, ...], *, decided: bool) -> dict[str, str]:
    """Tell how each call ends; `decided` says that people decided before the doubt was surfaced."""
    doubt = order.index("unknown") if "unknown" in order else len(order)
    ends = {}
    for position, kind in enumerate(order):
        stays = kind in ("denied", "answered", "expired") and decided
        fixed = kind in ("invalid", "missing", "parallel") or stays
        ends[kind] = kind if position <= doubt or fixed else "cancelled"
    return ends


OUTCOMES = {"edited": "ok", "parallel": "ok", "asked": "ok", "invalid": "error", "missing": "error"}
ACTS = {
    "ok": ("post", None), "edited": ("ask", "by hand"), "unknown": ("wire", None),
    "parallel": ("search", None), "asked": ("ask", "asked"),
}  # fmt: skip


def check(result: RunResult, order: tuple[str, ...], ends: dict[str, str], effects: Effects) -> None:
    """Check the one message of results: one for each call, in the order of the calls, each as it must be."""
    where = f"{result.session_key}: {ends}"
    check_messages(result.messages)
    user, said, told, last = result.messages
    assert [one["role"] for one in (user, said, told, last)] == ["user", "assistant"] * 2
    assert [block["type"] for block in told["content"]] == ["tool_result"] * len(order), where
    uses = [block["id"] for block in said["content"]]
    assert [block["tool_use_id"] for block in told["content"]] == uses, where
    for (kind, end), block in zip(ends.items(), told["content"], strict=True):
        assert SAID[end] in block["content"], f"{kind}, {where}"
        assert block.get("is_error", False) is (end in FAILED), f"{kind}, {where}"
        if end == "unknown":
            assert json.loads(block["content"])["toolCallId"] == block["tool_use_id"]
    run = Run.objects.get(pk=result.run_id or "")
    made = payloads(run, "assistant")[0]["calls"]
    rows = {row.call_id: row.payload for row in Message.objects.filter(run=run, kind="tool_result")}
    kept = [rows[one["id"]]["outcome"] for one in made]
    assert kept == [OUTCOMES.get(end, end) for end in ends.values()], where
    acted = [(line.get("tool", "wire"), line.get("what")) for line in effects.lines()]
    assert sorted(map(str, acted)) == sorted(str(ACTS[end]) for end in ends.values() if end in ACTS), where
    assert problems(run.session_id) == [], where
    effects.path.unlink(missing_ok=True)


def orders() -> Iterator[tuple[str, ...]]:
    """Yield each rotation of all kinds, and some orders at random."""
    kinds = tuple(CALLS)
    for start in range(len(kinds)):
        yield kinds[start:] + kinds[:start]
    seed = random.SystemRandom().randrange(2**32)
    print(f"random orders of seed {seed}")
    chance = random.Random(seed)
    for _ in range(2 if BRIEF else 8):
        yield tuple(chance.sample(kinds, len(kinds)))


@pytest.mark.parametrize("on_orphan", ["hold", "surface"])
def test_a_reply_of_every_kind_in_many_orders(on_orphan: str, effects: Effects) -> None:
    for order in orders():
        result = begin(order, on_orphan)
        # An agent that surfaces at once has done so before anybody could decide, unless a card was first.
        doubt = order.index("unknown")
        decided = on_orphan == "hold" or any(kind in GATED for kind in order[:doubt])
        assert (result.status == "completed") is not decided
        check(finish(result), order, expected(order, decided=decided), effects)


@pytest.mark.parametrize("on_orphan", ["hold", "surface"])
def test_a_doubt_surfaced_before_anybody_decides(on_orphan: str, effects: Effects) -> None:
    """In all orders of a doubt, an open card and a read; where the doubt is held, with a plain call too."""
    kinds = ("unknown", "asked", "parallel", "ok")[: 4 if on_orphan == "hold" else 3]
    for order in itertools.permutations(kinds):
        asked_first = order.index("asked") < order.index("unknown")
        result = begin(order, on_orphan)
        if asked_first:
            assert result.status == "awaiting-approval", "the doubtful call waits behind the card"
            result = finish(result)
        elif on_orphan == "hold":
            assert (result.status, len(result.pending)) == ("orphaned", 1)
            result = resume_run(result.run_id or "")
        check(result, order, expected(order, decided=asked_first), effects)
        card = Approval.objects.get(run_id=result.run_id or "")
        assert card.status == ("consumed" if asked_first else "cancelled")
        with pytest.raises(ApprovalStateError, match="approved, done" if asked_first else "cancelled"):
            approve(card.pk, None, digest=card.digest)
