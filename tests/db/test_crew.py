"""One worker, many runs at once: threads, borrowed connections, one keeper of all leases."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection, connections, transaction
from django.db.backends.signals import connection_created

from agentruns import Agent, ModelReply, ModelRequest, Occurred, ToolContext, cancel_run, start_run, tool
from agentruns.engine import drafts, leases
from agentruns.engine.leases import Lease, claim, extend_all, keeper
from agentruns.journal import connection as own
from agentruns.journal.connection import own_alias, own_connection, rest
from agentruns.journal.verify import problems
from agentruns.management.commands import resume_runs
from agentruns.models import Run
from agentruns.services import sweep as sweeps
from agentruns.services.sweep import Crew, crew_of, sweep
from tests.db.dying import elsewhere
from tests.db.helpers import kill, outcomes, payloads
from tests.effects import Effects
from tests.shop.agents import act, shop_agent
from tests.shop.models import Order
from tests.waiting import LIMIT, Hanging, wait_for

pytestmark = pytest.mark.django_db(transaction=True)


class Meeting:
    """A model whose first replies come only when `size` runs have asked for one."""

    def __init__(self, size: int, *turns: dict[str, Any]) -> None:
        self.turns, self.lent = turns, list[int]()
        self.barrier = threading.Barrier(size, lambda: self.lent.append(own._pools["default"]._lent))

    def propose(self, request: ModelRequest) -> ModelReply:
        if request.step == 0:
            self.barrier.wait(LIMIT)
        if request.step < len(self.turns):
            content = [{"type": "tool_use", **each} for each in self.turns[request.step]["tools"]]
            return ModelReply(content, "tool_use", model="meeting")
        return ModelReply([{"type": "text", "text": "Done."}], "end_turn", model="meeting")


def never() -> bool:
    return False


@contextmanager
def crew_at_work(size: int, should_stop: Callable[[], bool] = never) -> Iterator[Crew]:
    """A crew; wait for its threads at the end."""
    crew = crew_of(size, should_stop)
    assert crew is not None
    try:
        yield crew
    finally:
        wait_for(lambda: not crew._threads, "the crew")


def started(agent: Agent, count: int) -> list[Run]:
    return [start_run(agent, "do it", f"{agent.name}-{number}") for number in range(count)]


def posted(name: str, ctx: ToolContext) -> str:
    return act(name, ctx)


@tool
def send(ctx: ToolContext) -> str:
    return posted("send", ctx)


SEND = {"tools": [{"id": "c1", "name": "send", "input": {}}]}


def test_runs_wait_for_their_models_at_the_same_time_and_hold_no_connection(effects: Effects) -> None:
    model = Meeting(20, SEND)
    runs = started(Agent("crowd", instructions="", tools=[send], model=model), 20)
    with crew_at_work(20) as crew:
        sweep(crew=crew)
    assert model.lent == [0], "the journal's connections are lent for statements only"
    assert crew.take().completed == 20
    assert Counter(line["key"] for line in effects.lines()).most_common(1)[0][1] == 1
    assert effects.count() == 20
    assert all(problems(run.session_id) == [] for run in runs)
    assert set(Run.objects.values_list("status", "attempts")) == {("completed", 0)}


def test_no_more_connections_are_lent_than_the_setting_says(settings: Any, effects: Effects) -> None:
    settings.AGENTRUNS_CONNECTIONS = 2
    pool, most = own._pools["default"], [0]
    take = pool.take

    def watched(alias: str) -> Any:
        connection = take(alias)
        most.append(pool._lent)
        return connection

    pool.take = watched  # type: ignore[method-assign]
    try:
        started(Agent("few", instructions="", tools=[send], model=Meeting(8, SEND)), 8)
        with crew_at_work(8) as crew:
            crew.fill()
    finally:
        del pool.take
    assert (max(most), effects.count(), crew.take().completed) == (2, 8, 8)


def test_who_waits_too_long_for_a_connection_opens_one_more(settings: Any, monkeypatch: Any) -> None:
    """A thread that has one may wait for a thread that needs one."""
    settings.AGENTRUNS_CONNECTIONS = 1
    monkeypatch.setattr(own, "PATIENCE", 0.1)
    seen: list[str] = []

    def other() -> None:
        with own_connection("default"):
            seen.append(own_alias("default"))
            connections[own_alias("default")].ensure_connection()
        connections.close_all()

    with own_connection("default"):
        own_alias("default")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(LIMIT)
    assert seen == ["default of the journal"]
    assert own._pools["default"]._lent == 0


def test_a_connection_in_a_transaction_is_not_given_back(settings: Any) -> None:
    settings.AGENTRUNS_CONNECTIONS = 1
    with own_connection("default"):
        name = own_alias("default")
        with transaction.atomic(using=name):
            rest("default")
            assert connections[name].in_atomic_block
        rest("default")
        assert own._opened.__dict__["default"].connection is None
        assert own_alias("default") == name


def test_who_drives_alone_keeps_the_connection_and_another_gets_one_beside(settings: Any) -> None:
    settings.AGENTRUNS_CONNECTIONS = 2

    def keeps_after_rest() -> bool:
        with own_connection("default"):
            rest("default")
            return own._opened.__dict__["default"].connection is not None

    with own_connection("default"):
        rest("default")
        assert own._opened.__dict__["default"].connection is not None
        assert not elsewhere(keeps_after_rest)
    assert keeps_after_rest()


def test_a_connection_that_broke_is_replaced_before_the_next_thread_has_it(settings: Any) -> None:
    settings.AGENTRUNS_CONNECTIONS = 1
    with own_connection("default"):
        wrapper = connections[own_alias("default")]
        wrapper.ensure_connection()
        wrapper.connection.close()
        with pytest.raises(Exception, match="closed"), wrapper.cursor() as cursor:
            cursor.execute("SELECT 1")
        rest("default")
        with connections[own_alias("default")].cursor() as cursor:
            cursor.execute("SELECT 1")
            assert cursor.fetchone() == (1,)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_takes_no_connection_of_its_parent() -> None:
    with own_connection("default"):
        connections[own_alias("default")].ensure_connection()
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(
                writing, b"none" if not own._pools["default"]._idle and keeper._thread is None else b"some"
            )
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 4) == b"none"


def claimed(run: Run) -> Lease:
    lease = claim("default", run.pk)
    assert lease is not None
    return lease


@contextmanager
def keeping(leases: list[Lease]) -> Iterator[None]:
    """Let the keeper keep all of them."""
    if not leases:
        yield
        return
    with keeper.keeping(leases[0]), keeping(leases[1:]):
        yield


def test_one_update_extends_every_lease_and_cancels_are_heard(settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05
    leases = [claimed(run) for run in started(shop_agent("kept"), 5)]
    updates: list[tuple[str, bool]] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        if threading.current_thread().name == "agentruns-keeper" and "UPDATE" in sql:
            updates.append((sql, rest[-1]["connection"].in_atomic_block))
        return execute(sql, *rest)

    def watch(connection: Any, **kwargs: Any) -> None:
        connection.execute_wrappers.append(note)

    before = {lease.run_id: lease.deadline for lease in leases}
    connection_created.connect(watch)
    try:
        with keeping(leases):
            cancel_run(leases[3].run_id)
            wait_for(leases[3].cancelled.is_set, "the cancel to be heard")
    finally:
        connection_created.disconnect(watch)
    assert all(lease.deadline > before[lease.run_id] for lease in leases)
    assert [lease.cancelled.is_set() for lease in leases] == [False, False, False, True, False]
    assert updates and all(sql.count('"lease_owner" = ') == len(leases) for sql, _ in updates)
    is_open = connection.vendor != "postgresql"
    assert {inside for _, inside in updates} == {is_open}, "who dies between two statements would leave locks"


def test_a_lease_that_others_took_is_found_lost_and_the_rest_goes_on(settings: Any, caplog: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05
    runs = started(shop_agent("taken"), 3)
    first, old, last = [claimed(run) for run in runs]
    kill(runs[1])
    new = claimed(runs[1])
    held = (first, last, new)
    with caplog.at_level("WARNING", "agentruns.leases"), keeping([first, old, last, new]):
        wait_for(old.lost.is_set, "the loss")
        before = min(lease.deadline for lease in held)
        wait_for(lambda: min(lease.deadline for lease in held) > before, "the others to be extended")
    assert not any(lease.lost.is_set() for lease in held)
    assert caplog.text.count("Lease lost") == 1


@pytest.mark.skipif(connection.vendor != "postgresql", reason="SQLite has one writer")
def test_a_locked_run_does_not_end_the_leases_of_others(settings: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05
    runs = started(shop_agent("locked"), 2)
    leases = [claimed(run) for run in runs]
    with transaction.atomic():
        Run.objects.select_for_update().get(pk=runs[0].pk)
        gate = threading.Event()

        def keep() -> None:
            with keeping(leases):
                gate.wait(LIMIT)
            connections.close_all()

        thread = threading.Thread(target=keep)
        thread.start()
        first, second = leases
        before = second.deadline
        wait_for(lambda: second.deadline > before, "the lease of the run that nobody locks")
        assert not first.lost.is_set()
    locked = first.deadline
    wait_for(lambda: first.deadline > locked, "the other lease, after the lock")
    gate.set()
    thread.join(LIMIT)


def neighbours(effects: Effects, bad: Any) -> Run:
    """Drive three ordinary runs beside one whose tool is `bad`; return the run of that tool."""
    model = Meeting(4, SEND)
    quiet = started(Agent("quiet", instructions="", tools=[send], model=model), 3)
    turn = {"tools": [{"id": "c1", "name": bad.name, "input": {}}]}
    model.turns = (SEND,)
    nasty = Meeting(1, turn)
    nasty.barrier = model.barrier
    [run] = started(Agent("nasty", instructions="", tools=[bad], model=nasty), 1)
    with crew_at_work(4) as crew:
        crew.fill()
        wait_for(lambda: Run.objects.filter(agent="quiet", status="completed").count() == 3, "the neighbours")
    assert all(problems(each.session_id) == [] for each in (*quiet, run))
    assert [line["tool"] for line in effects.lines()].count("send") == 3
    run.refresh_from_db()
    return run


@tool(safe_to_retry=True)
def exits(ctx: ToolContext) -> str:
    sys.exit(3)


@tool(safe_to_retry=True)
def exhausts(ctx: ToolContext) -> str:
    raise MemoryError("no more")


@tool(safe_to_retry=True)
def leaks(ctx: ToolContext) -> str:
    transaction.atomic().__enter__()
    Order.objects.create(number="leaked", customer="Eve", total_cents=1)
    return "leaked"


@tool(safe_to_retry=True)
def closes(ctx: ToolContext) -> str:
    connections.close_all()
    return "closed"


@tool(safe_to_retry=True)
def sets(ctx: ToolContext) -> str:
    with connection.cursor() as cursor:
        is_postgresql = connection.vendor == "postgresql"
        cursor.execute("SET statement_timeout = 1" if is_postgresql else "PRAGMA query_only = 1")
    return "set"


@tool(safe_to_retry=True)
def spawns(ctx: ToolContext) -> str:
    def work() -> None:
        Order.objects.count()
        connections.close_all()

    for _ in range(5):
        threading.Thread(target=work).start()
    return "spawned"


@pytest.mark.parametrize("bad", [exits, exhausts, leaks, closes, sets, spawns], ids=lambda bad: bad.name)
def test_no_other_conversation_notices_a_tool(bad: Any, effects: Effects) -> None:
    neighbours(effects, bad)
    assert not Order.objects.filter(number="leaked").exists()


@tool(safe_to_retry=True)
def reads(ctx: ToolContext) -> str:
    with connection.cursor() as cursor:
        is_postgresql = connection.vendor == "postgresql"
        cursor.execute("SHOW statement_timeout" if is_postgresql else "PRAGMA query_only")
        return str(cursor.fetchone()[0])


def test_what_a_tool_sets_on_its_connection_does_not_reach_the_next_call(effects: Effects) -> None:
    """Beside a run that waits for its model all the time: alone, a thread keeps its connection."""
    names = {"first": "reads", "second": "sets", "third": "reads"}
    turn = {"tools": [{"id": id, "name": name, "input": {}} for id, name in names.items()]}
    beside = Meeting(2, SEND)
    [other] = started(Agent("beside", instructions="", tools=[send], model=beside), 1)
    with crew_at_work(2) as crew:
        crew.fill()
        wait_for(lambda: beside.barrier.n_waiting == 1, "the run beside it")
        [run] = started(Agent("setting", instructions="", tools=[reads, sets], model=Meeting(1, turn)), 1)
        crew.fill()
        wait_for(lambda: Run.objects.filter(pk=run.pk, status="completed").exists(), "the run")
        beside.barrier.wait(LIMIT)
    first, _, last = [each["content"] for each in payloads(run, "tool_result")]
    assert first == last
    assert Run.objects.get(pk=other.pk).status == "completed"


def test_no_other_conversation_waits_for_a_tool_that_hangs(effects: Effects) -> None:
    hanging = Hanging()

    @tool(safe_to_retry=True)
    def hangs(ctx: ToolContext) -> str:
        hanging.hang()
        return "at last"

    quiet = started(Agent("quiet", instructions="", tools=[send], model=Meeting(3, SEND)), 3)
    turn = {"tools": [{"id": "c1", "name": "hangs", "input": {}}]}
    [run] = started(Agent("hung", instructions="", tools=[hangs], model=Meeting(1, turn)), 1)
    with crew_at_work(4) as crew:
        crew.fill()
        wait_for(lambda: Run.objects.filter(agent="quiet", status="completed").count() == 3, "the others")
        assert (bool(crew._threads), hanging.was_waited_for) == (True, False)
        hanging.let_go()
    run.refresh_from_db()
    assert (run.status, outcomes(run), len(quiet)) == ("completed", ["ok"], 3)


def test_a_stop_lets_each_drive_end_at_its_next_boundary(effects: Effects) -> None:
    model, stopped = Meeting(6, SEND), threading.Event()
    propose = model.propose

    def stopping(request: ModelRequest) -> ModelReply:
        reply = propose(request)
        stopped.set()
        return reply

    model.propose = stopping  # type: ignore[method-assign]
    started(Agent("stopped", instructions="", tools=[send], model=model), 6)
    with crew_at_work(6, stopped.is_set) as crew:
        crew.fill()
    assert crew.take().driven == 6
    assert set(Run.objects.values_list("status", "lease_owner", "attempts")) == {("queued", "", 0)}
    with crew_at_work(6) as crew:
        crew.fill()
    assert (crew.take().completed, effects.count()) == (6, 6)


def test_at_most_as_many_runs_as_the_limit_says_and_as_there_are_threads(effects: Effects) -> None:
    started(Agent("many", instructions="", tools=[send], model=Meeting(1, SEND)), 7)
    with crew_at_work(2) as crew:
        crew.fill(limit=3)
        assert len(crew._threads) <= 2
    with crew_at_work(2):
        crew.fill(more=True)  # as after a ring
    assert (crew.take().completed, Run.objects.filter(status="queued").count()) == (3, 4)


def test_one_run_at_a_time_needs_no_thread() -> None:
    assert crew_of(1, never) is None


def test_threads_that_would_not_see_the_database_are_not_used(django_db_blocker: Any) -> None:
    with transaction.atomic():
        assert crew_of(16, never) is None


def test_a_thread_leaves_no_connection_behind(effects: Effects) -> None:
    @tool(safe_to_retry=True)
    def counts(ctx: ToolContext) -> str:
        Order.objects.count()
        return "counted"

    turn = {"tools": [{"id": "c1", "name": "counts", "input": {}}]}
    made: list[Any] = []

    def note(connection: Any, **kwargs: Any) -> None:
        if threading.current_thread().name == "agentruns-drive":
            made.append(connection)

    connection_created.connect(note)
    try:
        started(Agent("tidy", instructions="", tools=[counts], model=Meeting(4, turn)), 4)
        with crew_at_work(4) as crew:
            crew.fill()
    finally:
        connection_created.disconnect(note)
    assert {each.alias for each in made} == {"default", "default of the journal"}
    assert all(each.connection is None for each in made)


def test_the_end_of_a_drive_does_not_wait_for_a_keeper_that_keeps_another_lease(
    settings: Any, monkeypatch: Any
) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.05
    first, second = [claimed(run) for run in started(shop_agent("followed"), 2)]
    is_beating, go_on = threading.Event(), threading.Event()

    def slow(alias: str, mine: Any) -> Any:
        is_beating.set()
        go_on.wait(LIMIT)
        return extend_all(alias, mine)

    def keep() -> None:
        with keeper.keeping(first):
            is_beating.wait(LIMIT)
        connections.close_all()

    monkeypatch.setattr(leases, "extend_all", slow)
    monkeypatch.setattr(leases, "PATIENCE", LIMIT)
    thread = threading.Thread(target=keep)
    thread.start()
    wait_for(lambda: is_beating.is_set() and not keeper._leases, "the end of the first drive")
    with keeper.keeping(second):
        go_on.set()
        thread.join(LIMIT / 4)
        assert not thread.is_alive()


def test_the_threads_of_a_busy_process_do_not_grow_with_time(settings: Any, monkeypatch: Any) -> None:
    settings.AGENTRUNS_HEARTBEAT_SECONDS = 0.01
    [lease] = [claimed(run) for run in started(shop_agent("long"), 1)]
    extend, sizes = keeper._extend, list[int]()

    def watched(alias: str, state: Any, leases: list[Lease], own: Any) -> None:
        extend(alias, state, leases, own)
        sizes.append(len(own._exit_callbacks))

    monkeypatch.setattr(keeper, "_extend", watched)
    with keeper.keeping(lease):
        wait_for(lambda: len(sizes) > 3, "some beats")
    stack = ExitStack()

    def look() -> None:
        for _ in range(4):
            drafts._serve("default", [], True, stack)
        sizes.append(len(stack._exit_callbacks) + 1)
        stack.close()
        connections.close_all()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(LIMIT)
    assert set(sizes) == {2}


def test_a_run_inside_a_tool_leaves_the_tool_its_connection(effects: Effects) -> None:
    """With what is on it: an advisory lock, a cursor, a temporary table."""
    inner, kept = Agent("inner", instructions="", tools=[], model=Meeting(1)), list[bool]()

    @tool(safe_to_retry=True)
    def delegates(ctx: ToolContext) -> str:
        connection.ensure_connection()
        raw = connection.connection
        inner.run("do it", session=f"inner-{ctx.run_id}")
        kept.append(connection.connection is raw)
        return "done"

    turn = {"tools": [{"id": "c1", "name": "delegates", "input": {}}]}
    started(Agent("outer", instructions="", tools=[delegates], model=Meeting(3, turn)), 3)
    with crew_at_work(3) as crew:
        crew.fill()
    assert kept == [True, True, True]


def test_a_run_that_cannot_be_claimed_is_not_tried_again_and_again(monkeypatch: Any) -> None:
    started(Agent("refused", instructions="", tools=[send], model=Meeting(1, SEND)), 3)
    tried: list[Run] = []

    def refused(run: Run, alias: str, **options: Any) -> bool:
        tried.append(run)
        time.sleep(2 * sweeps.MOMENT)  # waits: as the claim of a locked run on a busy server
        return False

    monkeypatch.setattr(sweeps, "advance", refused)
    crew = crew_of(2, lambda: len(tried) > 9)
    assert crew is not None
    for times in (1, 2):
        crew.fill()
        wait_for(lambda: not crew._threads, "the threads to end")
        assert len(tried) == 3 * times


def test_a_thread_that_cannot_start_costs_neither_a_place_nor_a_run(
    effects: Effects, monkeypatch: Any
) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    started(Agent("threadless", instructions="", tools=[send], model=Meeting(1, SEND)), 1)
    with crew_at_work(2) as crew:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            with pytest.raises(RuntimeError):
                crew.fill()
        assert not crew._threads
        crew.fill()
    assert crew.take().completed == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("is_lent", [True, False], ids=["lent", "idle"])
def test_a_process_forked_inside_a_tool_takes_no_connection_of_its_parent(is_lent: bool) -> None:
    with own_connection("default"):
        connections[own_alias("default")].ensure_connection()
        if not is_lent:
            rest("default")
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            with own_connection("default"):
                is_new = connections[own_alias("default")].connection is None
            os.write(writing, b"new" if is_new else b"old")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reading, 4) == b"new"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_close_the_connections_of_its_parent() -> None:
    connection = own.separate_connection("default")
    assert connection is not None
    connection.inc_thread_sharing()
    connection.ensure_connection()
    pool = own._pools["default"]
    pool._idle.append(connection)
    if (pid := os.fork()) == 0:
        pool.close()  # as a thread's `connections.close_all()` does
        os._exit(connection.connection is None)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        pool.close()


def test_an_error_of_the_watching_thread_ends_no_drive_inside_a_call(
    effects: Effects, monkeypatch: Any
) -> None:
    crews, is_broken, model = list[Crew](), threading.Event(), Meeting(1, SEND)
    propose = model.propose

    def waiting(request: ModelRequest) -> ModelReply:
        assert is_broken.wait(LIMIT)
        return propose(request)

    def broken(command: Any, swept: Any, run_id: Any) -> None:  # as the pipe of its output
        if crews[0]._threads and not is_broken.is_set():
            is_broken.set()
            raise ValueError("no output")

    def noted(*args: Any) -> Any:
        crews.append(crew_of(*args))
        return crews[-1]

    model.propose = waiting  # type: ignore[method-assign]
    monkeypatch.setattr(resume_runs, "crew_of", noted)
    monkeypatch.setattr(resume_runs.Command, "_report_news", broken)
    started(Agent("mid", instructions="", tools=[send], model=model), 2)
    with pytest.raises(ValueError, match="no output"):
        call_command("resume_runs", "--watch")
    assert not crews[0]._threads
    assert set(Run.objects.values_list("lease_owner", "attempts")) == {("", 0)}


def test_a_reconcile_holds_no_connection_of_the_journal(effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_CONNECTIONS = 1
    lent: list[int] = []

    def look(ctx: ToolContext, arguments: dict[str, Any]) -> Occurred:
        lent.append(own._pools["default"]._lent)
        return Occurred("sent")

    @tool(reconcile=look)
    def breaks(ctx: ToolContext) -> str:
        raise ValueError("no answer")

    turn = {"tools": [{"id": "c1", "name": "breaks", "input": {}}]}
    started(Agent("asked", instructions="", tools=[breaks], model=Meeting(1, turn)), 1)
    with crew_at_work(2) as crew:
        crew.fill()
    assert lent == [0]
