"""Clicks, deaths, freezes and takeovers in any order that hypothesis thinks of, on several runs at once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import override_settings
from hypothesis import HealthCheck, note, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agentruns import (
    Agent,
    adopt_definition,
    answer,
    approve,
    cancel_run,
    deliver_event,
    deny,
    pause_run,
    resolve_orphan,
    resume_run,
    run_agent,
    send_message,
    start_run,
    stop_waiting,
)
from agentruns.exceptions import ApprovalStateError, RunStateError
from agentruns.journal.conversation import UNANSWERED
from agentruns.models import Approval, Run
from agentruns.models.event import CHILD
from agentruns.services.runs.control import ORPHAN_VERDICTS
from agentruns.services.sweep import hold_all
from agentruns.testing import check_messages
from tests.db.helpers import forget_backoff, kill, run_out
from tests.effects import Effects
from tests.hostile import HOSTILITIES
from tests.properties.families import ERRAND, ERRANDS, SCOUT, check_end, check_families, handing
from tests.properties.faults import (
    ANYWHERE,
    CALLS,
    DIES_NOW,
    NUMBER,
    POINTS,
    Fate,
    Hostility,
    Worker,
    clear,
    scripts,
    surviving,
)
from tests.properties.machine import GO_ON, NEW_TOOLS, OLD_TOOLS, View, World, check
from tests.rebuild import examples
from tests.registry import isolated_registry
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order
from tests.shop.waits import invoice, paid

pytestmark = pytest.mark.django_db(transaction=True)

GATED = [call("refund", cents=5000), call("refund", cents=6000), call("wire", cents=100)]
# Not `annotate`: frozen in its transaction, it keeps the order locked and others wait, as they should.
OTHERS = [one for one in CALLS if one["name"] != "annotate"]
MORE = [call("book"), call("mumble"), call("post", text="ho")]
SCRIPTS = scripts([*OTHERS, *GATED, *GATED, *MORE], shortest=1)
KINDS = ("run_started", "run_resumed", "assistant", "tool_started", "tool_result", "run_completed")
PLACES = [
    *POINTS, "before_start_commit", "after_start", "claimed", "handler_entered", "handler_left",
    "before_children", "after_children", "before_settled", "after_settled",
    *(f"{when} {kind}" for when in ("before", "after") for kind in KINDS),
]  # fmt: skip
HOW = st.sampled_from(["dies", "freezes", "freezes"])
SOMEWHERE = st.tuples(HOW, st.just(ANYWHERE), st.integers(1, 20))
FATES = st.none() | SOMEWHERE | SOMEWHERE | st.tuples(HOW, st.sampled_from(PLACES), st.integers(1, 2))
TROUBLES = st.sampled_from([""] * 9 + ["busy", "no_key", "bad_request", "unwell"])
PICK = st.integers(0, 5)  # the how manieth of what there is, counted round
PLACE = st.sampled_from(["handler", "model"])
HOSTILITY = st.none() | st.none() | st.tuples(PLACE, st.sampled_from([*HOSTILITIES]))
# By which worker, much later, with what trouble, to what fate, beside what hostile user code.
Drive = tuple[int, bool, str, Fate | None, Hostility | None]
DRIVES = st.tuples(PICK, st.booleans(), TROUBLES, FATES, HOSTILITY)
DOORBELLS = st.none() | DRIVES | DRIVES
STOPPING = ["cancel", "cancel again", "pause", "pause", "pause", "hold all"]
RIVALS = [*STOPPING, *["take over"] * 4]
DEFINITIONS: list[dict[str, Any]] = [{}, {"max_steps": 49}, {"tools": NEW_TOOLS}]


def having(*names: str) -> Callable[[Any], Any]:
    """A rule that needs some of what is in view, or workers that are free."""
    return precondition(lambda self: all(getattr(self, name) for name in names))


class Machine(RuleBasedStateMachine):
    """An operator, a few workers, and whatever can happen to them."""

    steps = 30

    def __init__(self, world: World, workers: list[Worker], people: list[User | None]) -> None:
        super().__init__()
        self.world, self.workers, self.people = world, workers, people
        self.name = f"machine-{next(NUMBER)}"
        self.stood: dict[Any, Any] = {}
        self.said: set[tuple[Any, str]] = set()  # messages that arrived, by session
        self.clicks = 0  # of people who stop, deploy or come too late, since anybody drove
        self.registry = isolated_registry()
        self.registry.__enter__()
        self.world.begin()
        for worker in workers:
            worker.returned.clear()
        self.view = View(self.name)

    @initialize(
        scripts=st.lists(SCRIPTS, min_size=1, max_size=2),
        on_orphan=st.sampled_from(["hold", "hold", "surface"]),
        bank=st.sampled_from(["", "", "unknown"]),
        wakes=st.booleans(),
    )
    def employ(self, scripts: list[Any], on_orphan: str, bank: str, wakes: bool) -> None:
        self.scripts, self.on_orphan, self.wakes = scripts, on_orphan, wakes
        os.environ["SHOP_RECONCILE"] = bank
        for task in range(len(scripts)):
            self.declare(task, 0)
        self.task(0)

    def declare(self, task: int, definition: int) -> Agent:
        options = {"tools": OLD_TOOLS, "on_orphan": self.on_orphan, **DEFINITIONS[definition]}
        return shop_agent(f"{self.name}-{task}", *self.scripts[task], **options)

    # What there is to act on

    @property
    def idle(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.is_frozen]

    @property
    def frozen(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_frozen]

    @property
    def unfinished(self) -> list[Run]:
        return self.view.unfinished

    def task(self, pick: int) -> Run:
        """One of the runs that have not ended; where all have, another one is started."""
        if self.unfinished:
            run: Run = self.one(self.unfinished, pick)
            return run
        return start_run(f"{self.name}-{pick % len(self.scripts)}", "do it", f"{self.name}-a")

    pending = property(lambda self: self.view.pending)
    decided = property(lambda self: self.view.decided)
    doubtful = property(lambda self: self.view.doubtful)

    @property
    def over(self) -> list[Run]:
        return [run for run in self.view.runs if run.is_ended]

    def one(self, things: list[Any], pick: int) -> Any:
        return things[pick % len(things)]

    # What callers and workers do

    @precondition(lambda self: self.idle and len(self.unfinished) < 2)
    @rule(
        task=PICK, session=st.sampled_from("ab"), key=st.sampled_from(["k", "l", None]), waits=st.booleans(),
        drive=DRIVES,
    )  # fmt: skip
    def ask(self, task: int, session: str, key: str | None, waits: bool, drive: Drive) -> None:
        place = run_agent if waits else start_run
        name = f"{self.name}-{task % len(self.scripts)}"
        key = key and f"{self.name}-{key}"
        self.drive(drive, lambda: place(name, "do it", f"{self.name}-{session}", idempotency_key=key))

    @having("idle")
    @rule(session=st.sampled_from("ab"), key=st.sampled_from([None, None, "m", "n"]), drive=DRIVES)
    def write(self, session: str, key: str | None, drive: Drive) -> None:
        """Somebody writes again, wherever the run of the session stands."""
        name = f"{self.name}-{session}"
        if not any(run.session.key == name for run in self.view.runs):
            return
        text = f"text of {key}" if key else f"text {next(NUMBER)}"
        self.drive(drive, lambda: self.send(name, text, key))

    def send(self, session: str, text: str, key: str | None) -> None:
        try:
            run = send_message(session, text, idempotency_key=key and f"{session}-{key}")
        except RunStateError as error:
            assert "is being cancelled" in str(error) or "32 messages" in str(error), error
        else:
            self.said.add((run.session_id, text))

    @having("idle")
    @rule(tell_model=st.sampled_from([False, False, True]), drive=DRIVES)
    def sweep(self, tell_model: bool, drive: Drive) -> None:
        self.task(0)
        self.drive(drive, lambda: self.world.sweep(tell_model=tell_model))

    @having("idle")
    @rule(pick=PICK, drives=st.sampled_from([True, True, False]), drive=DRIVES)
    def resume(self, pick: int, drives: bool, drive: Drive) -> None:
        run = self.task(pick)
        self.drive(drive, lambda: resume_run(run.pk, drive=drives))

    @having("idle")
    @rule(pick=PICK, drive=DRIVES)
    def repeat(self, pick: int, drive: Drive) -> None:
        run = self.task(pick)
        key = run.idempotency_key or None
        self.drive(drive, lambda: run_agent(run.agent, run.input, run.session.key, idempotency_key=key))

    @having("frozen")
    @rule(pick=PICK, fate=FATES | st.just(DIES_NOW))
    def let_go(self, pick: int, fate: Any) -> None:
        worker = self.one(self.frozen, pick)
        worker.let_go(fate)
        self.tell(worker)

    @having("idle")
    @rule(pick=PICK, drive=DRIVES, at=st.integers(1, 25), what=st.sampled_from(RIVALS))
    def race(self, pick: int, drive: Drive, at: int, what: str) -> None:
        """Somebody stops a run, or another worker takes it, while one is anywhere within its drive."""
        run = self.task(pick)
        for card in self.pending:
            for actor in self.people if card.run_id == run.pk else []:
                surviving(partial(approve, card.pk, actor, digest=card.digest))
        freezes = (drive[0], True, drive[2], ("freezes", ANYWHERE, at), drive[4])
        worker = self.drive(freezes, lambda: resume_run(run.pk))
        if not worker.is_frozen:
            return
        self.every_promise_is_kept()
        if what != "take over":
            self.stop(pick, what)
        elif self.idle:
            self.drive((drive[0], True, "", drive[3], drive[4]), self.world.sweep)
        self.every_promise_is_kept()
        worker.let_go(None)
        self.tell(worker)

    def drive(self, drive: Drive, action: Callable[[], Any]) -> Worker:
        """Let a worker do something, perhaps after the time of every lease and back-off is over."""
        by, later, trouble, fate, hostility = drive
        self.clicks = 0
        if later:
            self.world.let_leases_end()
            for run in self.unfinished:
                forget_backoff(run)
                if run.lease_expires_at:
                    kill(run)
        self.world.break_model(trouble)
        worker: Worker = self.one(self.idle, by)
        worker.do(action, fate, hostility)
        self.tell(worker)
        return worker

    def ring(self, drive: Drive | None) -> None:
        """What people do rings a worker, if the broker does not lose that."""
        if drive and self.idle:
            self.drive(drive, self.world.sweep)

    def tell(self, worker: Worker) -> None:
        note(f"# worker {self.workers.index(worker)}: {worker.met or 'is done'}")
        worker.met = ""

    # What people do

    @having("pending")
    @rule(pick=PICK, who=PICK, verb=st.sampled_from(["approve", "approve", "edit"]), drive=DOORBELLS)
    def agree(self, pick: int, who: int, verb: str, drive: Drive | None) -> None:
        self.decide(verb, self.one(self.pending, pick), self.one(self.people, who))
        self.ring(drive)

    @having("pending")
    @rule(pick=PICK, who=PICK, verb=st.sampled_from(["deny", "answer", "wait"]), drive=DOORBELLS)
    def disagree(self, pick: int, who: int, verb: str, drive: Drive | None) -> None:
        card = self.one(self.pending, pick)
        if verb == "wait":
            run_out(card)
        else:
            self.decide(verb, card, self.one(self.people, who))
        self.ring(drive)

    def decide(self, verb: str, card: Approval, actor: User | None) -> None:
        try:
            self.click(verb, card, actor)
        except ApprovalStateError as error:
            note(f"# {error}")
            over = card.run.messages.filter(kind="run_cancel_requested").exists()
            over = over or Approval.objects.expired().filter(pk=card.pk).exists()
            assert verb == "approve" or over, "one deny ends it, and an edit voids what was approved"

    def click(self, verb: str, card: Approval, actor: User | None) -> None:
        if verb == "deny":
            deny(card.pk, actor, "no", digest=card.digest)
        elif verb == "answer":
            answer(card.pk, actor, "it is 42", digest=card.digest)
        else:
            edited = {**card.arguments, "cents": 4000} if "cents" in card.arguments else card.arguments
            approve(card.pk, actor, digest=card.digest, arguments=edited if verb == "edit" else None)

    @having("doubtful")
    @rule(pick=PICK, verdict=st.sampled_from(ORPHAN_VERDICTS), drive=DOORBELLS)
    def resolve(self, pick: int, verdict: str, drive: Drive | None) -> None:
        run_id, call_id = self.one(self.doubtful, pick)
        surviving(lambda: resolve_orphan(run_id, call_id, verdict, None, result="it did"))
        self.ring(drive)

    @precondition(lambda self: self.clicks < 1)
    @rule(pick=PICK, what=st.sampled_from(STOPPING))
    def stop(self, pick: int, what: str) -> None:
        self.clicks += 1
        run = self.task(pick)
        if what == "hold all":
            hold_all()
        elif what == "pause":
            surviving(lambda: pause_run(run.pk))
        else:
            # Again is as if a lease's time had passed since the cancel before, which nobody honoured.
            with override_settings(**{"AGENTRUNS_LEASE_SECONDS": 0} if what == "cancel again" else {}):
                surviving(lambda: cancel_run(run.pk))

    @precondition(lambda self: self.clicks < 1)
    @rule(pick=PICK, definition=st.sampled_from([0, 1, 2]), adopts=st.sampled_from([True, True, False]))
    def deploy(self, pick: int, definition: int, adopts: bool) -> None:
        self.clicks += 1
        run = self.task(pick)
        self.declare(int(run.agent.rpartition("-")[2]), definition)
        if adopts:
            surviving(lambda: adopt_definition(run.pk))

    @precondition(lambda self: self.clicks < 1 and (self.decided or self.over))
    @rule(pick=PICK, who=PICK, verb=st.sampled_from(["approve", "edit", "deny", "answer"]))
    def come_too_late(self, pick: int, who: int, verb: str) -> None:
        self.clicks += 1
        for card in self.decided[pick : pick + 1]:
            with pytest.raises(ApprovalStateError):
                self.click(verb, card, self.one(self.people, who))
        for run in self.over[pick : pick + 1]:
            for ask in (resume_run, cancel_run, pause_run, adopt_definition):
                with pytest.raises(RunStateError):
                    ask(run.pk)

    # What is true all the time

    @invariant()
    def every_promise_is_kept(self) -> None:
        self.view = View(self.name)
        check(self.view, self.world, [one for worker in self.idle for one in worker.returned])
        for run in self.view.runs:
            stands = (run.status, run.output, run.error)
            assert self.stood.get(run.pk, stands) == stands, "an ended run changed"
            if run.is_ended:
                self.stood[run.pk] = stands

    def teardown(self) -> None:
        broken = sys.exc_info()[0] is not None
        try:
            for worker in self.frozen:
                worker.let_go(DIES_NOW if broken or not self.wakes else None)
            if not broken:
                self.end_every_run()
        finally:
            self.forget()
            self.registry.__exit__(None, None, None)

    def forget(self) -> None:
        """Leave nothing for the sweeps of the next example: the same steps have to do the same again."""
        for run in Run.objects.unfinished():
            kill(run)
            with contextlib.suppress(Exception):  # this example has failed already
                cancel_run(run.pk)

    def end_every_run(self) -> None:
        """Nobody needs SQL for that, but for what time would do by itself."""
        self.world.outage = None
        self.every_promise_is_kept()
        for run in self.unfinished:
            if run.lease_expires_at:
                kill(run)
            surviving(partial(adopt_definition, run.pk))
        clear(*self.unfinished)
        self.every_promise_is_kept()
        for session in self.view.roots:
            again = run_agent(shop_agent(f"{self.name}-next"), "and now?", session.key)
            assert again.status == "completed"
            check_messages([*again.messages, GO_ON])
            blocks = [block for one in again.messages if one["role"] == "user" for block in one["content"]]
            texts = Counter(block.get("text") for block in blocks)
            arrived = {text: texts[text] for owner, text in self.said if owner == session.pk}
            left_out = {0} if texts[UNANSWERED] else set()  # with the question of a refused reply
            assert set(arrived.values()) <= {1} | left_out, f"lost, or said twice: {arrived}"


class Families(Machine):
    """The same with runs that hand tasks to others, and with calls that wait for a webhook."""

    steps = 15

    @initialize(
        scripts=st.lists(handing("errand", "scout"), min_size=1, max_size=1),
        errands=ERRANDS,
        scouts=handing("errand"),
        on_orphan=st.sampled_from(["hold", "hold", "surface"]),
        bank=st.sampled_from(["", "", "unknown"]),
        wakes=st.booleans(),
    )
    def employ(self, errands: Any, scouts: Any, **given: Any) -> None:  # type: ignore[override]
        self.told = {ERRAND: errands, SCOUT: scouts, 0: given["scripts"][0]}
        super().employ(**given)

    def declare(self, task: int, definition: int) -> Agent:
        """Declare the agent with a number, and before it those that it hands tasks to."""
        below = {0: ((ERRAND, "errand"), (SCOUT, "scout")), SCOUT: ((ERRAND, "errand"),), ERRAND: ()}[task]
        options = {"tools": OLD_TOOLS, "on_orphan": self.on_orphan, **DEFINITIONS[definition]}
        options["tools"] = [
            *options["tools"],
            invoice,
            *(self.declare(number, 0).as_tool(name) for number, name in below),
        ]
        return shop_agent(f"{self.name}-{task}", *self.told[task], **options)

    waits = property(lambda self: [wait for wait in self.view.waits if wait.name != CHILD])

    @precondition(lambda self: paid())
    @rule(pick=PICK, by=st.booleans(), drive=DOORBELLS)
    def pay(self, pick: int, by: bool, drive: Drive | None) -> None:
        """Deliver the event of an invoice that was sent: perhaps again, perhaps before anybody waits."""
        key = self.one(paid(), pick)
        deliver_event("payment", f"pi-{key}" if by else key, {"paid": 1})
        self.ring(drive)

    @having("waits")
    @rule(pick=PICK, drive=DOORBELLS)
    def give_up(self, pick: int, drive: Drive | None) -> None:
        wait = self.one(self.waits, pick)
        surviving(lambda: stop_waiting(wait.run_id, wait.call_id, None))
        self.ring(drive)

    @invariant()
    def every_promise_is_kept(self) -> None:
        super().every_promise_is_kept()
        check_families(self.view)

    def end_every_run(self) -> None:
        super().end_every_run()
        check_end(View(self.name))


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    made = [Worker() for _ in range(3)]
    yield made
    for worker in made:
        worker.end()


@pytest.mark.parametrize("lives", [Machine, Families])
@override_settings(AGENTRUNS_LEASE_SECONDS=900, AGENTRUNS_BACKOFF_SECONDS=(3600, 3600))
def test_whatever_happens_every_promise_is_kept(
    lives: type[Machine], effects: Effects, workers: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_RECONCILE", "")
    Order.objects.create(number="A1", customer="Ada", total_cents=100)
    people = [None, *(User.objects.create_superuser(name) for name in ("ann", "bob"))]
    run_state_machine_as_test(
        partial(lives, World(monkeypatch, effects), workers, people),  # type: ignore[arg-type]
        settings=settings(
            max_examples=examples(20, brief=6, long=1000),
            stateful_step_count=lives.steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
