"""What a program shows to the people who decide: exact digits, every character, and in time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from shutil import which
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from agentruns import Agent, run_agent, tool
from agentruns.admin.forms import AnswerForm
from agentruns.models import Approval, Run
from agentruns.testing import ScriptedModel
from agentruns.utils.bounds import TEXT_LENGTH
from tests.api.http import Api, make_user
from tests.cost import grows_at_most, least
from tests.shop.agents import call, shop_agent
from tests.waiting import LIMIT

pytestmark = pytest.mark.django_db(transaction=True)

LARGE = 2**53 + 1  # the first whole number that JavaScript rounds
READ = """
const approval = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify([approval.arguments.account, approval.shown.arguments]));
"""


@tool(requires_approval=True, describe=lambda args: f"Pay \u202e{args['text']}")
def pay(account: int, text: str, deep: dict[str, int]) -> str:
    """Pay."""
    return "paid"


def waiting(text: str) -> Approval:
    turns = [{"tools": [call("pay", account=LARGE, text=text, deep={"a\u3164": LARGE})]}]
    agent = Agent("payer", instructions="Pay.", tools=[pay], model=ScriptedModel(turns))
    return run_agent(agent, text, "payments").pending[0]


@pytest.mark.skipif(which("node") is None, reason="Node.js is not installed here")
def test_what_javascript_reads_has_the_digits_that_are_approved() -> None:
    approval = waiting("1\u200b00")
    client = Api(make_user("decider", "decide_approval"))
    client.get(f"/approvals/{approval.pk}")
    how: dict[str, Any] = {"capture_output": True, "check": True, "timeout": LIMIT}
    told = subprocess.run(["node", "-e", READ], input=client.response.content, **how).stdout
    rounded, shown = json.loads(told)
    assert rounded == 2**53  # which is why people are shown the texts
    texts = {one["name"]: one["text"] for one in shown}
    assert texts["account"] == str(LARGE) == str(approval.arguments["account"])
    assert texts["text"] == r"1\u200b00"
    assert str(LARGE) in texts["deep"]
    assert r"a\u3164" in texts["deep"]
    assert "\u202e" not in json.dumps(shown, ensure_ascii=False)


def test_very_many_hidden_characters_make_small_pages() -> None:
    client = Api(make_user("reader", "view_run", "view_approval", "decide_approval", is_staff=True)).client
    for text in ("\u202e" * 2**18, "\u202e\u202d" * 2**17):
        Run.objects.all().update(status="completed")
        turns = [{"tools": [call("pay", account=1, text=text, deep={})]}]
        name = f"payer-{ord(text[1])}"
        agent = Agent(name, instructions="Pay.", tools=[pay], model=ScriptedModel(turns))
        approval = run_agent(agent, text, f"payments {ord(text[1])}").pending[0]
        for name, key in (("approval", approval.pk), ("run", approval.run_id)):
            page: Any = client.get(reverse(f"admin:agentruns_{name}_change", args=[key]))
            assert page.status_code == 200
            assert len(page.content) < 300_000, name


LENGTHS = {"approve": ("reason", 2_001), "deny": ("reason", 2_001), "answer": ("text", 100_001)}


@pytest.mark.parametrize("path", LENGTHS)
def test_texts_are_bounded_as_in_the_console(path: str) -> None:
    member, length = LENGTHS[path]
    assert AnswerForm.base_fields["text"].max_length == TEXT_LENGTH
    approval = waiting("now")
    client = Api(make_user("decider", "decide_approval", "start_run"))
    body = {"digest": approval.digest, member: "x" * length}
    status, problem = client.post(f"/approvals/{approval.pk}/{path}", body)
    assert (status, problem["errors"][0]["loc"]) == (422, ["body", member])
    assert "at most" in problem["detail"]
    assert Approval.objects.get(pk=approval.pk).status == "pending"


def opener(client: Client, calls: int) -> Callable[[], list[int]]:
    """Make a reply with so many gated calls; return what opens its pages, and tells the queries of each."""
    turns = [{"tools": [call("pay", account=n, text=f"no. {n}", deep={}) for n in range(calls)]}]
    agent = Agent(f"payer-{calls}", instructions="Pay.", tools=[pay], model=ScriptedModel(turns))
    run_id = run_agent(agent, "pay", f"payments {calls}").run_id
    one = Approval.objects.filter(run_id=run_id).first()
    assert one is not None
    pages = [("run_change", run_id), ("approval_change", one.pk), ("approval_turn", run_id)]

    def opened() -> list[int]:
        queries = []
        for name, key in pages:
            with CaptureQueriesContext(connection) as asked:
                assert client.get(reverse(f"admin:agentruns_{name}", args=[key])).status_code == 200
            queries.append(len(asked))
        return queries

    return opened


def test_pages_ask_no_more_for_more_calls_of_a_reply() -> None:
    client = Api(make_user("reader", "view_run", "view_approval", "decide_approval", is_staff=True)).client
    run, card, turn = opener(client, 1)()
    few, many = opener(client, 6), opener(client, 60)
    assert grows_at_most(20, few, many), "more than twice as much for each of ten times as many calls"
    queries_of_few, queries_of_many = few(), many()
    # A card with others on its reply reads those as well: their rows, and their cards.
    assert queries_of_many == queries_of_few == [run, card + 2, turn]
    assert turn <= 15  # one for the equal calls that wait


@tool(sensitive_results=["iban"])
def customers(page: int, count: int) -> list[dict[str, str]]:
    """List customers, with what is masked of each."""
    numbers = range(page * count, page * count + count)
    return [{"iban": f"DE{n:020}", "name": f"name {n % 7}", "town": f"town {n % 9}"} for n in numbers]


def listed(pages: int, count: int, session: str) -> Any:
    turns = [{"tools": [call("customers", page=page, count=count)]} for page in range(pages)]
    agent = shop_agent(f"lists-{session}", *turns, tools=[customers], max_steps=1_000)
    return run_agent(agent, "list them", session).run_id


def test_many_values_are_masked_in_a_moment() -> None:
    api = Api(make_user("reader", "view_run"))
    less, run = listed(10, 40, "s0"), listed(10, 400, "s1")
    few, many = (partial(api.get, f"/runs/{each}/messages") for each in (less, run))
    assert grows_at_most(20, few, many), "more than twice as much for each of ten times as many values"
    many()
    shown = api.response.content.decode()
    assert "DE0000" not in shown and shown.count("***") >= 4000


def test_a_list_of_runs_reads_no_whole_journals() -> None:
    first, api = listed(2, 10, "s1"), Api(make_user("reader", "view_run"))
    few = least(lambda: api.get("/runs"))
    large = listed(80, 500, "s2")  # more than is read of sessions for a list
    many = least(lambda: api.get("/runs"), enough=10 * few)
    assert many <= 10 * few, "one more line costs its whole session"
    titles = {one["id"]: (one["title"], one["error"]) for one in api.get("/runs")[1]["items"]}
    assert titles == {first: ("list them", ""), large: ("***", "")}
    assert api.get(f"/runs/{large}")[1]["title"] == "list them"
