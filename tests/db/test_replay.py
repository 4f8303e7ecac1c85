"""Looking back at a run: its state at any row, a replay, an export to verify; and its task done again."""

from __future__ import annotations

import copy
import itertools
import json
import math
import runpy
from pathlib import Path
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
    cancel_run,
    deny,
    fork_run,
    replay_run,
    run_again,
    run_agent,
    start_run,
    state_at,
    tool,
)
from agentruns.exceptions import DurableRunNotFoundError, NotDurableError, RunStateError, SessionBusyError
from agentruns.journal.masking import Mask
from agentruns.journal.store import load
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run, triggers
from agentruns.providers.base import ProviderError
from agentruns.services.history import record, session_at
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.commands.running import run as command
from tests.db.exports import VERIFY, exported, verified
from tests.db.helpers import payloads, run_turns, sound, the_run
from tests.db.stories import TURNS, story
from tests.effects import Effects
from tests.registry import isolated_registry
from tests.rows import change as change_row
from tests.shop.agents import TOOLS, call, lookup, refund, shop_agent
from tests.statements import broken_commit

pytestmark = pytest.mark.django_db(transaction=True)

ODD = "nul \x00, dle \x10, surrogate \ud800, \u202e, <b>"


def seqs(run: Run, kind: str) -> list[int]:
    return list(Message.objects.filter(run=run, kind=kind).order_by("seq").values_list("seq", flat=True))


def test_nothing_differs_and_nothing_happens(effects: Effects) -> None:
    run = story()
    before, did = list(Message.objects.order_by("pk").values()), effects.count()
    report = replay_run(run.pk)
    assert (report.is_equal, report.difference, report.notes) == (True, None, [])
    assert [step.seq for step in report.steps] == seqs(run, "assistant")
    assert [step.step for step in report.steps] == [0, 1, 2]
    assert (list(Message.objects.order_by("pk").values()), effects.count()) == (before, did)
    outcome = command("replay_run", str(run.pk))
    assert (outcome.code, "Nothing differs" in outcome.out) == (0, True)
    with isolated_registry():
        report = replay_run(run.pk)
        assert (report.is_equal, "is not registered here" in report.notes[0]) == (True, True)
        shop_agent("agent-s1", version="2")
        assert "Version 1 is not registered any more" in replay_run(run.pk).notes[0]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_mutated_observation_diverges_at_exactly_its_row(position: int) -> None:
    run = story()
    seq = seqs(run, "tool_result")[position]
    report = replay_run(run.pk, observations={seq: "something else"})
    message, block = [(2, 0), (2, 1), (4, 0)][position]
    assert report.seq == seq
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
    with triggers.lifted(connection):
        change_row(Message.objects.get(run=run, seq=seq), content="forged")
    report = replay_run(run.pk)
    assert report.notes == [f"Session s1: seq {seq} (tool_result) was altered."]
    assert report.seq == seqs(run, "assistant")[1], "what was sent for this reply is not what is there now"
    assert report.difference is not None
    assert report.difference.path == "$.messages"


@tool(name="refund")
def refund_in_dollars(ctx: ToolContext, cents: float) -> str:
    """Refund the customer."""
    return "never"


def replaced(other: Any) -> list[Any]:
    return [other if each.name == other.name else each for each in TOOLS]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"instructions": "Serve nobody."}, "$.system"),
        ({"model_params": {"temperature": 1}}, "$.params.temperature"),
        ({"tools": TOOLS[1:]}, "$.tools.post"),
        ({"tools": replaced(tool(lookup.fn, description="In another way."))}, "$.tools.lookup.description"),
        ({"tools": replaced(refund_in_dollars)}, "$.tools.refund.input_schema.properties.cents.type"),
        ({"tools": replaced(tool(refund.fn, requires_approval=True))}, None),
    ],
)
def test_another_definition_shows_where(change: dict[str, Any], path: str | None) -> None:
    run = story()
    shop_agent("agent-s1", **change)
    report = replay_run(run.pk)
    assert (report.difference.path if report.difference else None) == path
    assert report.seq == (seqs(run, "assistant")[0] if path else None)


def test_a_run_that_adopted_a_version_is_compared_with_both() -> None:
    shop_agent("agent-s1", *TURNS)
    first = run_agent("agent-s1", "do it", "s1", idempotency_key="s1")
    shop_agent("agent-s1", *TURNS, version="2", instructions="Serve them all.")
    with isolated_registry():
        shop_agent("agent-s1", *TURNS, version="2", instructions="Serve them all.")
        run = adopt_definition(str(first.run_id))
        approve(first.pending[0].pk, None)
        assert sweep().completed == 1
    run.refresh_from_db()
    assert (run.version, len(seqs(run, "assistant"))) == ("2", 3)
    assert replay_run(run.pk).difference is None
    with isolated_registry():
        shop_agent("agent-s1", *TURNS, version="2", instructions="Serve them all.")
        report = replay_run(run.pk)
        assert report.notes == ["Version 1 is not registered any more; compared with 2."]
        assert (report.difference and report.difference.path) == "$.system"


class Asked:
    """A model that remembers what it was asked and answers by a function."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.requests = answer, []  # type: ignore[var-annotated]

    def propose(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        return ScriptedModel([self.answer(request)] * 9).propose(request)


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
    # What it would have done had it seen something else.
    asked = Asked(lambda request: TURNS[0] if request.step == 0 else {"text": "there is no such order"})
    report = replay_run(run.pk, model=asked, observations={seqs(run, "tool_result")[0]: "no such order"})
    assert asked.requests[1].messages[2]["content"][0]["content"] == "no such order"
    assert report.difference is not None
    assert (report.difference.path, report.difference.now) == ("$.calls[0]", None)
    assert effects.count() == did


def test_its_own_model_and_one_that_fails() -> None:
    run = story()
    assert replay_run(run.pk, model="own").is_equal

    def overloaded(request: ModelRequest) -> ModelReply:
        raise ProviderError("overloaded")

    with pytest.raises(ProviderError, match="overloaded"):
        replay_run(run.pk, model=Asked(overloaded))
    with transaction.atomic(), pytest.raises(NotDurableError):
        replay_run(run.pk, model="own")
    with transaction.atomic():
        assert replay_run(run.pk).is_equal, "without a model nobody waits"
    outcome = command("replay_run", str(run.pk), "--model", "own", "--json")
    assert (outcome.code, outcome.lines[0]["equal"]) == (0, True)
    shop_agent("agent-s1", *TURNS, instructions="Serve nobody.\x1b[2J")
    outcome = command("replay_run", str(run.pk))
    assert outcome.code == 1
    for text in ("seq 3", "$.system", "Serve the shop.", "Serve nobody.\\u001b[2J"):
        assert text in outcome.out, outcome.out


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
        call("pay", cents=5, token="tok_42"),
    ]
    options = {"tools": [book, pay], "model_params": {"stop_sequences": ["x"], "logit_bias": {"50256": -1}}}
    agent = shop_agent("odd", {"tools": asked}, {"tools": asked, "text": "\x00\ud800"}, **options)
    run = the_run(run_agent(agent, "do it", "s5", idempotency_key="s5"))
    assert replay_run(run.pk).difference is None
    assert replay_run(run.pk, model="own").difference is None
    for position, other, path in (
        (2, {"name": "book", "input": "token tok_43"}, "$.calls[2].input"),
        (4, call("pay", cents=5, token="tok_43"), "$.calls[4].input.token"),
    ):
        model = Asked(lambda request, now=[*asked[:position], other]: {"tools": now})
        report = replay_run(run.pk, model=model)
        assert (report.difference and report.difference.path) == path
        assert "tok_4" not in json.dumps(report.record()), "what is sensitive is masked"


@tool(sensitive=["token"], requires_approval=lambda args, ctx: args["cents"] == 7)
def pay(ctx: ToolContext, cents: int, token: str) -> str:
    return "paid"


def test_the_state_at_every_row_is_the_fold_up_to_there(effects: Effects) -> None:
    run = story()
    rows = list(Message.objects.filter(run=run).order_by("seq").values_list("seq", "kind"))
    states = {kind: state_at(run.pk, seq) for seq, kind in rows}
    asked = states["approval_requested"]
    assert (asked.status, asked.step) == ("awaiting-approval", 2)
    assert states["approval_decided"].status == "active"
    assert states["run_completed"].columns() == load("default", run.session_id, run.pk).run.columns()
    assert [state_at(run.pk, seq).seq for seq, _ in rows] == [seq for seq, _ in rows]
    assert effects.count() == 3, "looking back does nothing"
    fork = fork_run(run.pk, seqs(run, "tool_result")[1])
    sweep()
    report = replay_run(fork.pk)
    assert (report.is_equal, [step.step for step in report.steps]) == (True, [1])
    refused = command("show_run", str(run.pk), "--at", "99")
    assert (refused.code, ", not 99." in refused.err) == (1, True)
    later = the_run(run_agent(shop_agent("again"), "more", "s1", idempotency_key="k2"))
    last = later.messages.latest("seq").seq
    for other, seq in ((run, 0), (run, last), (later, 1), (later, last + 1)):  # rows that are none of theirs
        with pytest.raises(RunStateError, match=rf", not {seq}\."):
            state_at(other.pk, seq)
    with pytest.raises(DurableRunNotFoundError):
        state_at("01a20189-67e9-70a1-9b0c-1b07670a3b0b", 1)
    second = seqs(run, "assistant")[1]
    messages = session_at(run.pk, second - 1).conversation.settled_messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert [block["content"] for block in messages[-1]["content"]] == ["lookup done", "post done"]


CHANGES: list[tuple[Any, str]] = [
    (lambda rows: rows[5].update(content=rows[5]["content"] + " "), "was altered"),
    (lambda rows: rows[3].update(tool_name="refund"), "was altered"),
    (lambda rows: rows.pop(-2), "the export at row"),
    (lambda rows: rows.pop(), "the last line"),
    (lambda rows: rows.pop(4), "is missing"),
    (lambda rows: rows.insert(4, dict(rows[4])), "is missing"),
    (lambda rows: rows[1].update(body=rows[1]["body"].replace("Help", "Harm") + " "), "definition"),
]


def test_an_export_is_verified_without_us(tmp_path: Path) -> None:
    run, path = story(), tmp_path / "run.jsonl"
    lines = exported(run, path)
    hashes = list(Message.objects.order_by("seq").values_list("hash", flat=True))
    assert verified(path) == (
        0, f"{len(hashes)} rows (0 hidden or erased), 0 files (0 left out)\nintact\n",
    )  # fmt: skip
    assert [line["hash"] for line in lines if "seq" in line] == hashes
    printed = command("export_run", str(run.pk)).out.splitlines()
    assert [json.loads(line) for line in printed[1:-1]] == lines[1:-1]
    verify = runpy.run_path(str(VERIFY), run_name="verify_export")["problems"]
    for number, (change, says) in enumerate(CHANGES):
        change(changed := copy.deepcopy(lines))
        assert says in str([*verify(iter(changed))]), number


def test_secrets_are_left_out_and_the_chain_of_an_export_still_holds(tmp_path: Path) -> None:
    turn = {"text": ODD, "tools": [call("pay", cents=7, token="tok_42")]}
    run = the_run(run_turns(turn, tools=[pay]))
    at = seqs(run, "approval_requested")[0]
    shown = json.loads(command("show_run", str(run.pk), "--at", str(at)).out)
    assert (shown["status"], shown["calls"][0]["approval"]["status"]) == ("awaiting-approval", "pending")
    assert shown["calls"][0]["arguments"] == {"cents": 7, "token": "***"}
    assert record(state_at(run.pk, at), Mask())["calls"][0]["arguments"]["token"] == "tok_42"
    deny(Approval.objects.get().pk, None, ODD)
    sweep()
    path = tmp_path / "run.jsonl"
    exported(run, path)
    assert "tok_42" not in path.read_text(encoding="utf-8")
    code, out = verified(path)
    assert (code, "(3 hidden or erased)" in out) == (0, True), out
    lines = exported(run, path, true_values=True)
    assert "tok_42" in path.read_text(encoding="utf-8")
    assert verified(path)[0] == 0
    assert not any("redacted" in name for line in lines for name in line)
    assert "tok_42" in command("export_run", str(run.pk), "--true-values").out


def test_again_in_the_same_session(folder: Path) -> None:
    run = story()
    with broken_commit(1, went_through=True):
        again = run_again(run.pk, idempotency_key="k")
    assert (again.origin_id, again.origin_seq, again.input) == (run.pk, None, run.input)
    assert run_again(run.pk, idempotency_key="k").pk == again.pk == Run.objects.get(origin=run).pk
    assert payloads(again, "run_started")[0]["origin"] == {"run": str(run.pk)}
    with pytest.raises(RunStateError, match="it goes on by itself"):
        run_again(again.pk)
    with pytest.raises(RunStateError, match=f"'s1' belongs to run {run.pk}"):
        run_again(run.pk, idempotency_key=run.idempotency_key)
    sweep()
    assert sound(again).status == "awaiting-approval"
    messages = session_at(again.pk, seqs(again, "user")[0]).conversation.messages()
    assert len(messages) == 7, "the model sees what was done before"
    cancel_run(again.pk)
    start_run(run.agent, run.input, "s1")
    with pytest.raises(SessionBusyError, match=r"unfinished run .* \(queued\) with another task"):
        run_again(run.pk)
    text = "and then? " * 20_000
    run = the_run(run_agent(shop_agent("patient"), text, "s6", idempotency_key="s6"))
    again = run_again(run.pk)  # what was asked at length is put away again
    assert (len(str(again.messages.latest("seq").payload)) < 2_000, again.input) == (True, text)
    assert problems(run.session_id) == []
