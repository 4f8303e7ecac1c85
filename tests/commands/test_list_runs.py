from __future__ import annotations

import pytest

from agentruns import run_agent, start_run
from tests.commands.running import run
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


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


@pytest.mark.usefixtures("three_runs")
def test_json_has_the_names_of_the_fields() -> None:
    done = run("list_runs", "--json", "--status=completed").lines[0]
    assert (done["agent"], done["status"], done["input"], done["output"], done["step"]) == (
        "first", "completed", "say hi", "all done", 2,
    )  # fmt: skip


@pytest.mark.django_db
def test_an_empty_database() -> None:
    assert run("list_runs").out == "There are no runs yet.\n"
    assert run("list_runs", "--json").out == ""


def test_a_status_that_does_not_exist() -> None:
    assert "invalid choice" in run("list_runs", "--status=lost").err


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_another_database() -> None:
    agent = shop_agent("elsewhere", {"tools": [call("post", text="hi")]})
    assert run("run_agent", "elsewhere", "say hi", "--session=s1", "--database=other").code == 0
    assert agent.name not in run("list_runs").out
    assert agent.name in run("list_runs", "--database=other").out
    assert run("resume_runs", "--database=other").code == 0
