"""Looking back at any row of a run, and an export that anybody can verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentruns import ToolContext, approve, deny, run_agent, state_at, tool
from agentruns.exceptions import DurableRunNotFoundError, RunStateError
from agentruns.journal.masking import NOTHING
from agentruns.journal.store import load
from agentruns.models import Message, Run
from agentruns.services.history import record, session_at
from agentruns.services.sweep import sweep
from tests.commands.running import run as command
from tests.db.exports import exported, verified
from tests.db.helpers import run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import act, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

ODD = "nul \x00, dle \x10, surrogate \ud800, \u202e, <b>"


def story() -> Run:
    """A run with a gated call, that ended."""
    first = run_turns(
        {"text": "look", "tools": [call("lookup", number="A1")]}, {"tools": [call("refund", cents=5000)]}
    )
    approve(first.pending[0].pk, None)
    assert sweep().completed == 1
    return the_run(first)


def test_the_state_at_every_row_is_the_fold_up_to_there(effects: Effects) -> None:
    run = story()
    rows = list(Message.objects.filter(run=run).order_by("seq").values_list("seq", "kind"))
    states = {kind: state_at(run.pk, seq) for seq, kind in rows}
    assert (states["approval_requested"].status, states["approval_requested"].step) == (
        "awaiting-approval",
        2,
    )
    assert states["approval_decided"].status == "active"
    assert states["run_completed"].columns() == load("default", run.session_id, run.pk).run.columns()
    assert [state_at(run.pk, seq).seq for seq, _ in rows] == [seq for seq, _ in rows]
    assert effects.count() == 2, "looking back does nothing"


def test_what_the_model_was_sent_at_a_step() -> None:
    run = story()
    second = Message.objects.filter(run=run, kind="assistant").order_by("seq")[1]
    messages = session_at(run.pk, second.seq - 1).conversation.settled_messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[-1]["content"][0]["content"] == "lookup done"


def test_a_row_that_is_none_of_the_run() -> None:
    first, second = the_run(run_turns(session="s1")), None
    agent = shop_agent("again")
    second = the_run(run_agent(agent, "more", "s1", idempotency_key="k2"))
    last = Message.objects.filter(run=second).latest("seq").seq
    for run, seq in ((first, 0), (first, last), (second, 1), (second, last + 1)):
        with pytest.raises(RunStateError, match=rf", not {seq}\."):
            state_at(run.pk, seq)
    with pytest.raises(DurableRunNotFoundError):
        state_at("01a20189-67e9-70a1-9b0c-1b07670a3b0b", 1)


def test_the_command_and_the_record_mask_what_is_sensitive() -> None:
    run = secret()
    seq = Message.objects.get(run=run, kind="approval_requested").seq
    shown = json.loads(command("show_run", str(run.pk), "--at", str(seq)).out)
    (asked,) = shown["calls"]
    assert (asked["arguments"], asked["approval"]["status"]) == ({"cents": 7, "token": "***"}, "pending")
    assert shown["status"] == "awaiting-approval"
    assert record(state_at(run.pk, seq), NOTHING)["calls"][0]["arguments"]["token"] == "tok_42"
    refused = command("show_run", str(run.pk), "--at", "99")
    assert (refused.code, ", not 99." in refused.err) == (1, True)


@tool(name="secretly", requires_approval=True, sensitive=["token"])
def secretly(ctx: ToolContext, cents: int, token: str) -> str:
    """Charge."""
    return act("secretly", ctx, cents=cents)


def secret() -> Run:
    agent = shop_agent(
        "secret", {"text": ODD, "tools": [call("secretly", cents=7, token="tok_42")]}, tools=[secretly]
    )
    result = run_agent(agent, "go", "secret", idempotency_key="secret")
    deny(result.pending[0].pk, None, ODD)
    sweep()
    return the_run(result)


def test_an_export_is_verified_without_us(tmp_path: Path) -> None:
    run, path = story(), tmp_path / "run.jsonl"
    lines = exported(run, path)
    rows = Message.objects.filter(session_id=run.session_id).count()
    assert verified(path) == (
        0,
        f"{rows} rows (0 hidden or erased), 0 files (0 left out)\nintact\n",
    )
    assert [line["hash"] for line in lines if "seq" in line] == list(
        Message.objects.filter(session_id=run.session_id).order_by("seq").values_list("hash", flat=True)
    )
    printed = command("export_run", str(run.pk)).out.splitlines()
    assert [json.loads(line) for line in printed[1:-1]] == lines[1:-1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows[5].update(content=rows[5]["content"] + " "), "was altered"),
        (lambda rows: rows[3].update(tool_name="refund"), "was altered"),
        (lambda rows: rows.pop(-2), "the export at row"),
        (lambda rows: rows.pop(), "the last line"),
        (lambda rows: rows.pop(4), "is missing"),
        (lambda rows: rows.insert(4, dict(rows[4])), "is missing"),
        (lambda rows: rows[1].update(body=rows[1]["body"].replace("Help", "Harm") + " "), "definition"),
    ],
)
def test_an_export_that_was_changed_is_found_out(tmp_path: Path, change: Any, says: str) -> None:
    path = tmp_path / "run.jsonl"
    lines = exported(story(), path)
    change(lines)
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    code, out = verified(path)
    assert (code, says in out) == (1, True), out


def test_secrets_are_left_out_of_an_export_and_the_chain_still_holds(tmp_path: Path) -> None:
    run, path = secret(), tmp_path / "run.jsonl"
    exported(run, path)
    assert "tok_42" not in path.read_text(encoding="utf-8")
    code, out = verified(path)
    assert (code, "(2 hidden or erased)" in out) == (0, True), out
    lines = exported(run, path, true_values=True)
    assert "tok_42" in path.read_text(encoding="utf-8")
    assert verified(path)[0] == 0
    assert not any("redacted" in name for line in lines for name in line)
    assert "tok_42" in command("export_run", str(run.pk), "--true-values").out
