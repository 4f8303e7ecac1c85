from __future__ import annotations

from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from agentruns import approve, cancel_run, run_agent, start_run, tool
from agentruns.exceptions import ToolDurabilityError
from agentruns.models import Approval, Message, Run, Session, triggers
from tests.commands.running import run
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


@tool
def wire(text: str) -> str:
    """Send a wire that may or may not have gone out."""
    raise ToolDurabilityError("the bank's answer was lost")


def place(session: str, *turns: object, **options: Any) -> Any:
    agent = shop_agent(f"agent-{Run.objects.count()}", *turns, **options)
    return run_agent(agent, f"do {agent.name}", session, idempotency_key=agent.name)


@pytest.fixture
def journal() -> None:
    """Runs of every status, several of them in one session."""
    ask = {"tools": [call("refund", cents=5000)]}
    place("s1", {"tools": [call("post", text="hi")]})
    place("s1", {"tools": [call("broken")]})
    place("s1", *[{"tools": [call("lookup", number="A1")]}] * 3, max_steps=2, on_budget="fail")
    cancel_run(place("s1", ask).run_id)
    approve(place("s1", ask, ask).pending[0].pk, None)
    run("resume_runs")
    place("s2", {"tools": [call("wire", text="x")]}, tools=[*TOOLS, wire])
    start_run(shop_agent("later"), "later", "s3", idempotency_key="later")
    Session.objects.create(key="s4")
    assert set(Run.objects.values_list("status", flat=True)) == {
        "completed", "failed", "cancelled", "awaiting-approval", "orphaned", "queued",
    }  # fmt: skip


@pytest.mark.usefixtures("journal")
def test_the_first_bad_row_of_each_session_is_named() -> None:
    healthy = "Sessions checked: 4. Nothing is wrong.\n"
    repaired = "Sessions checked: 4. Repaired: 0. Nothing is wrong.\n"
    assert [run("verify_journal", *more).out for more in ((), ("--repair",))] == [healthy, repaired]
    counts = {"sessions": 4, "bad_sessions": 0, "problems": 0, "repaired": 0}
    assert run("verify_journal", "--json").lines == [{"summary": counts}]
    with triggers.lifted(connection):
        Message.objects.filter(session__key="s1", seq__in=[3, 4]).update(tool_name="x")
        Message.objects.filter(session__key="s2", seq=2)._raw_delete("default")
    outcome = run("verify_journal")
    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        "Session s1: seq 3 (assistant) was altered.",
        "Session s2: seq 2 is missing; the next row is 3 (assistant).",
        "Sessions checked: 4. Problems: 2.",
    ]
    first, _, summary = run("verify_journal", "--json").lines
    assert first == {
        "session": "s1", "seq": 3, "kind": "assistant", "run": None, "approval": None, "column": None,
        "problem": "seq 3 (assistant) was altered.",
    }  # fmt: skip
    assert summary["summary"] == {**counts, "bad_sessions": 2, "problems": 2}
    assert run("verify_journal", "--session=s3").code == 0
    assert run("verify_journal", "--session=s2").out.splitlines()[1] == "Sessions checked: 1. Problems: 1."


@pytest.mark.usefixtures("journal")
def test_columns_are_repaired_but_not_those_of_a_broken_journal() -> None:
    with triggers.lifted(connection):
        Message.objects.filter(session__key="s2", seq=4).update(attempt=9)
    rows = list(Message.objects.order_by("pk").values())
    run_of_s1 = Run.objects.filter(session__key="s1").earliest("created_at")
    Run.objects.filter(session__key="s2").update(error="x")
    Run.objects.filter(pk=run_of_s1.pk).update(output="a lie")
    card = Approval.objects.earliest("requested_at")
    Approval.objects.filter(pk=card.pk).update(arguments={"cents": 1}, approved_count=5)
    assert run("verify_journal").code == 1
    outcome = run("verify_journal", "--repair")
    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        f"Session s1: run {run_of_s1.pk}: output rewritten from 'a lie' to 'all done'.",
        f"Session s1: approval {card.pk}: arguments rewritten.",
        f"Session s1: approval {card.pk}: approved_count rewritten from '5' to '0'.",
        "Session s2: seq 4 (tool_started) was altered.",
        "Session s2: not repaired: the journal itself is wrong, so nothing can be folded from it.",
        "Sessions checked: 4. Repaired: 3. Problems: 1.",
    ]
    assert run("verify_journal", "--session=s1").code == 0
    assert Run.objects.get(session__key="s2").error == "x"
    assert list(Message.objects.order_by("pk").values()) == rows
    lines = run("verify_journal", "--repair", "--json").lines
    assert [set(line) & {"problem", "refused"} for line in lines] == [{"problem"}, {"refused"}, set()]


@pytest.mark.usefixtures("journal")
def test_missing_triggers_are_found_and_installed_again() -> None:
    triggers.remove(connection)
    try:
        outcome = run("verify_journal")
        assert outcome.code == 1
        for name in triggers.SQLITE if connection.vendor == "sqlite" else triggers.POSTGRESQL:
            assert f"Trigger {name} of the journal is missing: its rows could be changed.\n" in outcome.out
        outcome = run("verify_journal", "--repair")
        assert (outcome.code, outcome.out.splitlines()) == (
            0,
            ["The triggers of the journal were installed again.",
             "Sessions checked: 4. Repaired: 1. Nothing is wrong."],
        )  # fmt: skip
        assert not triggers.differences(connection)
    finally:
        triggers.install(connection)


def test_what_was_written_into_the_database_does_not_reach_the_terminal() -> None:
    start_run(shop_agent("later"), "later", "s3")
    Session.objects.filter(key="s3").update(key="s3\x1b[2J")
    Run.objects.filter(agent="later").update(error="\x1b[31m\u202e")
    outcome = run("verify_journal")
    assert outcome.code == 1
    assert "Session s3\\x1b[2J: run " in outcome.out
    assert "\x1b" not in outcome.out + run("verify_journal", "--json", "--repair").out
    assert "\u202e" not in outcome.out


def test_a_session_costs_as_many_queries_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost() -> int:
        with CaptureQueriesContext(connection) as captured:
            assert run("verify_journal").code == 0
        return len(captured)

    costs = [cost()]
    for sessions in (1, 5):
        for _ in range(sessions):
            place(f"s{Run.objects.count()}", {"tools": [call("post", text="x")]})
        costs.append(cost())
    page = costs[1] - costs[0] - 6  # a page that is not empty is followed by another look
    assert page == 1
    assert costs[2] - costs[1] == 5 * 6
    monkeypatch.setattr("agentruns.management.commands.verify_journal.PAGE", 2)
    assert run("verify_journal").out == "Sessions checked: 6. Nothing is wrong.\n"


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_another_database_an_empty_one_and_a_session_that_does_not_exist() -> None:
    shop_agent("elsewhere", {"tools": [call("post", text="hi")]})
    assert run("run_agent", "elsewhere", "say hi", "--session=s1", "--database=other").code == 0
    Run.objects.using("other").update(output="a lie")
    assert run("verify_journal").out == "Sessions checked: 0. Nothing is wrong.\n"
    codes = [run("verify_journal", "--database=other", *more).code for more in ((), ("--repair",), ())]
    assert codes == [1, 0, 0]
    outcome = run("verify_journal", "--session=\x1b[2J")
    assert (outcome.code, outcome.out) == (2, "")
    assert ("There is no session" in outcome.err, "\x1b" in outcome.err) == (True, False)
