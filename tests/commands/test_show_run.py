from __future__ import annotations

from typing import Any

import pytest

from agentruns import approve, run_agent
from agentruns.models import Message
from agentruns.providers.names import model_identity
from tests.commands.running import run
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def test_it_shows_where_the_run_stands_and_its_journal() -> None:
    agent = shop_agent("shown", {"text": "on it\x1b[2J", "tools": [call("refund", cents=5000)]})
    result = run_agent(agent, "refund\nit", "s1", idempotency_key="k1")
    outcome = run("show_run", str(result.run_id))
    head, _, timeline = outcome.out.partition("\n\n")
    facts = {line[:14].strip(): line[14:] for line in head.splitlines()}
    assert facts["status"] == "awaiting-approval"
    assert facts["input"] == "refund"
    assert str(result.pending[0].pk) in facts["waits for"]
    assert facts[""].startswith("Decide in the admin under Approvals, or: manage.py approve_call ")
    kinds = [line.split()[3] for line in timeline.splitlines()]
    assert kinds == ["run_started", "user", "assistant", "approval_requested"]
    assert "on it\\x1b[2J refund(cents=5000)" in timeline
    assert "\x1b" not in outcome.out


def test_every_kind_of_row_has_its_line() -> None:
    agent = shop_agent("told", {"tools": [call("refund", cents=5000), call("broken")]})
    result = run_agent(agent, "refund", "s1", idempotency_key="k1")
    approve(result.pending[0].pk, None, reason="fine")
    assert run("resume_runs").code == 0
    lines = run("show_run", str(result.run_id)).out.splitlines()
    for text in (
        "approve by the program: fine", "approved by the program", "ok: refund done",
        "ValueError: the printer is on fire", "all done",
    ):  # fmt: skip
        assert any(text in line for line in lines), text


def test_the_cost_is_apart_from_the_tokens(settings: Any) -> None:
    agent = shop_agent("priced", {"text": "done", "usage": {"input_tokens": 10, "output_tokens": 5}})
    settings.AGENTRUNS_PRICES = {model_identity(agent.model): {"input": 3, "output": 15}}
    result = run_agent(agent, "say hi", "s1", idempotency_key="k1")
    head = run("show_run", str(result.run_id)).out.partition("\n\n")[0]
    facts = {line[:14].strip(): line[14:] for line in head.splitlines()}
    assert (facts["usage"], facts["cost"]) == ("input_tokens 10, output_tokens 5", "0.000105")


def test_json_is_the_run_and_all_of_its_rows() -> None:
    agent = shop_agent("machine", {"tools": [call("post", text="hi")]})
    result = run_agent(agent, "say hi", "s1", idempotency_key="k1")
    shown = run("show_run", str(result.run_id), "--json").lines[0]
    rows = list(Message.objects.filter(run=result.run_id).order_by("seq"))
    assert (shown["id"], shown["status"], shown["output"]) == (result.run_id, "completed", "all done")
    assert [row["hash"] for row in shown["messages"]] == [row.hash for row in rows]
    assert [row["payload"] for row in shown["messages"]] == [row.payload for row in rows]


@pytest.mark.parametrize("run_id", ["nonsense", "00000000-0000-7000-8000-000000000000"])
def test_a_run_that_does_not_exist(run_id: str) -> None:
    outcome = run("show_run", run_id)
    assert (outcome.code, outcome.err) == (1, f"There is no run {run_id}.")
