"""Forks whose origin has gone on since the cut: what it did is not done a second time without a person."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection

from agentruns import approve, cancel_run, fork_run, pause_run, resume_run, run_agent, tool
from agentruns.engine.worker import advance
from agentruns.journal.store import load
from agentruns.journal.verify import problems
from agentruns.models import Approval, Message, Run, triggers
from agentruns.services.sweep import sweep
from agentruns.testing import crashing_at, expire_leases
from tests.db.doubts import wire
from tests.db.helpers import names, outcomes, payloads, sound
from tests.db.stories import seq_of
from tests.effects import Effects
from tests.files import MEGABYTE, fetch, report_of, said
from tests.rows import change
from tests.shop.agents import TOOLS, call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

POST = {"tools": [call("post", text="hello")]}


def believing(request: Any) -> Any:
    """Do again what is said not to have been done, as a model does."""
    done = "Not executed" not in said(request) and "not known" not in said(request)
    return {"text": "done"} if done else POST


def asked(turn: Any, *turns: Any, **options: Any) -> Run:
    """Run an agent that says these turns, or after the first one believes what it is told."""
    agent = shop_agent("shop", turn, *(turns or [believing]), **options)
    return Run.objects.get(pk=run_agent(agent, "do it", "s1", idempotency_key="k").run_id)


def settled(fork: Run) -> list[tuple[str, str]]:
    sound(fork)
    return [(row["outcome"], str(row["content"])) for row in payloads(fork, "tool_result")]


def test_what_the_origin_has_executed_since_is_not_told_as_not_executed(effects: Effects) -> None:
    run = sound(asked(POST))
    assert names(effects) == ["post"]
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    assert sweep().completed == 1
    assert (settled(fork), names(effects)) == ([("ok", "post done")], ["post"])
    (copied,) = payloads(fork, "tool_result")
    row = Message.objects.get(run=run, kind="tool_result")
    assert (copied["copied"]["run"], copied["copied"]["seq"]) == (str(run.pk), row.seq)
    with triggers.lifted(connection):
        change(row, content="forged")
    assert f"is not what row {row.seq} of run {run.pk} says" in problems(fork.session_id)[0]


def test_a_result_in_a_file_comes_along(folder: Any, effects: Effects) -> None:
    read: list[str] = []

    def reads(request: Any) -> Any:
        read.append(said(request))
        return {"text": "read"}

    run = sound(asked({"tools": [call("fetch", size=MEGABYTE)]}, reads, tools=[fetch]))
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    assert sweep().completed == 1
    assert read == [report_of(MEGABYTE)] * 2
    assert (settled(fork)[0][0], names(effects)) == ("ok", ["fetch"])


def test_what_the_origin_has_started_since_is_in_doubt(effects: Effects) -> None:
    with crashing_at("after_tool"):
        asked(POST)
    run = Run.objects.get()
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    sweep()
    assert [outcome for outcome, _ in settled(fork)] == ["unknown"]
    assert (fork.status, names(effects)) == ("awaiting-approval", ["post"])
    expire_leases()
    sweep()
    run.refresh_from_db()
    assert (run.status, names(effects)) == ("orphaned", ["post"])


def test_what_the_origin_executes_later_is_seen_before_the_same_tool_runs(effects: Effects) -> None:
    """The fork is made while the call waits; the origin goes on before the fork's model asks again."""
    origin = asked({"tools": [call("refund", cents=5000), call("post", text="hello")]})
    fork = fork_run(origin.pk, seq_of(origin, "assistant"))
    assert settled(fork) == [("cancelled", "Not executed in this fork.")] * 2
    approve(Approval.objects.get().pk, None)
    assert advance(Run.objects.get(pk=origin.pk), "default")
    assert names(effects) == ["refund", "post"]
    sweep()
    fork.refresh_from_db()
    assert (fork.status, names(effects)) == ("awaiting-approval", ["refund", "post"])
    card = Approval.objects.get(run=fork)
    assert f"of run {origin.pk}" in card.why
    assert "its origin has executed it since" in card.why
    approve(card.pk, None)
    sweep()
    assert (settled(fork)[-1][0], names(effects)) == ("ok", ["refund", "post", "post"]), "a person said so"


def test_a_fork_of_a_fork_at_what_both_have_copied(effects: Effects) -> None:
    origin = asked({"tools": [call("refund", cents=5000)]})
    first = fork_run(origin.pk, seq_of(origin, "assistant"))
    cut = seq_of(origin, "assistant")
    second = fork_run(first.pk, first.messages.latest("seq").seq, text="go on")
    approve(Approval.objects.get().pk, None)
    assert advance(Run.objects.get(pk=origin.pk), "default")
    third = fork_run(first.pk, cut)
    assert settled(third) == [("ok", "refund done")]
    assert settled(second) == [("cancelled", "Not executed in this fork.")]
    assert names(effects) == ["refund"]
    (call_id,) = Approval.objects.values_list("call_id", flat=True)
    assert load("default", second.session_id, second.pk).open_elsewhere == {"refund": {call_id: origin.pk}}


def test_nothing_to_see_of_a_call_that_was_never_started() -> None:
    run = cancel_run(asked({"tools": [call("refund", cents=5000)]}).pk, None)
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    assert settled(fork) == [("cancelled", "Not executed in this fork.")]
    assert "open_in" not in payloads(fork, "tool_result")[0], "it never can be"


def test_what_the_origin_executes_between_the_gate_and_the_start(effects: Effects) -> None:
    origin: list[Run] = []

    @tool(safe_to_retry=True)
    def dally() -> str:
        """Let the origin go on meanwhile."""
        if origin:
            resume_run(origin.pop().pk)
        return "dallied"

    def hold(request: Any) -> Any:
        pause_run(request.run_id, None)
        return POST

    ask = {"tools": [call("dally"), call("post", text="hello again")]}
    held = asked(hold, ask, POST, tools=[*TOOLS, dally])
    assert (held.status, effects.count()) == ("paused", 0)
    fork = fork_run(held.pk, seq_of(held, "assistant"))
    origin.append(held)
    assert advance(Run.objects.get(pk=fork.pk), "default")
    told = settled(fork)
    assert [outcome for outcome, _ in told] == ["cancelled", "ok", "error"]
    assert "its origin has executed it since" in told[-1][1]
    assert fork.status == "awaiting-approval"
    mine = {started["key"] for started in payloads(fork, "tool_started")}
    assert not mine & {line["key"] for line in effects.lines() if line["tool"] == "post"}


def test_a_doubt_that_was_told_to_the_origins_model_is_told_to_the_forks(effects: Effects) -> None:
    ask = {"tools": [call("wire", text="x")]}
    run = asked(ask, lambda request: ask, tools=[wire], on_orphan="surface")
    assert (outcomes(run), run.status) == (["unknown"], "awaiting-approval")
    fork = fork_run(run.pk, seq_of(run, "assistant"))
    assert advance(Run.objects.get(pk=fork.pk), "default")
    assert [outcome for outcome, _ in settled(fork)] == ["unknown"]
    assert (fork.status, effects.count()) == ("awaiting-approval", 1)
