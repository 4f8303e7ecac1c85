"""Drafts: the text so far of a reply that a model is writing, stored while somebody watches the run.

The engine only collects the pieces. One thread of the process, on its own connections, regularly finds the
replies that somebody watches, and stores their masked texts. The thread also finds the runs with a request to
pause or to cancel, and stops their replies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db.models import BooleanField, ExpressionWrapper, Q
from django.db.models.functions import Now

from agentruns.conf import settings
from agentruns.engine.driver import Driver
from agentruns.journal import events
from agentruns.journal.connection import own_alias, own_connection
from agentruns.journal.masking import Mask, mask_of
from agentruns.models import Draft, Message, Run
from agentruns.providers.base import ProviderError
from agentruns.utils.carry import State, carried, keep, state_of
from agentruns.utils.db import in_transaction, later, short_lock_waits, uptime
from agentruns.utils.forks import in_child
from agentruns.utils.redaction import bound, get_logger, is_on, redact

logger = get_logger("agentruns.drafts")

PERIODS = {"sqlite": 0.5}  # seconds between two times that a reply's text is stored
PERIOD = 0.2
LOOKS = 0.5  # seconds between two queries for watched runs
HELD = 100  # characters kept back: AGENTRUNS_REDACT may not recognise the beginning of a secret
LONGEST = 50_000  # characters; the rest of a longer reply appears once it is journaled
WATCHED = 20  # seconds for which a worker stores drafts after somebody last read them
AT_WORK = (Run.Status.QUEUED, Run.Status.RUNNING)
STOPPED = "It was stopped while it was written: the run is to pause, or to end. Its usage may be unknown."


class Reply:
    """The text so far of a reply; calling it adds a piece, or raises ProviderError to stop the reply."""

    def __init__(self, alias: str, run_id: UUID, epoch: int, step: int, seq: int) -> None:
        self.alias, self.run_id, self.epoch, self.step = alias, run_id, epoch, step
        self.seq = seq  # number of the session's next row at the last query
        self.pieces: list[str] = []
        self.is_stopped = self.is_over = self.is_watched = self.is_left_out = False
        self.stored, self.stored_at = "", 0.0
        self.mask: Mask | None = None
        self.is_known = False
        self.state: State = None  # of the drive's connections
        self.period = PERIODS.get(connections[alias].vendor, PERIOD)

    def __call__(self, piece: str) -> None:
        if self.is_stopped:
            raise ProviderError(STOPPED, disposition="pause", type="reply_stopped")
        if piece:
            self.pieces.append(piece)
        if not self.is_known and not self.is_over:
            self.is_known = True
            writer.add(self)


@contextmanager
def drafting(driver: Driver) -> Iterator[Reply | None]:
    """Yield the Reply for the driver's next reply; None for a stateless run or inside an open transaction."""
    lease, run = driver.lease, driver.run
    if lease is None or connections[lease.alias].in_atomic_block:
        yield None
        return
    reply = Reply(lease.alias, lease.run_id, lease.epoch, run.step, driver.state.next_seq)
    reply.state = state_of(lease.alias)
    try:
        yield reply
    finally:
        reply.is_over = True  # so that its draft is cleared
        if reply.is_known:
            writer.wake.set()


class Writer:
    """The thread that stores the drafts of this process; it runs only while a reply is being written."""

    def __init__(self) -> None:
        self.wake = threading.Event()
        self._lock = threading.Lock()
        self._replies: list[Reply] = []
        self._thread: threading.Thread | None = None

    def add(self, reply: Reply) -> None:
        """Store drafts of a reply until the reply is over; start the thread if none runs."""
        with self._lock:
            self._replies.append(reply)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="agentruns-drafts", daemon=True)
                with suppress(RuntimeError):  # if no thread can start, there is no draft
                    self._thread.start()

    def _run(self) -> None:
        looked, own = uptime(), ExitStack()
        try:
            while True:
                with self._lock:
                    self._replies = [each for each in self._replies if not each.is_over or each.stored]
                    replies = list(self._replies)
                    if not replies:
                        self._thread = None
                        return
                self.wake.wait(min(reply.period for reply in replies))
                self.wake.clear()
                if looks := uptime() >= looked + LOOKS:
                    looked = uptime()
                for place in {(reply.alias, reply.state) for reply in replies}:
                    mine = [reply for reply in replies if (reply.alias, reply.state) == place]
                    with carried(*place):
                        keep(connections[own_alias(place[0])], place[1])
                        _serve(place[0], mine, looks, own)
        finally:
            own.close()
            connections.close_all()  # of this thread


def _serve(alias: str, replies: list[Reply], looks: bool, own: ExitStack) -> None:
    """Store the drafts of watched replies and clear the drafts of finished replies.

    Calls `_look` first if `looks`. After an error a reply gets no more drafts.
    """
    if looks:
        try:
            if own_alias(alias) == alias:  # not at each look, which the stack would remember
                own.enter_context(own_connection(alias, pooled=False))
            _look(own_alias(alias), {reply.run_id: reply for reply in replies if not reply.is_over})
        except Exception as error:
            for reply in replies:
                _leave_out(reply, error)
    for reply in replies:
        try:
            with bound(reply.run_id, reply.epoch):
                if reply.is_over and reply.stored:
                    its = {"pk": reply.run_id, "epoch": reply.epoch, "step": reply.step}
                    rows = Draft.objects.using(own_alias(alias)).filter(**its)
                    in_transaction(own_alias(alias), partial(rows.update, text=""))
                    reply.stored = ""
                elif reply.is_watched and not reply.is_over and not reply.is_left_out:
                    _store(own_alias(alias), reply)
        except Exception as error:
            _leave_out(reply, error)


def _leave_out(reply: Reply, error: Exception) -> None:
    if not reply.is_left_out:
        logger.warning("No draft of the reply of run=%s: %s", reply.run_id, error)
    reply.is_left_out = True
    if reply.is_over:
        reply.stored = ""  # the sweep clears it
    connections[own_alias(reply.alias)].close()


def _look(alias: str, replies: dict[UUID, Reply]) -> None:
    """Update `is_watched` of each reply; stop replies whose run has a new request to pause or to cancel."""
    watched = ExpressionWrapper(Q(draft__watched_until__gt=Now()), output_field=BooleanField())
    runs = Run.objects.using(alias).filter(pk__in=replies).annotate(watched=watched)
    columns = ("pk", "lease_epoch", "session__next_seq", "watched")
    for run_id, epoch, seq, is_watched in runs.values_list(*columns):
        reply = replies[run_id]
        reply.is_watched = bool(is_watched) and epoch == reply.epoch
        if seq > reply.seq:
            kinds = (events.RUN_PAUSE_REQUESTED, events.RUN_CANCEL_REQUESTED)
            news = Message.objects.using(alias).filter(run_id=run_id, seq__gte=reply.seq, kind__in=kinds)
            reply.is_stopped, reply.seq = reply.is_stopped or news.exists(), seq


def _store(alias: str, reply: Reply) -> None:
    if uptime() < reply.stored_at + reply.period:
        return
    if reply.mask is None:
        reply.mask = mask_of(Run.objects.using(reply.alias).get(pk=reply.run_id))
        # The text could name a value before the model gives it to a tool as a sensitive argument.
        reply.is_left_out = bool(reply.mask.arguments_of)
    text = shown("".join(reply.pieces), reply.mask)
    if reply.is_left_out or text == reply.stored:
        return
    rows = Draft.objects.using(alias).filter(pk=reply.run_id, epoch__lte=reply.epoch, watched_until__gt=Now())
    written = {"epoch": reply.epoch, "step": reply.step, "text": text}
    reply.is_watched = in_transaction(alias, lambda: rows.update(**written)) == 1
    reply.stored, reply.stored_at = text, uptime()


def shown(text: str, mask: Mask) -> str:
    """Mask and redact an unfinished text, and cut an end that may be the beginning of a hidden value.

    Uses only the first LONGEST characters.
    """
    text = text[:LONGEST]
    text = redact(mask.json(text[: mask.secrets.settled(text)]))
    if not is_on():
        return text
    end = max(0, len(text) - HELD)
    while end and "!" <= text[end - 1] <= "~":  # the project may look for a word of any length
        end -= 1
    return text[:end]


writer = Writer()
in_child(writer.__init__)  # type: ignore[misc]


def watch(run_ids: Iterable[UUID]) -> None:
    """Record that somebody watches these runs, so that workers store drafts; only log database errors."""
    alias = settings.DATABASE
    found = [Draft(run_id=run_id, watched_until=later(WATCHED)) for run_id in run_ids]
    try:
        with transaction.atomic(using=alias), short_lock_waits(alias):
            Draft.objects.using(alias).bulk_create(
                found, update_conflicts=True, unique_fields=["run"], update_fields=["watched_until"]
            )
    except (DatabaseError, InterfaceError) as error:
        logger.warning("No drafts for now, as it cannot be stored that somebody listens: %s", error)


def draft_of(run: Run) -> str:
    """Find the draft of the reply that a model is writing for a run; "" if there is none."""
    if run.status not in AT_WORK:
        return ""
    its = Draft.objects.using(settings.DATABASE).filter(pk=run.pk, epoch=run.lease_epoch, step=run.step)
    return its.values_list("text", flat=True).first() or ""
