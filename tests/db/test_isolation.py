"""A project on PostgreSQL may set a stricter isolation_level: a refused transaction is only tried again."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction

from agentruns import ModelRequest, ToolContext, approve, cancel_run, pause_run, resume_run, run_agent, tool
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from tests.crash.processes import expire_lease, run_and_die
from tests.db import races
from tests.db.dying import elsewhere
from tests.db.helpers import outcomes, run_turns, the_run
from tests.effects import Effects
from tests.shop.agents import TOOLS, call, shop_agent
from tests.shop.models import Order
from tests.waiting import LIMIT, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

LEVELS = {"repeatable read": 3, "serializable": 4}  # as psycopg.IsolationLevel numbers them


def level() -> str:
    with transaction.atomic(), connection.cursor() as cursor:  # outside of a block Django leaves it as it is
        cursor.execute("SHOW transaction_isolation")
        return str(cursor.fetchone()[0])


@pytest.fixture(params=LEVELS)
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let every connection of this process, those of threads too, have a level of the project's choice."""
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one isolation level")
    options = {**connection.settings_dict["OPTIONS"], "isolation_level": LEVELS[request.param]}
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", options)
    connection.close()
    assert level() == request.param
    yield request.param
    connection.close()


@tool
def look(ctx: ToolContext) -> str:
    """Look at the level a tool runs at."""
    return level()


@tool(transactional=True)
def slow_note(ctx: ToolContext, note: str) -> str:
    """Write a note, slowly enough for some heartbeats."""
    Order.objects.filter(number="A1").update(note=note)
    wait_for_heartbeats(3)
    return level()


def wait_for_heartbeats(times: int) -> None:
    """Wait until the lease of the only run was extended so many times."""
    ends: set[Any] = set()

    def are_enough() -> bool:
        ends.add(elsewhere(lambda: Run.objects.get().lease_expires_at))
        return len(ends) > times

    wait_for(are_enough, "heartbeats")


def an_order() -> None:
    Order.objects.create(number="A1", customer="Ada", total_cents=1)


def test_a_whole_run(isolation: str, effects: Effects) -> None:
    an_order()
    turns = [
        {"tools": [call("look"), call("post", text="x"), call("annotate", number="A1", note="seen")]},
        {"tools": [call("search", query=str(number)) for number in range(4)]},
        {"tools": [call("refund", cents=5000), call("charge", cents=5), call("broken")]},
    ]
    result = run_turns(*turns, tools=[*TOOLS, look])
    assert result.status == "awaiting-approval"
    pause_run(result.run_id or "")
    assert resume_run(result.run_id or "").status == "awaiting-approval"
    approve(result.pending[0].pk, None)
    assert sweep().completed == 1
    run = the_run(result)
    assert outcomes(run) == ["ok"] * 9 + ["error"]
    assert run.messages.filter(kind="tool_result").earliest("seq").payload["content"] == isolation
    assert (effects.count(), Order.objects.get().note) == (8, "seen")
    check_messages(conversation(run))


def conversation(run: Run) -> list[dict[str, Any]]:
    """Return what the session's next run sends to its model."""
    sent: list[list[dict[str, Any]]] = []

    def answer(request: ModelRequest) -> dict[str, str]:
        sent.append(request.messages)
        return {"text": "thanks"}

    run_agent(shop_agent("next", answer), "and now?", run.session.key, idempotency_key="next")
    return sent[0]


def test_heartbeats_do_not_undo_a_transactional_tool(isolation: str, settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05
    an_order()
    turn = {"tools": [call("slow_note", note="seen")]}
    run = the_run(run_turns(turn, tools=[slow_note]))
    assert (run.status, outcomes(run), Order.objects.get().note) == ("completed", ["ok"], "seen")
    assert Message.objects.get(kind="tool_result").payload["content"] == "read committed"
    assert Message.objects.filter(kind="tool_started").count() == 1


@pytest.mark.parametrize(("click", "ends"), [(cancel_run, "cancelled"), (pause_run, "paused")])
def test_a_click_from_elsewhere_while_the_heartbeat_beats(
    click: Callable[[Any], Run], ends: str, isolation: str, effects: Effects, settings: Any
) -> None:
    """The worker's appends, its heartbeat and the click all change the same row."""
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.25  # so that a beat spoils some tries of the click, and not all
    errors: list[BaseException] = []

    def click_once(run_id: Any) -> None:
        try:
            click(run_id)
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    @tool
    def clicked(ctx: ToolContext) -> str:
        """Work on while somebody clicks."""
        person = threading.Thread(target=click_once, args=[ctx.run_id])
        person.start()
        wait_for_heartbeats(2)
        person.join(LIMIT)
        effects.record("clicked")
        return "done"

    turn = {"tools": [call("clicked"), call("post", text="not any more")]}
    result = run_turns(turn, tools=[*TOOLS, clicked])
    run = the_run(result)
    assert (errors, run.status, run.attempts) == ([], ends, 0)
    assert effects.count() == 1
    if ends == "paused":
        assert resume_run(run.pk).status == "completed"
        assert effects.count() == 2
    assert outcomes(the_run(result)) == ["ok", "cancelled" if ends == "cancelled" else "ok"]


@pytest.mark.parametrize("isolation", ["serializable"], indirect=True)
@pytest.mark.parametrize(
    "race",
    [
        races.one_of_many_deciders_wins,
        races.many_starts_with_one_key_are_one_run,
        races.many_sweeps_at_once_act_once,
    ],
    ids=lambda race: race.__name__,
)
def test_races_end_as_at_the_default_level(
    race: Callable[..., None], isolation: str, effects: Effects
) -> None:
    race(*[effects] * len(inspect.signature(race).parameters))


@pytest.mark.parametrize("isolation", ["serializable"], indirect=True)
@pytest.mark.parametrize(
    ("tool_name", "at"),
    [("charge", "charge:after"), ("annotate", "annotate:after")],
)
def test_a_killed_process_of_such_a_project_is_taken_over(
    tool_name: str, at: str, isolation: str, effects: Effects
) -> None:
    an_order()
    run_and_die("run", f"calls-{tool_name}", "s1", SHOP_KILL=at)
    run = Run.objects.get()
    expire_lease(run)
    assert sweep().completed == 1
    assert effects.count() == {"charge": 1, "annotate": 0}[tool_name]
    assert problems(run.session_id) == []
