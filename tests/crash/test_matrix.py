"""Every cell of the crash matrix, with real processes; judged by the ledger outside the database."""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import pytest
from django.db import connection

from agentruns import RunResult, deliver_event, resume_run, run_agent, send_message, start_run
from agentruns.journal.verify import problems
from agentruns.models import Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import check_messages
from agentruns.utils.failpoints import POINTS
from tests.crash.child import Orders, perform
from tests.crash.matrix import IMPOSSIBLE, INSIDE_TRANSACTION, SENDING, SERVED, WAITS, Cell, cells
from tests.crash.processes import LEASE, Forked, expire_lease, freeze as stop, is_any_backend
from tests.crash.proxy import PORT, Proxy
from tests.db.helpers import forget_backoff
from tests.effects import VARIABLE, Effects
from tests.settings import BRIEF as BRIEFLY, DATABASE
from tests.shop.models import Order
from tests.waiting import LIMIT, wait_for

TABLE = cells(DATABASE)
POSSIBLE = [cell for cell in TABLE if not cell.impossible]
if BRIEFLY and DATABASE == "sqlite":  # the other faults are tried on PostgreSQL
    POSSIBLE = [cell for cell in POSSIBLE if cell.fault == "sigkill"]
BRIEF = LEASE / 4  # of a process that is to lose its lease: nobody competes for it before
LONG = 60
MESSAGE = "and this"
NAMED = SENDING | SERVED | WAITS  # rows by another name than the point's


class Stage:
    """Where one cell plays: the caller's call, and the children that work on its run."""

    def __init__(self, cell: Cell, proxy: Proxy | None, effects: Effects) -> None:
        self.cell, self.proxy, self.effects = cell, proxy, effects
        self.agent = "asks-first" if cell.point == "after_decision" else "every-kind"
        if cell.point in SERVED:
            self.agent = "first-a-server"
        if cell.point in WAITS:
            self.agent = "first-waits"
        self.call: tuple[str, ...] = ("run", self.agent, "s1")
        if cell.point in SENDING:
            self.call = ("send", "s1", MESSAGE, self.agent, MESSAGE)
        self.children: list[Forked] = []

    @property
    def started_by_worker(self) -> bool:
        """Whether the run can have no other origin than the process that met the fault."""
        return self.cell.point not in ("before_start_commit", "after_decision", *SENDING)

    def repeat(self) -> RunResult:
        """Make the caller's call here, as a supervisor does that does not know what became of it."""
        if self.cell.point in SENDING:
            return result_of(send_message("s1", MESSAGE, agent=self.agent, idempotency_key=MESSAGE).pk)
        return run_agent(self.agent, "do it", "s1", idempotency_key="s1")

    def child(self, *actions: tuple[str, ...], **options: Any) -> Forked:
        database = {"NAME": str(connection.settings_dict["NAME"])}
        if self.proxy is not None:
            database |= {"HOST": self.proxy.folder, "PORT": str(PORT)}
        environment = {VARIABLE: str(self.effects.path), "SHOP_SAYS": "later"}
        environment |= options.pop("environment", {})
        orders = Orders(list(actions), database=database, environment=environment, **options)
        self.children.append(Forked(perform, orders))
        return self.children[-1]

    def worker(self, lease: float, *, dies: bool = False) -> Forked:
        """Start the process that is to meet the fault, on a run that brings it to the point."""
        actions: list[tuple[str, ...]] = [self.call]
        if self.cell.point in ("after_finish", "send_after_commit", "waits_after_result"):
            actions = [self.call, self.call]  # else nothing would come after it
        elif self.cell.point == "after_decision":
            card = self.repeat().pending[0]
            actions = [("approve", str(card.pk)), ("advance", str(card.run_id))]
        elif self.cell.point == "after_repair":
            environment = {"SHOP_KILL": "charge:after", "SHOP_SAYS": "first"}
            first = self.child(self.call, lease=BRIEF, environment=environment)
            assert first.ended() == -signal.SIGKILL
            expire_lease(Run.objects.get())
            actions = [("sweep",)]
        if self.cell.point in SENDING:
            start_run(self.agent, "do it", "s1", idempotency_key="s1")
        # Frozen while its heartbeat writes, it would keep the one lock that SQLite has; and the next commit
        # after the point is to be the driver's, however long a slow machine takes to get there.
        beats = self.cell.fault == "sigkill" or (self.cell.fault == "second" and DATABASE != "sqlite")
        point, environment = NAMED.get(self.cell.point, self.cell.point), {"SHOP_SAYS": "first"}
        return self.child(*actions, lease=lease, beats=beats, point=point, dies=dies, environment=environment)


def sigkill(stage: Stage) -> str:
    assert stage.worker(BRIEF, dies=True).ended() == -signal.SIGKILL
    return "here"


def terminate(stage: Stage) -> str:
    worker = stage.worker(LONG)  # which tries again for as long as its lease
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [worker.hear()])
    worker.go()
    return finished(worker)


def lose_commit(stage: Stage) -> str:
    worker, proxy = stage.worker(LONG), stage.proxy
    worker.hear()
    if proxy is None:
        worker.go(stage.cell.fault)
        return finished(worker)
    proxy.lose_next_commit(stage.cell.fault)
    worker.go()
    assert proxy.cut.wait(LIMIT), "the COMMIT never came"
    if stage.cell.fault.startswith("open"):
        wait_for(lambda: somebody_waits() or worker.pipe.poll(), "the worker to try again, or to end")
        proxy.release.set()
    word = finished(worker)
    assert proxy.over.wait(LIMIT)
    return word


def freeze(stage: Stage) -> str:
    """Let another worker take the run as far as it gets; the first may then not write an engine row."""
    inside = stage.cell.point in INSIDE_TRANSACTION[connection.vendor]
    worker = stage.worker(LONG if stage.cell.expected == "here" else BRIEF)
    stop(worker, but=worker.hear())
    worker.go()
    run = Run.objects.first()
    if run is not None and run.lease_expires_at is not None:
        expire_lease(run)
    is_caller = run is None or stage.cell.point in SENDING
    other = stage.child(stage.call if is_caller else ("sweep",), lease=LONG)
    if inside:
        wait_for(somebody_waits, "the second worker to wait for the first one's transaction")
    else:
        finished(other)
    rows = Message.objects.count()
    worker.signal(signal.SIGCONT)
    word = finished(worker)
    if inside:
        finished(other)
    else:
        new = Message.objects.order_by("seq").values_list("kind", flat=True)[rows:]
        assert set(new) <= {"late_result"}, "who lost the run leaves evidence and nothing else"
    taken_at = run.lease_epoch if run is not None else 1
    by_other = Message.objects.filter(kind="run_completed", epoch__gt=taken_at).exists()
    return "sweep" if by_other else word


DIES_OR_LOSES = {"sigkill": sigkill, "second": freeze}
LOST = ("committed", "rolled_back", "open_committed", "open_rolled_back")
LIVES_ON = {"terminate": terminate, **dict.fromkeys(LOST, lose_commit)}


def finished(child: Forked) -> str:
    """Wait for a child's end; say how its caller saw it."""
    errors = child.hear()
    assert child.ended() == 0
    print(*errors, sep="\n")
    return "again" if errors else "here"


def somebody_waits() -> bool:
    """Whether a backend waits for a lock."""
    return is_any_backend("wait_event_type = 'Lock'")


def operate(stage: Stage, word: str) -> str:
    """Do what an operator can until the run is completed; say what it took."""
    run = Run.objects.first()
    if run is None:
        stage.repeat()
        return "again"
    if stage.cell.point in SENDING:
        word = word if sent() else "again"
        stage.repeat()
        sweep()
    if stage.cell.point in WAITS:
        start = run.messages.filter(kind="tool_started", tool_name="collect").get()
        assert deliver_event("payment", start.payload["key"], "paid") == ("delivered", run.pk)
    run.refresh_from_db()
    if run.status == "completed":
        return word
    if run.lease_expires_at is not None:
        expire_lease(run)
    forget_backoff(run)
    sweep()
    run.refresh_from_db()
    if run.status != "orphaned":
        return "sweep"
    resume_run(run.pk)
    return "doubt"


def sent() -> bool:
    """Whether the message is in the journal."""
    return any(MESSAGE in str(row.payload) for row in Message.objects.filter(kind="user"))


def judge(stage: Stage) -> None:
    """The journal is sound, only lease holders wrote to it, and nothing that is known was lost."""
    run, calls = Run.objects.get(), 5 if stage.agent == "asks-first" else 4
    assert (run.status, problems(run.session_id)) == ("completed", [])
    check_messages(result_of(run.pk).messages)
    told = [row.payload["content"][0]["text"] for row in run.messages.filter(kind="user").order_by("seq")]
    assert told == ["do it", *([MESSAGE] if stage.cell.point in SENDING else [])]
    if stage.started_by_worker:
        assert run.messages.get(kind="run_started").payload["instructions"] == "first"
    epochs = [row.epoch for row in run.messages.order_by("seq") if row.epoch]
    assert epochs == sorted(epochs)
    done = agreed_with_the_world(run, stage.effects)
    assert done.total() == calls
    if stage.cell.expected == "doubt":
        assert done["unknown"] == 1
        return
    assert done == {"ok": calls}
    effects = [line["key"] for line in stage.effects.lines()]
    assert len(set(effects)) == calls - 1, "the effect of tally is in the database"
    if stage.cell.fault in LIVES_ON:
        assert len(effects) == calls - 1
        first_worker_died = stage.cell.point == "after_repair"
        assert run.messages.filter(kind="orphan_found").count() == first_worker_died


def agreed_with_the_world(run: Run, effects: Effects) -> Counter[str]:
    """Compare every call's outcome with what really happened; return how often there is which."""
    starts = run.messages.filter(kind="tool_started")
    keys = {row.call_id: row.payload["key"] for row in starts}
    assert {line["key"] for line in effects.lines()} <= set(keys.values()), "journal before effect"
    outcomes, tallied = Counter[str](), 0
    for row in run.messages.filter(kind="tool_result"):
        outcome, times = row.payload["outcome"], effects.count(keys.get(row.call_id, "never started"))
        outcomes[outcome] += 1
        if row.tool_name == "tally":
            tallied += outcome == "ok"
        elif row.tool_name == "lookup" and outcome == "ok":
            assert times >= 1
        else:
            assert times in {"ok": [1], "unknown": [0, 1], "cancelled": [0]}[outcome], row.tool_name
    assert Order.objects.get().refunded_cents == tallied
    return outcomes


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("cell", POSSIBLE, ids=lambda cell: f"{cell.point}-{cell.fault}")
def test_cell(cell: Cell, proxy: Proxy | None, effects: Effects) -> None:
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    stage = Stage(cell, proxy, effects)
    try:
        word = operate(stage, (DIES_OR_LOSES | LIVES_ON)[cell.fault](stage))
        judge(stage)
        before = effects.lines()
        assert stage.repeat().status == "completed"
        assert (Run.objects.count(), effects.lines()) == (1, before), "the same call again is the same run"
        assert word == cell.expected
    finally:
        for child in stage.children:
            child.close()


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_every_cell_is_run_or_says_why_not(database: str) -> None:
    table = cells(database)
    points = {NAMED.get(cell.point, cell.point.partition(":")[0]) for cell in table}
    of_families = {"before_children", "after_children", "before_settled", "after_settled"}  # test_children.py
    elsewhere = {*of_families, "before_void"}  # test_holds.py
    assert points == {*POINTS} - elsewhere and {cell.point for cell in table} >= {*NAMED}
    assert {cell.fault for cell in table} == {*DIES_OR_LOSES, *LIVES_ON}
    assert all(IMPOSSIBLE.values()), "every reason says something"
    impossible = [cell for cell in table if cell.impossible]
    assert (len(table), len(impossible)) == (22 * 7, {"sqlite": 22 * 3 + 3, "postgres": 0}[database])
