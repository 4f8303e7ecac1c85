"""The commands that show runs, and how text reaches a terminal."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest

from agentruns import approve, resolve_orphan, run_agent, start_run
from agentruns.management.base import as_json, call_text, escaped, moment, shortened, table
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
    (doubt,) = (line for line in lines if line.startswith("in doubt"))
    assert doubt.startswith("in doubt      did broken happen? Nobody knows: /admin/agentruns/run/")
    call_id = Message.objects.get(kind="tool_result", tool_name="broken").call_id
    resolve_orphan(str(result.run_id), call_id, "not_occurred", None)
    assert "in doubt  " not in run("show_run", str(result.run_id)).out


def test_json_is_the_run_and_all_of_its_rows_and_the_cost_is_apart_from_the_tokens(settings: Any) -> None:
    agent = shop_agent("priced", {"text": "done", "usage": {"input_tokens": 10, "output_tokens": 5}})
    settings.AGENTRUNS_PRICES = {model_identity(agent.model): {"input": 3, "output": 15}}
    result = run_agent(agent, "say hi", "s1", idempotency_key="k1")
    head = run("show_run", str(result.run_id)).out.partition("\n\n")[0]
    facts = {line[:14].strip(): line[14:] for line in head.splitlines()}
    assert (facts["usage"], facts["cost"]) == ("input_tokens 10, output_tokens 5", "0.000105")
    shown = run("show_run", str(result.run_id), "--json").lines[0]
    rows = list(Message.objects.filter(run=result.run_id).order_by("seq"))
    assert (shown["id"], shown["status"], shown["output"]) == (result.run_id, "completed", "done")
    assert [row["hash"] for row in shown["messages"]] == [row.hash for row in rows]
    kept = [{name: row.payload[name] for name in row.payload.keys() - {"key_hash"}} for row in rows]
    assert [row["payload"] for row in shown["messages"]] == kept


@pytest.mark.parametrize("run_id", ["nonsense", "00000000-0000-7000-8000-000000000000"])
def test_a_run_that_does_not_exist(run_id: str) -> None:
    outcome = run("show_run", run_id)
    assert (outcome.code, outcome.err) == (1, f"There is no run {run_id}.")


@pytest.fixture
def three_runs() -> None:
    first = shop_agent("first", {"tools": [call("post", text="hi")]})
    second = shop_agent("second", {"tools": [call("refund", cents=5000)]})
    run_agent(first, "say hi", "s1", idempotency_key="k1")
    run_agent(second, "refund it\nplease \x1b[2J", "s2", idempotency_key="k2")
    start_run(first, "later", "s3", idempotency_key="k3")


@pytest.mark.usefixtures("three_runs")
def test_it_is_a_table_newest_first() -> None:
    outcome = run("list_runs")
    heading, *rows = outcome.out.splitlines()
    assert heading.split()[:4] == ["RUN", "STATUS", "AGENT", "SESSION"]
    assert [row.split()[1:4] for row in rows] == [
        ["queued", "first", "s3"], ["awaiting-approval", "second", "s2"], ["completed", "first", "s1"],
    ]  # fmt: skip
    assert "refund it please \\x1b[2J" in rows[1]


@pytest.mark.usefixtures("three_runs")
def test_it_filters() -> None:
    assert [one["session"] for one in run("list_runs", "--json", "--status=queued").lines] == ["s3"]
    assert [one["session"] for one in run("list_runs", "--json", "--agent=second").lines] == ["s2"]
    assert run("list_runs", "--agent=nobody").out == "There are no such runs.\n"
    assert "invalid choice" in run("list_runs", "--status=lost").err
    (done,) = run("list_runs", "--json", "--status=completed").lines
    assert (done["agent"], done["status"], done["input"], done["output"], done["step"]) == (
        "first", "completed", "say hi", "all done", 2,
    )  # fmt: skip


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_list_of_another_database_and_of_an_empty_one() -> None:
    agent = shop_agent("elsewhere", {"tools": [call("post", text="hi")]})
    assert run("run_agent", "elsewhere", "say hi", "--session=s1", "--database=other").code == 0
    assert run("list_runs").out == "There are no runs yet.\n"
    assert run("list_runs", "--json").out == ""
    assert agent.name in run("list_runs", "--database=other").out
    assert run("resume_runs", "--database=other").code == 0


AT = datetime(2026, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Grüße, 24.90 €", "Grüße, 24.90 €"), ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("safe\u202eetacovda", "safe\\u202eetacovda"), ("one\ntwo\r\x00", "one\\ntwo\\r\\x00"),
        ("zero\u200bwidth \ud800", "zero\\u200bwidth \\ud800"), ("no\xa0break", "no\\xa0break"),
    ],
)  # fmt: skip
def test_what_a_terminal_would_act_on_is_shown(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert escaped("24 €", "ascii") == "24 \\u20ac", "what the encoding lacks"


def test_json_is_legal_and_ascii_long_texts_are_cut_and_columns_aligned() -> None:
    text = as_json({"nan": float("nan"), "id": UUID(int=1), "at": AT, "text": "é\x7f\u202e"})
    assert (text.isascii(), text.isprintable()) == (True, True)
    assert json.loads(text) == {
        "nan": "NaN", "id": str(UUID(int=1)), "at": "2026-01-01T00:00:00+00:00", "text": "é\x7f\u202e",
    }  # fmt: skip
    assert shortened("a  b\nc") == "a b c"
    assert shortened("x" * 200, 10) == "x" * 9 + "…"
    assert call_text("post", {"text": "hi", "n": 1}) == 'post(text="hi", n=1)'
    assert list(table([("A", "B"), ("long one", "x\n")])) == ["A         B", "long one  x\\n"]
    assert (moment(AT), moment(None)) == ("2026-01-01 00:00:00", "")
