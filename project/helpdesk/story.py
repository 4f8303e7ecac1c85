"""The demo: six tickets, two crashes, two decisions, a parcel that is waited for; safe to run again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings
from django.utils import timezone

from agentruns import Agent, approve, deliver_event, list_runs, raise_budget, send_message
from agentruns.exceptions import ApprovalStateError, RunStateError
from agentruns.models import Run
from agentruns.models.statuses import UNFINISHED
from project.helpdesk import ledger, words
from project.helpdesk.agents import helpdesk, returns
from project.helpdesk.model import TranscriptModel
from project.helpdesk.models import Ticket
from project.helpdesk.money import euros
from project.helpdesk.narrator import Narrator
from project.helpdesk.workers import Worker, log_path

BLINK = 0.05  # seconds between two reads of the journal
PATIENCE = 600.0  # most seconds for one worker, even on a slow machine
QUIET = 10.0  # seconds after which the story says what it waits for
SECOND_MESSAGE = "One more thing: I have thrown the box away. Can you take the machine back without it?"
PARCEL = {"found": "a hand grinder of steel", "state": "unused"}
RAISED = 12  # the replies that the user allows the run about the parcel
UNDER_WAY = (Run.Status.QUEUED, Run.Status.RUNNING)
ME = f"demo {os.getpid()}"


class DemoError(Exception):
    """Raised with the reason if the story cannot continue."""


class Wait:
    """A wait of at most PATIENCE for one event; after QUIET the narrator says what the story waits for."""

    def __init__(self, narrator: Narrator, what: str) -> None:
        self.narrator, self.what = narrator, what
        self.began, self.is_told = time.monotonic(), False

    def left(self) -> float:
        """Compute the seconds left of PATIENCE, 0 if none."""
        return max(0.0, self.began + PATIENCE - time.monotonic())

    def pause(self) -> None:
        """Sleep until the next read of the journal, and after QUIET say once what the story waits for."""
        if not self.is_told and time.monotonic() > self.began + QUIET:
            self.narrator.says(ME, f"waits for {self.what}")
            self.is_told = True
        time.sleep(BLINK)


class Story:
    """The demo's story: one scene for each ticket; a finished ticket is reported, not repeated."""

    def __init__(self, narrator: Narrator, user: Any) -> None:
        self.narrator = narrator
        self.user = user
        self.scripted = isinstance(helpdesk.model, TranscriptModel)
        self.scenes: dict[int, Callable[[Ticket], None]] = {
            1: self.runs_through,
            2: self.killed_inside_the_refund,
            3: self.approved_from_another_process,
            4: self.left_for_the_console,
            5: self.killed_inside_the_mail,
            6: self.waits_for_the_parcel,
        }

    def tell(self) -> None:
        """Tell the story of every ticket."""
        self._introduce()
        for ticket in Ticket.objects.filter(number__in=self.scenes).select_related("customer"):
            self.narrator.ticket(ticket)
            run = run_of(ticket)
            if run is None:
                self.scenes[ticket.number](ticket)
            else:
                self._again(ticket, run)

    # One scene for each ticket

    def runs_through(self, ticket: Ticket) -> None:
        """Let a worker finish the ticket without an incident."""
        self._work(ticket)

    def killed_inside_the_refund(self, ticket: Ticket) -> None:
        """Kill the worker after the money has moved; the refund is then reconciled with the provider."""
        run = self._kill_after(ticket, "refund")
        if run is not None:
            self.narrator.explains(
                'The journal says "refund started" and no more. A system that retries would pay twice; '
                "one that gives up might not pay at all."
            )
            self._recover(run)

    def approved_from_another_process(self, ticket: Ticket) -> None:
        """Let a person decide from another process, after which any worker continues."""
        run = self._work(ticket)
        card = run.approvals.pending().first()
        if card is None:
            self.narrator.says(ME, "nothing needs a person this time")
            return
        call = words.call(card.tool_name, card.arguments)
        self.narrator.says(ME, f"shows user {self.user} the card: {call}, digest {card.digest[:12]}")
        try:
            approve(card.pk, self.user, digest=card.digest, reason="the parcel is back with us")
        except ApprovalStateError as error:  # somebody decided in the console first
            self.narrator.says(ME, str(error))
        self.narrator.follow(run, ME)
        self._recover(run)

    def left_for_the_console(self, ticket: Ticket) -> None:
        """Leave the decision to the user of the console, and let the customer write again meanwhile."""
        run = self._work(ticket)
        if run.status == Run.Status.AWAITING_APPROVAL:
            key = f"{ticket.idempotency_key}-again"
            send_message(run.session, SECOND_MESSAGE, agent=helpdesk, idempotency_key=key)
            self.narrator.follow(run, "the customer")
            self.narrator.explains(
                "This one is yours: it waits, for as long as it takes, in the console. The card says that "
                "the customer wrote again; the agent reads it together with your decision."
            )

    def killed_inside_the_mail(self, ticket: Ticket) -> None:
        """Kill the worker after the mail has gone out; then only a person can find out whether it did."""
        run = self._kill_after(ticket, "email")
        if run is not None:
            self._recover(run)
            run.refresh_from_db()
            if run.status == Run.Status.ORPHANED:
                self.narrator.explains(
                    f"This one is yours too: look into {shown(settings.MAIL_DIR)}, then say in the console, "
                    "on the card of the call, whether the mail went out."
                )

    def waits_for_the_parcel(self, ticket: Ticket) -> None:
        """Let the run ask another agent, wait for a parcel, and use up its budget, which the user raises."""
        self._see_through(self._work(ticket, returns))

    # Building blocks of the scenes

    def _introduce(self) -> None:
        if self.scripted:
            model = "transcripts (set ANTHROPIC_API_KEY and MODEL=claude-... for the real one)"
        else:
            model = str(helpdesk.model)
        begun = all(run_of(ticket) for ticket in Ticket.objects.filter(number__in=self.scenes))
        self.narrator.heading(
            "The six tickets again: what is done stays done."
            if begun
            else "Agents work through six tickets. Two of their workers get killed."
        )
        database = shown(settings.DATABASES["default"]["NAME"])
        self.narrator.columns(
            [
                ("model", model),
                ("journal", f"{database}: every reply, and every call before it runs"),
                ("ledger", f"{shown(ledger.path())}: what really happened outside, one line each"),
            ]
        )

    def _again(self, ticket: Ticket, run: Run) -> None:
        """Continue a ticket that was started earlier, or report its state if nothing is to be done."""
        if self._needed(run) is not None:
            news = ("approval_decided", "orphan_resolved", "event_delivered", "budget_raised")
            self.narrator.skip(run, but=news)
            self.narrator.says(ME, f"was begun already: run {run.pk} goes on")
            self._see_through(run)
        else:
            said = "was done already" if run.is_ended else "waits for you"
            self.narrator.says(ME, f"{said}: run {run.pk} {run.status}")

    def _start(self, ticket: Ticket, agent: Agent = helpdesk, hold: str = "") -> Worker:
        photos = ticket.files("photos") if agent is helpdesk else []  # `returns` asks the agent `photos`
        worker = Worker(
            "run_agent",
            agent.name,
            ticket.as_task(),
            f"--session={ticket.session_key}",
            f"--idempotency-key={ticket.idempotency_key}",
            *(f"--file={photo}" for photo in photos),
            hold=hold,
        )
        self.narrator.says(worker.name, f"starts: manage.py run_agent {agent.name} ...")
        return worker

    def _work(self, ticket: Ticket, agent: Agent = helpdesk) -> Run:
        """Let a worker drive the ticket's run until the run ends or waits."""
        with self._start(ticket, agent) as worker:
            run = self._watch(ticket, worker)
        if run.status in UNDER_WAY:  # the worker lost the run, or the model is busy
            self._recover(run)
        return run

    def _watch(self, ticket: Ticket, worker: Worker, until: Callable[[], bool] = lambda: False) -> Run:
        """Narrate a worker until it ends or `until` is true; return its run. DemoError if there is no run."""
        wait, run = Wait(self.narrator, f"{worker.name}, which works on ticket {ticket.number}"), None
        while not until():
            alive = worker.is_alive()
            run = run or run_of(ticket)
            if run is not None:
                self.narrator.follow(run, worker.name)
            if not alive:
                break
            if not wait.left():
                raise DemoError(
                    f"{worker.name} is still at work on ticket {ticket.number} after {PATIENCE:g} s. "
                    "It is stopped now; run the demo again and it continues from there."
                )
            wait.pause()
        run = run or run_of(ticket)
        if run is None:
            raise DemoError(
                f"{worker.name} ended before it started a run. Its output is in {shown(log_path())}."
            )
        self.narrator.follow(run, worker.name)
        run.refresh_from_db()
        return run

    def _kill_after(self, ticket: Ticket, kind: str) -> Run | None:
        """Kill the worker after an effect, before the provider answers; None if the effect never happened."""
        session = ticket.session_key
        with self._start(ticket, hold=f"{kind}:{session}") as worker:
            run = self._watch(ticket, worker, until=lambda: effect(session, kind) is not None)
            done = effect(session, kind)
            if done is None:
                self.narrator.says(ME, f"no {kind} happened this time, so nobody is killed")
                if run.status in UNDER_WAY:
                    self._recover(run)
                return None
            self.narrator.says(*acknowledgement(done))
            worker.kill()
            self.narrator.says(ME, f"kill -9 {worker.process.pid}", style="ERROR")
        return run

    def _see_through(self, run: Run) -> None:
        """Do what a run needs to go on, again and again, until it needs nothing or does not move."""
        while act := self._needed(run):
            rows = run.messages.count()
            act(run)
            if run.messages.count() == rows:
                return
            run.refresh_from_db()

    def _needed(self, run: Run) -> Callable[[Run], None] | None:
        """Choose what lets a run go on; None if it has ended, or waits for the user of the console."""
        if run.status in UNDER_WAY:
            return self._recover
        if run.status == Run.Status.WAITING:
            return self._let_child_work if unfinished_child(run) else self._deliver_parcel
        is_low = run.agent == returns.name and run.step < RAISED
        is_exhausted = run.status == Run.Status.PAUSED and run.blocked_reason.startswith("budget_exhausted")
        return self._raise_budget if is_low and is_exhausted else None

    def _let_child_work(self, run: Run) -> None:
        """Let a worker drive the child of a run; its answer is the result of the call that started it."""
        child = unfinished_child(run)
        if child is not None:
            self._recover(child)
            self.narrator.follow(run, f"child {child.agent}")

    def _deliver_parcel(self, run: Run) -> None:
        """Let the warehouse say that the parcel of a run's label has come."""
        label = effect(run.session.key, "label")
        if label is None:  # its child has ended, and the sweep of a worker brings the answer up
            self._drive(run)
            return
        self.narrator.explains(
            "No process is left that knows of this run. It waits in the database, for 14 days at most."
        )
        deliver_event("parcel", label["label"], PARCEL)
        self.narrator.follow(run, "warehouse")

    def _raise_budget(self, run: Run) -> None:
        """Let the user give a run more replies than its agent may have."""
        try:
            raise_budget(run.pk, self.user, max_steps=RAISED, reason="let it finish")
        except RunStateError as error:  # somebody did so in the console first
            self.narrator.says(ME, str(error))
        self.narrator.follow(run, ME)

    def _recover(self, run: Run) -> None:
        """Let new processes drive the run, once it is free, until it ends, waits for people or is blocked."""
        wait = Wait(self.narrator, "the end of the run")
        run.refresh_from_db()
        while True:
            self._wait_until_free(run, wait)
            self._drive(run)
            if run.status not in UNDER_WAY or run.blocked_reason or not wait.left():
                return

    def _wait_until_free(self, run: Run, wait: Wait) -> None:
        """Wait until the lease of a dead worker or the run's back-off is over."""
        until, why = run.not_before, "the model asked for a pause"
        if run.status == Run.Status.RUNNING:
            until, why = run.lease_expires_at, "until its lease ends, nobody else may touch the run"
        left = (until - timezone.now()).total_seconds() if until is not None else 0.0
        if left > 0:
            self.narrator.says(ME, f"waits {left:.1f} s: {why}")
            time.sleep(min(left + 2 * BLINK, wait.left()))

    def _drive(self, run: Run) -> None:
        """Let a new process drive the run, or wait for the worker of an open console if that is faster."""
        with Worker("resume_runs", f"--run={run.pk}") as worker:
            self.narrator.says(worker.name, "starts: manage.py resume_runs")
            wait = Wait(self.narrator, f"{worker.name}, which takes over what it finds")
            while worker.is_alive() and wait.left():
                self.narrator.follow(run, worker.name)
                wait.pause()
            self.narrator.follow(run, worker.name)
        if "driven" not in worker.said():
            self.narrator.says(
                worker.name, "found nothing to do; if the run went on, another worker was quicker"
            )
        run.refresh_from_db()
        wait = Wait(self.narrator, "another worker, which has the run")
        while run.status == Run.Status.RUNNING and wait.left():
            self.narrator.follow(run, "another worker")
            wait.pause()
            run.refresh_from_db()
        self.narrator.follow(run, "another worker")
        if run.blocked_reason and run.status in UNDER_WAY:
            self.narrator.says(ME, run.blocked_reason, style="WARNING")


def run_of(ticket: Ticket) -> Run | None:
    """Find a ticket's run; None if it was not started."""
    return list_runs().filter(idempotency_key=ticket.idempotency_key).first()


def unfinished_child(run: Run) -> Run | None:
    """Find a child of a run that has not ended."""
    return run.children.filter(status__in=UNFINISHED).first()


def effect(session: str, kind: str) -> dict[str, Any] | None:
    """Find the first effect of a kind in a session, as the world outside knows it."""
    mine = (line for line in ledger.lines() if line["session"] == session)
    return next((line for line in mine if line["kind"] == kind), None)


def acknowledgement(line: dict[str, Any]) -> tuple[str, str]:
    """Describe an effect that the worker does not know yet, as the actor and the action."""
    if line["kind"] == "refund":
        return "bank", f"{euros(line['amount_cents'])} are paid out; the worker does not know it yet"
    return "mail provider", f"the mail to {line['to']} is out; the worker does not know it yet"


def shown(path: Path | str) -> str:
    """Format a path relative to the current directory if possible."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
