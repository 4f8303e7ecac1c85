"""Whose turn it is: priorities, turns of scopes and agents, agents' limits, providers' rates.

AGENTRUNS_LONG=1 takes ten times as many runs, and prints what the order of 5,000 costs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings as examples, strategies as st

from agentruns import Agent, cancel_run, fork_run, resume_run, run_agent, send_message, start_run
from agentruns.checks.settings import check_values
from agentruns.conf import settings as conf
from agentruns.engine import turns
from agentruns.engine.leases import claim
from agentruns.engine.turns import in_turn, room_of, spend
from agentruns.exceptions import SessionBusyError
from agentruns.journal.verify import problems
from agentruns.models import Control, Message, Run, Session
from agentruns.models.run import TURN
from agentruns.providers.base import ProviderError
from agentruns.services.data.repair import repair_session
from agentruns.services.runs.forks import run_again
from agentruns.services.sweep import candidates, sweep, unserved
from agentruns.utils.db import database_now
from tests.commands.running import run as command
from tests.db.crowds import ID, multiply
from tests.db.helpers import kill, sound
from tests.db.racing import LEVELS, at_once, isolation
from tests.registry import isolated_registry
from tests.shop.agents import call, shop_agent
from tests.waiting import pause

pytestmark = pytest.mark.django_db(transaction=True)

LONG = bool(os.environ.get("AGENTRUNS_LONG"))
AGEING = turns.AGEING.total_seconds()
MANY = 5000 if LONG else 500


@pytest.fixture(autouse=True)
def _own_agents() -> Iterator[None]:
    with isolated_registry():
        yield


def queued(agent: Agent, session: str, **options: Any) -> Run:
    """Queue a run that nobody drives yet."""
    return start_run(agent, "do it", session, **options)


def order() -> list[str]:
    """List the session keys of the runs in the order in which this process would claim them."""
    return [run.session.key for run in candidates()]


def waited(run: Run, seconds: float) -> None:
    """Let a run have waited for so long."""
    Run.objects.filter(pk=run.pk).update(updated_at=Now() - timedelta(seconds=seconds))


# Priorities


def test_a_priority_is_of_the_start_or_of_the_agent_and_is_journaled() -> None:
    batch, chat = shop_agent("batch", priority="low"), shop_agent("chat")
    runs = {
        "s1": (queued(batch, "s1"), 1, "low"),
        "s2": (queued(batch, "s2", priority="high"), -1, "high"),
        "s3": (queued(chat, "s3"), 0, None),
        "s4": (queued(batch, "s4", priority="normal"), 0, None),
    }
    for run, rank, word in runs.values():
        run.refresh_from_db()
        facts = Message.objects.get(run=run, kind="run_started").facts
        assert (run.priority, facts.get("priority")) == (rank, word)
        assert problems(run.session_id) == []
    assert order() == ["s2", "s3", "s4", "s1"]
    Run.objects.filter(pk=runs["s1"][0].pk).update(priority=-1)
    assert "priority" in problems(runs["s1"][0].session_id)[0]
    repair_session("default", runs["s1"][0].session_id)
    assert sound(runs["s1"][0]).priority == 1


def test_forks_repeats_and_the_next_message_inherit_the_priority() -> None:
    chat = shop_agent("chat")
    run = queued(chat, "s1", priority="high")
    assert sweep().completed == 1
    fork = fork_run(run.pk, 2, text="again")
    again = run_again(run.pk)
    assert sweep().completed == 2
    message = send_message("s1", "and now?")
    for made in (fork, again, message):
        assert sound(made).priority == -1
        assert Message.objects.own().get(run=made, kind="run_started").facts["priority"] == "high"


@pytest.mark.parametrize("wrong", ["urgent", "", 1])
def test_a_wrong_priority_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="priority"):
        shop_agent("wrong", priority=wrong)
    with pytest.raises(ValueError, match="riority"):
        queued(shop_agent("right"), "s1", priority=wrong)
    assert not Run.objects.exists()


def test_waiting_raises_a_run_until_it_has_its_turn() -> None:
    agent = shop_agent("both", priority="low")
    low = queued(agent, "low")
    queued(agent, "high-1", priority="high")
    queued(agent, "normal", priority="normal")
    assert order() == ["high-1", "normal", "low"]
    waited(low, AGEING + 1)
    assert order() == ["high-1", "low", "normal"], "the older of two that count as normal"
    waited(low, 2 * AGEING + 1)
    for number in (2, 3):
        queued(agent, f"high-{number}", priority="high")
    assert order() == ["low", "high-1", "high-2", "high-3", "normal"]
    many = [queued(agent, f"low-{number}") for number in range(5)]
    for run in many:
        waited(run, 9 * AGEING)
    assert order()[:6] == ["low", "high-1", "high-2", "low-0", "high-3", "low-1"], "they take turns"
    Run.objects.filter(pk=low.pk).update(not_before=Now() - timedelta(seconds=1))
    assert order()[-1] == "low", "until its start it did not wait"


# Turns


def test_a_batch_of_one_scope_or_agent_does_not_hold_up_chats() -> None:
    batch, chat = shop_agent("batch"), shop_agent("chat")
    queued(batch, "batch", scope="big")
    made = ID[connection.vendor].format
    multiply(Session, MANY, id=made("n"), key="'batch-' || n")
    multiply(Run, MANY, id=made("n"), session_id=made("n"))
    for number in range(5):
        queued(batch, f"other-{number}", scope=f"small-{number}")
        queued(chat, f"chat-{number}", scope="big")
    first = order()
    assert len(first) == 100
    assert {f"other-{number}" for number in range(5)} <= {*first[:6]}
    assert {f"chat-{number}" for number in range(5)} <= {*first[:15]}
    assert order()[:15] == first[:15]


def test_what_is_being_driven_counts() -> None:
    chat = shop_agent("chat")
    busy = [queued(chat, f"busy-{number}", scope="busy") for number in range(5)]
    for run in busy[:3]:
        assert claim("default", run.pk, run.agent)
    for number in range(4):
        queued(chat, f"idle-{number}", scope="idle")
    assert order() == ["idle-0", "idle-1", "idle-2", "busy-3", "idle-3", "busy-4"]
    for run in busy[:3]:
        kill(run)
    assert order()[:3] == ["busy-0", "idle-0", "busy-1"], "a lease that is over does not count"


RUN = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["x", "y"]),
    st.sampled_from([-1, 0, 1]),
    st.sampled_from(["due", "live", "later"]),
    st.sampled_from([0, AGEING + 60, 2 * AGEING + 60]),
)


@examples(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(RUN, min_size=1, max_size=14))
def test_the_order_is_that_of_the_rules(given_runs: list[tuple[str, str, int, str, int]]) -> None:
    with isolated_registry():
        agents = {name: shop_agent(name) for name in "xy"}
        runs = []
        for number, (scope, agent, priority, state, seconds) in enumerate(given_runs):
            run = queued(agents[agent], f"s{number}", scope=scope)
            Run.objects.filter(pk=run.pk).update(
                priority=priority,
                updated_at=Now() - timedelta(seconds=seconds),
                not_before=Now() + timedelta(seconds=9) if state == "later" else None,
            )
            if state == "live":
                assert claim("default", run.pk, agent)
            runs.append(run)
        try:
            expected = by_rules(given_runs)
            found = [run.pk for run in candidates()]
        finally:
            Message.objects.all()
            for run in runs:
                Run.objects.filter(pk=run.pk).update(
                    status="completed", lease_expires_at=None, idempotency_key=""
                )
                Session.objects.filter(pk=run.session_id).update(key=str(run.pk))
        assert found == [runs[number].pk for number in expected]


def by_rules(given_runs: list[tuple[str, str, int, str, int]]) -> list[int]:
    """Compute the order of the due runs as the documentation says it."""
    aged = [
        max(-1, priority - int(seconds // AGEING) * (state != "live"))
        for _, _, priority, state, seconds in given_runs
    ]

    def taken(**same: Any) -> int:
        """Count the live runs of a scope, or of an agent and priority in it."""
        names = ("scope", "agent", "priority")
        return sum(
            each[3] == "live" and all(each[names.index(name)] == value for name, value in same.items())
            for each in given_runs
        )

    turn: dict[int, int] = {}
    for scope in {each[0] for each in given_runs}:
        due = [n for n, each in enumerate(given_runs) if each[0] == scope and each[3] == "due"]
        nth: dict[int, int] = {}
        for kind in {given_runs[n][1:3] for n in due}:
            mine = sorted((n for n in due if given_runs[n][1:3] == kind), key=lambda n: (aged[n], n))
            at_work = taken(scope=scope, agent=kind[0], priority=kind[1])
            nth |= {n: at_work + place for place, n in enumerate(mine)}
        mine = sorted(due, key=lambda n: (aged[n], nth[n], n))
        turn |= {n: taken(scope=scope) + place for place, n in enumerate(mine)}
    return sorted(turn, key=lambda n: (aged[n], turn[n], n))


def test_the_order_takes_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentruns.engine.leases.DRAIN_CHECK_SECONDS", 3600.0)
    shop_agent("chat")
    candidates()  # which reads the switches, too
    with CaptureQueriesContext(connection) as queries:
        assert candidates() == []
    assert len(queries) == 1
    queued(shop_agent("chat"), "s1")
    with CaptureQueriesContext(connection) as queries:
        assert len(candidates()) == 1
    assert len(queries) == 2


# Limits of agents


def live() -> int:
    return Run.objects.live().count()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2"])
def test_a_wrong_limit_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_concurrent must be"):
        shop_agent("wrong", max_concurrent=wrong)


@pytest.mark.parametrize("level", LEVELS)
def test_of_eight_that_claim_at_once_no_more_than_the_limit_succeed(level: str) -> None:
    agent = shop_agent("few", max_concurrent=3)
    runs = [queued(agent, f"s{number}").pk for number in range(8)]
    with isolation(level):
        for _ in range(3):
            leases = at_once(*(lambda pk=pk: claim("default", pk, "few") for pk in runs))
            assert not [each for each in leases if isinstance(each, Exception)], leases
            assert (sum(each is not None for each in leases), live()) == (3, 3)
            assert Run.objects.filter(status="queued", attempts=0).count() == 5
            for lease in filter(None, leases):
                lease.release()
    assert order() == [f"s{number}" for number in range(3)]


def test_callers_who_wait_obey_and_get_a_queued_run() -> None:
    agent = shop_agent("few", max_concurrent=2)
    runs = [queued(agent, f"s{number}") for number in range(3)]
    for run in runs[:2]:
        assert claim("default", run.pk, run.agent)
    assert candidates() == []
    assert unserved() == [], "it is served, and waits"
    text = TURN + "the agent's limit of 2 runs at once is reached."
    for result in (agent.run("do it", "s4"), resume_run(runs[2].pk), run_agent(agent, "do it", "s2")):
        assert (result.status, result.error) == ("queued", text)
    assert Run.objects.get(pk=runs[2].pk).attempts == 0
    with pytest.raises(SessionBusyError, match="live in another process"):
        resume_run(runs[0].pk)
    assert "limit of 2" in command("list_runs").out
    assert "limit of 2" in command("show_run", str(runs[2].pk)).out
    kill(runs[1])  # its worker died
    assert order() == ["s1"]
    assert agent.run("do it", "s5").status == "completed", "a slot is free at the end of the dead one's lease"
    assert [sweep().completed for _ in range(4)] == [1, 1, 1, 0]
    assert live() == 1


@pytest.mark.parametrize("many", [8])
def test_of_eight_that_run_at_once_no_more_than_the_limit_are_at_work(many: int) -> None:
    seen: list[int] = []

    def say(request: object) -> dict[str, str]:
        seen.append(live())
        for _ in range(20):  # while others claim
            pause()
            seen.append(live())
        return {"text": "done"}

    agent = shop_agent("few", say, max_concurrent=2)
    results = at_once(*(lambda n=n: agent.run("do it", f"s{n}") for n in range(many)))
    assert {each.status for each in results} <= {"completed", "queued"}, results
    assert max(seen) <= 2
    while sweep().driven:
        pass
    assert Run.objects.filter(status="completed").count() == many
    assert max(seen) <= 2


def test_the_highest_version_decides_for_all_and_others_do_not_count() -> None:
    old, other = shop_agent("few", version="1", max_concurrent=5), shop_agent("other")
    runs = [queued(old, f"s{number}") for number in range(3)]
    mine = queued(other, "other")
    shop_agent("few", version="2", max_concurrent=1)
    assert claim("default", mine.pk, "other")
    assert order() == ["s0"], "the batch has no more than can be claimed"
    assert claim("default", runs[0].pk, "few")
    assert claim("default", runs[1].pk, "few") is None
    assert order() == []


def test_a_claim_without_a_limit_and_a_sweep_cost_no_query_more() -> None:
    agent = shop_agent("plain")
    first, run, other = (queued(agent, session) for session in ("s1", "s2", "s3"))
    assert claim("default", first.pk), "which also reads what this process then remembers"
    with CaptureQueriesContext(connection) as queries:
        assert claim("default", run.pk, "plain")
    plain = len(queries)
    with CaptureQueriesContext(connection) as queries:
        assert claim("default", other.pk)
    assert len(queries) == plain
    assert not Control.objects.filter(name__startswith="slots:").exists()


# Rates


def test_a_used_up_rate_gives_the_run_back_without_an_attempt(settings: Any) -> None:
    settings.AGENTRUNS_RATE = {"ScriptedModel": "10/h"}  # one at once, one in six minutes
    agent = shop_agent("rated", {"tools": [call("lookup", number="A1")]})
    run = queued(agent, "s1")
    swept = sweep()
    run.refresh_from_db()
    assert (swept.driven, swept.queued, run.status, run.attempts, run.step) == (1, 1, "queued", 0, 1)
    assert run.blocked_reason == TURN + "ScriptedModel is limited to 10/h."
    left = run.not_before - Run.objects.values_list(Now(), flat=True).first()  # type: ignore[operator]
    assert 300 < left.total_seconds() <= 360
    assert sound(run).lease_expires_at is None
    second = queued(agent, "s2")
    assert candidates() == [], "they would only be given back"
    assert sweep().driven == 0
    assert turns.reasons("default", [second]) == {second.pk: TURN + "ScriptedModel is limited to 10/h."}
    assert "10/h" in command("list_runs").out
    assert agent.run("do it", "s3").error == TURN + "ScriptedModel is limited to 10/h."
    assert cancel_run(run.pk).status == "cancelled", "at once"
    settings.AGENTRUNS_RATE = {}
    Run.objects.update(not_before=None)
    assert sweep().completed == 2
    assert sound(second).step == 2


def test_a_fallback_is_limited_too(settings: Any) -> None:
    def overloaded(request: object) -> None:
        raise ProviderError("busy", disposition="retry", type="overloaded_error", status=529)

    from agentruns.testing import ScriptedModel

    class Other(ScriptedModel):
        provider = "other"
        identity = "other-model"

    settings.AGENTRUNS_RATE = {"other": "1/h"}
    agent = Agent(
        "two",
        instructions="x",
        model=ScriptedModel([overloaded, overloaded]),
        fallback=Other([{"text": "done"}, {"text": "done"}]),
    )
    assert agent.run("do it", "s1").status == "completed"
    result = agent.run("do it", "s2")
    assert (result.status, result.error) == ("queued", TURN + "other is limited to 1/h.")


def test_of_eight_that_spend_at_once_no_more_than_the_rate_succeed(settings: Any) -> None:
    settings.AGENTRUNS_RATE = {"ScriptedModel": "40/s"}
    model, began = shop_agent("rated").model, database_now("default")

    def spend_all() -> list[datetime]:
        spent = []
        for _ in range(30):
            seconds, why = spend("default", model)
            assert bool(why) == bool(seconds)
            if not why:
                spent.append(database_now("default"))
        return spent

    made = at_once(*[spend_all] * 8)
    assert not [each for each in made if isinstance(each, Exception)], made
    times = sorted(each for spent in made for each in spent)
    for number, at in enumerate(times, 1):
        assert number <= 4 + (at - began + timedelta(milliseconds=2)).total_seconds() * 40
    assert len(times) >= 4


@pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite compares times as text")
def test_the_first_request_at_a_whole_second_counts(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.AGENTRUNS_RATE = {"claude-sonnet-5-5": "1/h"}
    whole = "'2026-11-27 10:00:00.000'"
    monkeypatch.setattr(Now, "as_sqlite", lambda *given, **context: (whole, []))
    assert spend("default", "claude-sonnet-5-5") == (0, "")


def test_a_models_own_rate_goes_before_its_providers(settings: Any) -> None:
    settings.AGENTRUNS_RATE = {"anthropic": "20/h", "claude-sonnet-5-5": "1/h"}
    assert spend("default", "claude-sonnet-5-5") == (0, "")
    seconds, why = spend("default", "claude-sonnet-5-5")
    assert (why, 3500 < seconds <= 3600) == ("claude-sonnet-5-5 is limited to 1/h.", True)
    assert [spend("default", "claude-haiku-5") for _ in range(2)] == [(0, "")] * 2, "two at once"
    assert spend("default", "claude-haiku-5")[1] == "anthropic is limited to 20/h."
    assert spend("default", "openai:gpt-5.4") == (0, "")
    assert Control.objects.filter(name__startswith="rate:").count() == 2


def test_a_stateless_run_neither_counts_nor_waits(settings: Any) -> None:
    settings.AGENTRUNS_RATE = {"ScriptedModel": "1/d"}
    agent = shop_agent("rated", {"text": "one"})
    with CaptureQueriesContext(connection) as queries:
        assert [agent.run("do it").status for _ in range(3)] == ["completed"] * 3
    assert len(queries) == 0
    assert not Control.objects.filter(name__startswith="rate:").exists()


@pytest.mark.django_db(transaction=False)
def test_inside_a_test_case_rates_and_limits_count_in_its_transaction(settings: Any) -> None:
    settings.AGENTRUNS_RATE = {"ScriptedModel": "1/d"}
    agent = shop_agent("rated", max_concurrent=1)
    assert agent.run("do it", "s1").status == "completed"
    assert agent.run("do it", "s2").error == TURN + "ScriptedModel is limited to 1/d."


def test_a_request_takes_no_query_more_without_rates(settings: Any) -> None:
    assert conf.RATE == {}
    agent = shop_agent("plain")
    with CaptureQueriesContext(connection) as queries:
        assert spend("default", agent.model) == (0, "")
        assert room_of("default") == {}
    assert len(queries) == 0


def test_a_waiting_run_is_told_its_number(settings: Any) -> None:
    agent = shop_agent("chat")
    runs = [queued(agent, f"s{number}") for number in range(3)]
    assert turns.reasons("default", runs) == {
        runs[1].pk: TURN + "1 before it.",
        runs[2].pk: TURN + "2 before it.",
    }
    assert "2 before it" in command("list_runs").out
    assert '"Waits for its turn: 2 before it."' in command("list_runs", "--json").out
    with CaptureQueriesContext(connection) as queries:
        turns.reasons("default", runs)
    assert len(queries) == 1
    assert in_turn(Run.objects.runnable(), 2) == [runs[0].pk, runs[1].pk]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"anthropic": "50/m", "ScriptedModel": "1/s", "local": "2/h"}, ""),
        ({"antropic": "50/m"}, "no agent has a model or provider 'antropic'"),
        ({"anthropic": "50"}, "'50' is not a number of requests and a time, as in '100/m'"),
        ({"anthropic": "0/m"}, "'0/m' is not a number"),
        ({"anthropic": 50}, "50 is not a number"),
        (["anthropic"], "is not a dict"),
    ],
)
def test_the_setting_is_checked(given: Any, why: str, settings: Any) -> None:
    settings.AGENTRUNS_RATE = given
    settings.AGENTRUNS_MODELS = {"local": {"provider": "ollama", "model": "llama3.3"}}
    shop_agent("plain")
    found = [each for each in check_values(None) if "AGENTRUNS_RATE" in each.msg]
    assert [each.id for each in found] == (["agentruns.E026"] if why else [])
    assert all(why in each.msg and "'50/m'" in str(each.hint) for each in found)
