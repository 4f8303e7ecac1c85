"""The values of contexts that are kept for search: which, for whom, and how long."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from agentruns import Agent, erase_payload, export_run, fork_run, run_again, run_agent, start_run, tool
from agentruns.api import routing
from agentruns.models import ContextValue, Run
from agentruns.services.data.retention import erase_session
from agentruns.services.transfer import import_run
from agentruns.testing import ScriptedModel
from tests.admin.people import browser
from tests.api.http import Api, make_user
from tests.shop.agents import call, shop_agent
from tests.statements import captured_statements

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.usefixtures("nothing_by_time"),
]

LIST = "/admin/agentruns/run/"
PIN = "pin-Q77001x"


def kept() -> set[tuple[str, str]]:
    return set(ContextValue.objects.values_list("key", "value"))


def found(**values: Any) -> set[str]:
    return set(Run.objects.with_context(**values).values_list("session__key", flat=True))


def start(session: str = "s1", **context: Any) -> Run:
    return start_run(shop_agent("shop"), "x", session, context=context)


def test_short_scalars_are_kept_and_found_and_what_no_column_holds_is_left_out() -> None:
    run = start(tenant=7, plan="gold", paid=True, rate=1.5, nothing=None, address={"city": "Ulm"}, tags=["a"])
    assert kept() == {("tenant", "7"), ("plan", "gold"), ("paid", "true"), ("rate", "1.5")}
    start("s2", tenant="7", self="a")
    start("s3", tenant=8)
    assert found(tenant=7) == {"s1", "s2"}
    assert found(tenant="7", plan="gold") == {run.session.key}
    assert set(Run.objects.with_context({"self": "a"})) == {Run.objects.get(session__key="s2")}
    assert found(tenant=None) == found(address={"city": "Ulm"}) == found(tenant="x" * 500) == set()
    odd = {"nul": "a\x00b", "half": "\ud800", "": "ü", "long": "x" * 201, "k" * 201: 1, "huge": 10**300}
    run = start("odd", **odd)
    assert [*run.context_values.values_list("key", "value")] == [("", "ü")]
    assert start("many", **{f"n{number:02}": number for number in range(20)}).context_values.count() == 16


def test_a_start_with_context_is_one_statement_more_on_sqlite_alone() -> None:
    agent = shop_agent("shop")
    with captured_statements() as without:
        start_run(agent, "x", "s1", idempotency_key="a")
    with captured_statements() as captured:
        start_run(agent, "x", "s2", idempotency_key="b", context={"tenant": 7, "plan": "gold"})
    assert len(captured) - len(without) == {"sqlite": 1, "postgresql": 0}[connection.vendor], captured
    assert found(tenant=7, plan="gold") == {"s2"}


def test_forks_and_runs_again_are_found_and_values_go_with_the_context_and_with_the_run() -> None:
    result = run_agent(shop_agent("shop"), "x", "s1", context={"tenant": 7})
    run_again(result.run_id)
    fork_run(result.run_id, 2, session="s2")
    fork_run(result.run_id, 2, session="s3", context={"tenant": 8})
    assert Run.objects.with_context(tenant=7).count() == 3
    assert found(tenant=8) == {"s3"}
    erased = run_agent("shop", "x", "s4", context={"tenant": 9})
    run_agent("shop", "x", "s5", context={"plan": "gold"})
    erase_payload(erased.run_id, 1, None, "asked to")
    assert kept() == {("tenant", "7"), ("tenant", "8"), ("plan", "gold")}
    erase_session("s5")
    assert kept() == {("tenant", "7"), ("tenant", "8")}


def test_what_a_tool_calls_sensitive_is_kept_by_no_start_and_no_import(settings: Any) -> None:
    result = run_agent(secretive(), "x", "s1", context={"tenant": 7, "pin": "1234"})
    assert kept() == {("tenant", "7")}
    lines = list(export_run(result.run_id, true_values=True))
    settings.AGENTRUNS_DATABASE = "other"
    run = import_run(lines)
    assert set(run.context_values.values_list("key", "value")) == {("tenant", "7")}


@tool(requires_approval=True, sensitive=["pin"])
def unlock(pin: str) -> str:
    """Open a door."""
    return "open"


def secretive() -> Agent:
    turns = [{"tools": [call("unlock", pin=PIN)]}, {"text": "Done."}]
    return Agent("doors", instructions="Open.", tools=[unlock], model=ScriptedModel(turns))


def test_the_api_and_the_console_find_runs_by_a_value_that_they_show() -> None:
    api = Api(make_user("reader", "view_run"))
    start(tenant=7, ratio="1:2")
    start("s2", tenant=8)

    def asked(context: str, api: Api = api) -> list[str]:
        return [run["session"] for run in api.get("/runs", context=context)[1]["items"]]

    contexts = ("tenant:7", "ratio:1:2", "tenant:", "other:7")
    assert [asked(context) for context in contexts] == [["s1"], ["s1"], [], []]
    for wrong in ("tenant", ":7", "x" * 500, "a\x00:b"):
        assert api.get("/runs", context=wrong)[0] == 422
    ann = make_user("ann")
    start_run("shop", "x", "s3", owner=ann, context={"tenant": 7})
    assert asked("tenant:7", Api(ann)) == ["s3"]
    for session, tenant in (("first", "north"), ("second", "south"), ("north-3", "east")):
        start(session, tenant=tenant)
    for term, sessions in {"north": {"first", "north-3"}, "tenant:south": {"second"}, "tenan": set()}.items():
        shown = browser("viewer").get(LIST, {"q": term}).context["cl"].result_list
        assert {run.session.key for run in shown} == sessions


def test_a_masked_value_is_not_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    run_agent(secretive(), "x", "s1", context={"note": PIN, "tenant": 7})
    assert ("note", PIN) in kept(), "by another name, and before any call: nobody knows yet"
    api = Api(make_user("reader", "view_run"))
    assert len(api.get("/runs", context="tenant:7")[1]["items"]) == 1
    assert api.get("/runs", context=f"note:{PIN}")[1]["items"] == []
    for term in (PIN, f"note:{PIN}"):
        assert "1 run" not in browser("viewer").get(LIST, {"q": term}).content.decode()
    run_agent(secretive(), "x", "s2", context={"note": PIN, "tenant": 7})
    monkeypatch.setattr(routing, "PAGE", 1)
    assert api.get("/runs", context="tenant:7")[1]["next"] is not None
    assert api.get("/runs", context=f"note:{PIN}")[1] == {"items": [], "next": None}
