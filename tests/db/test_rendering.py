"""Instructions and tools that an agent's functions make for each run: once, at its start, in the journal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction

from agentruns import (
    Agent,
    RunContext,
    adopt_definition,
    cancel_run,
    erase_payload,
    fork_run,
    pause_run,
    replay_run,
    resume_run,
    run_again,
    run_agent,
    start_run,
)
from agentruns.agents.agent import definition_difference
from agentruns.exceptions import RenderingError, SessionBusyError
from agentruns.journal.verify import problems
from agentruns.models import Message, Run, Session
from agentruns.services.sweep import sweep
from agentruns.services.transfer import export_run
from agentruns.testing import Script
from tests.db.helpers import payloads
from tests.registry import isolated_registry
from tests.shop.agents import call, lookup, post, refund

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

SEEN: list[RunContext] = []
SAYS: list[Any] = ["Serve {tenant}."]
CHOICE: list[Any] = [["lookup"]]


def greeting(run: RunContext) -> str:
    """Say what the test wants said, by the run's context."""
    SEEN.append(run)
    said = SAYS[0]
    if isinstance(said, Exception):
        raise said
    return said.format(**{"tenant": "nobody", **run.context}) if isinstance(said, str) else said


def shorter(run: RunContext) -> str:
    """Say less."""
    return "Serve."


def choice(run: RunContext) -> Any:
    """Choose what the test wants chosen."""
    return CHOICE[0]


def told(model: Script) -> list[tuple[str, list[str]]]:
    """Give what each request said beforehand: instructions and tools."""
    return [(one.system, [tool["name"] for tool in one.tools]) for one in model.requests]


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()
    SAYS[0], CHOICE[0] = "Serve {tenant}.", ["lookup"]


def make(*turns: Any, **options: Any) -> tuple[Agent, Script]:
    model = Script([*turns, {"text": "all done"}], "m")
    given = {"instructions": greeting, "tools_for": choice, "tools": [lookup, post, refund], **options}
    return Agent(given.pop("name", "rendered"), model=model, **given), model


def test_both_are_made_once_and_journaled() -> None:
    owner = User.objects.create_user("ann")
    agent, model = make({"tools": [call("lookup", number="A1")]})
    definition = agent.definition()
    assert definition["instructions"] == {"function": "tests.db.test_rendering.greeting"}
    assert definition["tools_for"] == "tests.db.test_rendering.choice"
    with isolated_registry():
        other, _model = make(instructions="Serve.", tools_for=None)
    assert definition_difference(definition, other.definition()) == ["instructions", "tools_for"]
    again = partial(run_agent, agent, "do it", "s1", actor=owner, context={"tenant": 7}, idempotency_key="k")
    result = again()
    assert (result.output, told(model)) == ("all done", [("Serve 7.", ["lookup"])] * 2)
    (seen,) = SEEN
    assert (seen.agent, seen.version, seen.session_key, seen.scope) == ("rendered", "1", "s1", "")
    assert (seen.run_id, seen.text, seen.context, seen.user) == (result.run_id, "do it", {"tenant": 7}, owner)
    assert seen.actor == {"id": str(owner.pk), "name": "ann"}
    row = Message.objects.get(run_id=result.run_id, kind="run_started")
    assert (row.facts["tools"], row.content["instructions"]) == (["lookup"], "Serve 7.")
    assert "instructions" not in row.facts
    assert again() == result
    assert len(SEEN) == 1, "a run that is there is not made anew"
    assert problems(row.session_id) == []
    agent.run("do it", context={"tenant": 8})
    assert (told(model)[2], SEEN[1].session_key) == (("Serve 8.", ["lookup"]), None)
    assert Run.objects.count() == 1, "a stateless run has its own"


def test_a_call_of_a_tool_that_was_not_chosen_is_one_of_an_unknown_tool() -> None:
    agent, model = make({"tools": [call("post", text="hello"), call("lookup", number="A1")]})
    run = Run.objects.get(pk=run_agent(agent, "do it", "s1").run_id)
    refused, found = payloads(run, "tool_result")
    assert (refused["is_error"], found["content"]) == (True, "lookup done")
    assert refused["content"] == "Not executed: there is no tool 'post'. Tools: lookup."
    CHOICE[0] = ()
    run_agent(agent, "do it", "s2")
    assert told(model)[-1][1] == []


def test_a_fork_keeps_them_and_a_run_of_the_task_again_does_not() -> None:
    agent, model = make()
    first = str(run_agent(agent, "do it", "s1", context={"tenant": 7}).run_id)
    SAYS[0], CHOICE[0] = "Another day for {tenant}.", ["post"]
    fork = fork_run(first, 2)
    again = run_again(first)
    sweep()
    assert {fork.pk: "Serve 7.", again.pk: "Another day for 7."} == {
        run.pk: payloads(run, "run_started")[-1]["instructions"] for run in (fork, again)
    }
    assert sorted(told(model)[1:]) == [("Another day for 7.", ["post"]), ("Serve 7.", ["lookup"])]
    assert len(SEEN) == 2
    newer, _model = make(version="2", instructions=shorter)
    turned = payloads(fork_run(first, 2, agent=newer), "run_started")[-1]
    assert (turned["instructions"], turned["tools"]) == ("Serve.", ["lookup"]), "each function by itself"
    other, _model = make(name="other")
    moved = fork_run(first, 2, agent=other, idempotency_key="k")
    assert payloads(moved, "run_started")[-1]["instructions"] == "Another day for 7."
    SAYS[0] = ValueError("not now")
    assert fork_run(first, 2, agent=other, idempotency_key="k").pk == moved.pk


def test_a_fork_makes_erased_ones_anew() -> None:
    boss = User.objects.create_superuser("boss")
    agent, _model = make()
    first = str(run_agent(agent, "do it", "s1", context={"tenant": 7}).run_id)
    kept = fork_run(first, 2)
    cancel_run(kept.pk)
    erase_payload(first, 1, boss, "asked to")
    assert not Message.objects.filter(kind="run_started", content__isnull=False).exists()
    fork = fork_run(first, 2)
    assert payloads(fork, "run_started")[-1]["instructions"] == "Serve nobody."


def test_an_adopted_definition_keeps_them_and_makes_what_was_not_there() -> None:
    """A resumed run and a replay keep them, too."""
    plain, _model = make(instructions="Plain.", tools_for=None)
    run = start_run(plain, "do it", "s1", context={"tenant": 7})
    _agent, model = make()
    assert sweep().driven == 0
    adopt_definition(run.pk)
    SAYS[0], CHOICE[0] = "Later.", ["post"]
    _agent, model = make(max_steps=7)
    adopt_definition(run.pk)
    pause_run(run.pk)
    resume_run(run.pk)
    assert replay_run(run.pk, model=model).is_equal
    assert told(model) == [("Serve 7.", ["lookup"])] * 2
    assert ("instructions" in payloads(run, "run_adopted")[1], problems(run.session_id)) == (False, [])


@pytest.mark.parametrize(
    ("says", "chooses", "words"),
    [
        (ZeroDivisionError("no"), [], "instructions failed with ZeroDivisionError. The log says why"),
        (None, [], "must return a string, not NoneType"),
        (b"x", [], "must return a string, not bytes"),
        (" \n", [], "returned no text"),
        ("ü" * 2**19 + "x", [], "1048577 bytes; there may be 1048576"),
        ("x", "lookup", "must return names of tools, not str"),
        ("x", None, "must return names of tools, not NoneType"),
        ("x", [lookup], "must return names of tools, and one is Tool"),
        ("x", ["lookup", "sell"], "chose a tool that is not declared in tools. Declared: lookup, post"),
        ("x", None, "function tools_for failed with ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_the_caller_s_and_nothing_is_stored(
    says: Any, chooses: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent, _model = make()
    for count, (run, session) in enumerate([(run_agent, "s1"), (run_agent, None), (start_run, "s1")], 1):
        SAYS[0], CHOICE[0] = says, (one for one in [1, 0] if 1 / one) if "tools_for" in words else chooses
        with pytest.raises(RenderingError, match=words) as raised:
            run(agent, "do it", session)
        failed = "failed with" in words
        assert isinstance(raised.value.__cause__, ZeroDivisionError) is failed
        assert caplog.text.count("ZeroDivisionError") == (count if failed else 0), "logged once"
    assert (Session.objects.count(), Run.objects.count()) == (0, 0)


def test_a_session_that_is_busy_calls_no_function() -> None:
    agent, _model = make()
    run = start_run(agent, "do it", "s1")
    SAYS[0] = ValueError("not now")
    assert start_run(agent, "do it", "s1").pk == run.pk
    with pytest.raises(SessionBusyError):
        start_run(agent, "something else", "s1")


def leaving(run: RunContext) -> str:
    """Leave a transaction open."""
    connection.ensure_connection()
    transaction.Atomic("default", True, False).__enter__()
    User.objects.create_user("left")
    return "Serve."


def test_a_transaction_that_a_function_leaves_open_is_rolled_back() -> None:
    agent, _model = make(instructions=leaving)
    start_run(agent, "do it", "s1")
    assert not connection.in_atomic_block
    assert (User.objects.count(), Run.objects.count()) == (0, 1)


def test_long_ones_are_in_a_file(folder: Path, settings: Any) -> None:
    settings.AGENTRUNS_PAYLOAD_INLINE_MAX = 1000
    SAYS[0] = long = "Serve well. " * 100
    agent, model = make()
    first = str(run_agent(agent, "do it", "s1").run_id)
    fork = fork_run(first, 2)
    sweep()
    assert [one for one, _tools in told(model)] == [long, long]
    runs = list(Run.objects.order_by("created_at"))
    names = [payloads(run, "run_started")[-1]["stored"]["name"] for run in runs]
    assert [name.split("/")[0] for name in names] == [str(run.session_id) for run in runs]
    assert replay_run(first, model=model).is_equal
    assert [problems(run.session_id) for run in runs] == [[], []]
    assert sum("data" in line for line in export_run(fork.pk, true_values=True)) == 2
    erase_payload(first, 1, User.objects.create_superuser("boss"), "asked to")
    assert not list(folder.rglob("instructions*"))
