"""A replay asks nobody, does nothing, and finds the very place where something differs."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from django.db import connection, transaction
from pydantic import BaseModel, Field

from agentruns import (
    ModelReply,
    ModelRequest,
    ToolContext,
    adopt_definition,
    approve,
    fork_run,
    replay_run,
    run_agent,
    tool,
)
from agentruns.exceptions import NotDurableError, RunStateError
from agentruns.models import Message, Run, triggers
from agentruns.providers.base import ProviderError
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.commands.running import run as command
from tests.db.helpers import the_run
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.rows import change
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

TURNS: list[dict[str, Any]] = [
    {"text": "look", "tools": [call("lookup", number="A1"), call("post", text="hello")]},
    {"tools": [call("refund", cents=5000)]},
]


def story(name: str = "replayed", **options: Any) -> Run:
    agent = shop_agent(name, *TURNS, **options)
    first = run_agent(agent, "do it", "s1", idempotency_key="s1")
    approve(first.pending[0].pk, None)
    assert sweep().completed == 1
    return the_run(first)


def seqs(run: Run, kind: str) -> list[int]:
    return list(Message.objects.filter(run=run, kind=kind).order_by("seq").values_list("seq", flat=True))


def journal() -> list[Any]:
    return list(Message.objects.order_by("pk").values())


def test_nothing_differs_and_nothing_happens(effects: Effects) -> None:
    run = story()
    before, did = journal(), effects.count()
    report = replay_run(run.pk)
    assert (report.is_equal, report.difference, report.notes) == (True, None, [])
    assert [step.seq for step in report.steps] == seqs(run, "assistant")
    assert [step.step for step in report.steps] == [0, 1, 2]
    assert (journal(), effects.count()) == (before, did)
    outcome = command("replay_run", str(run.pk))
    assert (outcome.code, "Nothing differs" in outcome.out) == (0, True)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_mutated_observation_diverges_at_exactly_its_row(position: int) -> None:
    run = story()
    seq = seqs(run, "tool_result")[position]
    report = replay_run(run.pk, observations={seq: "something else"})
    message, block = [(2, 0), (2, 1), (4, 0)][position]
    assert report.seq == seq
    assert report.difference is not None
    assert report.difference == (
        f"$.messages[{message}].content[{block}].content",
        ["lookup done", "post done", "refund done"][position],
        "something else",
    )
    assert len(report.steps) == (2 if position < 2 else 3)
    same = Message.objects.get(run=run, seq=seq).payload["content"]
    assert replay_run(run.pk, observations={seq: same}).is_equal
    first = {seqs(run, "tool_result")[0]: "lookup done"} if position else {}
    assert replay_run(run.pk, observations={**first, seq: "something else"}).seq == seq
    with pytest.raises(RunStateError, match=r"no result of a call at row 2"):
        replay_run(run.pk, observations={2: "something else"})


def test_a_row_altered_in_the_database_shows() -> None:
    run = story()
    seq = seqs(run, "tool_result")[1]
    row = Message.objects.get(run=run, seq=seq)
    with triggers.lifted(connection):
        change(row, content="forged")
    report = replay_run(run.pk)
    assert report.notes == [f"Session s1: seq {seq} (tool_result) was altered."]
    assert report.seq == seqs(run, "assistant")[1], "what was sent for this reply is not what is there now"
    assert report.difference is not None
    assert report.difference.path == "$.messages"


@tool(name="lookup", safe_to_retry=True)
def lookup_anew(ctx: ToolContext, number: str) -> str:
    """Look an order up, in another way."""
    return "never"


@tool(name="refund")
def refund_in_dollars(ctx: ToolContext, cents: float) -> str:
    """Refund the customer."""
    return "never"


@tool(name="refund", requires_approval=lambda args, ctx: args["cents"] > 1000, risk="high")
def refund_small(ctx: ToolContext, cents: int) -> str:
    """Refund the customer."""
    raise AssertionError("a replay executes nothing")


def replaced(other: Any) -> list[Any]:
    return [other if each.name == other.name else each for each in TOOLS]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"instructions": "Serve nobody."}, "$.system"),
        ({"model_params": {"temperature": 1}}, "$.params.temperature"),
        ({"tools": TOOLS[1:]}, "$.tools.post"),
        ({"tools": replaced(lookup_anew)}, "$.tools.lookup.description"),
        ({"tools": replaced(refund_in_dollars)}, "$.tools.refund.input_schema.properties.cents.type"),
        ({"tools": replaced(refund_small)}, None),
    ],
)
def test_another_definition_shows_where(change: dict[str, Any], path: str | None) -> None:
    run = story()
    shop_agent("replayed", **change)
    report = replay_run(run.pk)
    assert (report.difference.path if report.difference else None) == path
    assert report.seq == (seqs(run, "assistant")[0] if path else None)


def test_an_agent_that_is_gone_or_has_another_version() -> None:
    run = story()
    with isolated_registry():
        report = replay_run(run.pk)
        assert report.is_equal
        assert "is not registered here" in report.notes[0]
        shop_agent("replayed", version="2")
        assert "Version 1 is not registered any more" in replay_run(run.pk).notes[0]


def test_a_run_that_adopted_a_version_is_compared_with_both() -> None:
    shop_agent("replayed", *TURNS)
    first = run_agent("replayed", "do it", "s1", idempotency_key="s1")
    shop_agent("replayed", *TURNS, version="2", instructions="Serve them all.")
    with isolated_registry():
        shop_agent("replayed", *TURNS, version="2", instructions="Serve them all.")
        run = adopt_definition(str(first.run_id))
        approve(first.pending[0].pk, None)
        assert sweep().completed == 1
    run.refresh_from_db()
    assert (run.version, len(seqs(run, "assistant"))) == ("2", 3)
    assert replay_run(run.pk).difference is None
    with isolated_registry():
        shop_agent("replayed", *TURNS, version="2", instructions="Serve them all.")
        report = replay_run(run.pk)
        assert report.notes == ["Version 1 is not registered any more; compared with 2."]
        assert (report.difference and report.difference.path) == "$.system"


class Asked:
    """A model that remembers what it was asked and answers by a function."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.requests = answer, []  # type: ignore[var-annotated]

    def propose(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        reply = self.answer(request)
        return reply if isinstance(reply, ModelReply) else ScriptedModel([reply] * 9).propose(request)


def test_a_model_that_decides_otherwise_shows_where(effects: Effects) -> None:
    run = story()
    did = effects.count()
    script: list[dict[str, Any]] = [*TURNS, {"text": "all done, in other words"}]
    same = Asked(lambda request: script[request.step])
    assert replay_run(run.pk, model=same).is_equal
    assert [request.step for request in same.requests] == [0, 1, 2]
    assert same.requests[1].messages[-1]["content"][1]["content"] == "post done"
    script[1] = {"tools": [call("refund", cents=9999)]}
    report = replay_run(run.pk, model=Asked(lambda request: script[request.step]))
    assert report.seq == seqs(run, "assistant")[1]
    assert report.difference == ("$.calls[0].input.cents", 5000, 9999)
    assert len(report.steps) == 2, "what comes after that is another story"
    assert report.steps[1].now is not None
    assert effects.count() == did


def test_what_it_would_have_done_had_it_seen_something_else() -> None:
    run = story()
    seq = seqs(run, "tool_result")[0]
    asked = Asked(lambda request: TURNS[0] if request.step == 0 else {"text": "there is no such order"})
    report = replay_run(run.pk, model=asked, observations={seq: "no such order"})
    assert asked.requests[1].messages[2]["content"][0]["content"] == "no such order"
    assert report.difference is not None
    assert report.difference.path == "$.calls[0]"
    assert report.difference.now is None


def test_its_own_model_and_one_that_fails() -> None:
    run = story()
    assert replay_run(run.pk, model="own").is_equal
    with pytest.raises(ProviderError, match="overloaded"):
        replay_run(run.pk, model=Asked(lambda request: fail()))
    with transaction.atomic(), pytest.raises(NotDurableError):
        replay_run(run.pk, model="own")
    with transaction.atomic():
        assert replay_run(run.pk).is_equal, "without a model nobody waits"
    outcome = command("replay_run", str(run.pk), "--model", "own", "--json")
    assert (outcome.code, outcome.lines[0]["equal"]) == (0, True)


def fail() -> ModelReply:
    raise ProviderError("overloaded")


def test_the_command_shows_both_sides() -> None:
    run = story()
    shop_agent("replayed", *TURNS, instructions="Serve nobody.\x1b[2J")
    outcome = command("replay_run", str(run.pk))
    assert outcome.code == 1
    for text in ("seq 3", "$.system", "Serve the shop.", "Serve nobody.\\u001b[2J"):
        assert text in outcome.out, outcome.out


def test_a_fork_is_replayed_from_its_cut() -> None:
    run = story()
    fork = fork_run(run.pk, seqs(run, "tool_result")[1])
    sweep()
    report = replay_run(fork.pk)
    assert report.is_equal
    assert [step.step for step in report.steps] == [1]


class Booking(BaseModel):
    number: str
    at: str = Field(default_factory=lambda: next(NAMES))


NAMES = (f"name {number}" for number in itertools.count())


@tool
def book(ctx: ToolContext, booking: Booking, weight: float = 1.0) -> str:
    """Book, under a name made up."""
    return "booked"


def test_a_run_that_nobody_changed_is_equal() -> None:
    asked: list[dict[str, Any]] = [
        call("book", booking={"number": "A1"}, weight=math.inf),
        call("book", booking={"number": "A1"}, weight=math.nan),
        {"name": "book", "input": "no object, token tok_42"},
        {"name": "no such tool!", "input": {"number": math.nan}},
    ]
    options = {"tools": [book, pay], "model_params": {"stop_sequences": ["x"], "logit_bias": {"50256": -1}}}
    agent = shop_agent("odd", {"tools": asked}, {"tools": asked, "text": "\x00\ud800"}, **options)
    run = the_run(run_agent(agent, "do it", "s5", idempotency_key="s5"))
    assert replay_run(run.pk).difference is None
    assert replay_run(run.pk, model="own").difference is None
    other = Asked(lambda request: {"tools": [*asked[:2], {"name": "book", "input": "token tok_43"}]})
    report = replay_run(run.pk, model=other)
    assert (report.difference and report.difference.path) == "$.calls[2].input"
    shown = json.dumps(report.record())
    assert "tok_4" not in shown, shown


@tool(sensitive=["token"])
def pay(ctx: ToolContext, cents: int, token: str) -> str:
    """Pay."""
    return "paid"


def test_what_is_sensitive_is_masked() -> None:
    turns = [{"tools": [call("pay", cents=5, token="tok_42")]}]
    shop_agent("paying", *turns, tools=[pay])
    run = the_run(run_agent("paying", "do it", "s2", idempotency_key="s2"))
    other = Asked(lambda request: {"tools": [call("pay", cents=5, token="tok_43")]})
    shown = json.dumps(replay_run(run.pk, model=other).record())
    assert "token" in shown
    assert "tok_4" not in shown
