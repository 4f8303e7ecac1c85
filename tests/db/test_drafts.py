"""The reply that is being written: stored only for who watches, as it may be shown, gone with the reply."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.backends.utils import CursorWrapper
from django.db.models.functions import Now
from hypothesis import given, strategies as st

from agentruns import Agent, ModelRequest, cancel_run, pause_run, resume_run, start_run, tool
from agentruns.engine import drafts
from agentruns.journal.masking import Mask
from agentruns.models import Draft, Message, Run
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from agentruns.utils import db
from agentruns.utils.redaction import Secrets
from tests.db.dying import elsewhere
from tests.db.helpers import payloads, sound
from tests.redacting import CARD, HIDE
from tests.shop.agents import call
from tests.waiting import wait_for

pytestmark = pytest.mark.django_db(transaction=True)


rounds: list[str] = []  # of the writer: a round ends when it has done all that was due


@pytest.fixture(autouse=True)
def _quick_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = drafts._serve
    counted = {"_serve": lambda alias, *about: (serve(alias, *about), rounds.append(alias))}
    for name, value in {"PERIOD": 0.02, "PERIODS": {}, "LOOKS": 0.02, **counted}.items():
        monkeypatch.setattr(drafts, name, value)


class Time:
    """A clock of the writer that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(drafts, "uptime", lambda: self.now)


class Talking(ScriptedModel):
    """A model that follows its script, then writes in pieces and lets the test look after each."""

    def __init__(self, *pieces: str, turns: Sequence[Any] = ()) -> None:
        super().__init__([*turns, self.write])
        self.pieces = pieces
        self.after: Callable[[str], object] = lambda said: None

    def write(self, request: ModelRequest) -> dict[str, str]:
        said = ""
        for piece in self.pieces:
            said += piece
            assert request.on_text is not None
            request.on_text(piece)
            self.after(said)
        return {"text": said}


def started(model: Any, session: str = "s1", *, watched: bool = True, **options: Any) -> Run:
    """Queue a run of a model, and let somebody watch it."""
    run = start_run(Agent(f"talks-{session}", instructions="Talk.", model=model, **options), "do it", session)
    if watched:
        Draft.objects.create(run=run, watched_until=Now() + timedelta(minutes=1))
    return run


def write(
    *pieces: str, after: Callable[[Run, str], object], turns: Sequence[Any] = (), **options: Any
) -> Run:
    """Let a model write to the end of its run, and let the test look at the run after each piece."""
    model = Talking(*pieces, turns=turns)
    run = started(model, **options)
    model.after = lambda said: after(run, said)
    assert sweep().completed == 1
    return run


def text_of(run: Run) -> str:
    """Read the draft as others can."""
    return str(elsewhere(lambda: Draft.objects.get(pk=run.pk).text))


def is_shown(run: Run, text: str) -> None:
    wait_for(lambda: text_of(run) == text, f"the draft {text!r}, not {text_of(run)!r}")


def settle() -> None:
    """Wait until the writer has begun and ended a round after now: what it would do, it has done."""
    before = len(rounds)
    wait_for(lambda: len(rounds) >= before + 2, "the writer")


def somebody_waits() -> bool:
    """Ask whether another connection waits for a lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
        return bool(cursor.fetchone()[0])


def kinds(run: Run) -> list[str]:
    return list(Message.objects.filter(run=run).order_by("seq").values_list("kind", flat=True))


def is_quiet() -> bool:
    return not any(thread.name == "agentruns-drafts" for thread in threading.enumerate())


def test_what_is_watched_is_stored_as_it_is_written_and_gone_with_the_reply() -> None:
    seen: list[int] = []

    def look(run: Run, said: str) -> None:
        is_shown(run, said)
        draft = Draft.objects.get(pk=run.pk)
        mine = Run.objects.get(pk=run.pk)
        assert (draft.epoch, draft.step) == (mine.lease_epoch, mine.step)
        seen.append(Message.objects.latest("seq").seq)

    run = write("Your ", "order ", "is on its way.", after=look)
    assert seen == [2, 2, 2], "no row of the journal"
    is_shown(run, "")
    assert kinds(sound(run)) == ["run_started", "user", "assistant", "run_completed"]
    wait_for(is_quiet, "the thread to end")


def test_nobody_watches_so_nothing_is_stored_and_the_step_asks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts, "LOOKS", 2)
    clock = Time(monkeypatch)
    asked: list[tuple[str, str]] = []
    execute = CursorWrapper.execute

    def count(self: Any, sql: Any, params: Any = None) -> Any:
        asked.append((threading.current_thread().name, str(sql)))
        return execute(self, sql, params)

    def after(run: Run, said: str) -> None:
        clock.now += 1
        settle()

    with monkeypatch.context() as patch:
        patch.setattr(CursorWrapper, "execute", count)
        write(*"abcdefghij", after=after, watched=False)
    theirs = [sql for name, sql in asked if name == "agentruns-drafts"]
    assert 3 <= len([sql for sql in theirs if "SELECT" in sql]) <= 5, "one look in two seconds, of ten"
    assert not [sql for sql in theirs if "UPDATE" in sql or "INSERT" in sql]
    others = [sql for name, sql in asked if name != "agentruns-drafts" and "agentruns_draft" in sql]
    assert len(others) == 1, "the sweep's"
    assert not Draft.objects.exists()
    # A quick reply in pieces starts no connection.
    monkeypatch.setattr(drafts, "LOOKS", 60)
    monkeypatch.setattr(drafts, "_look", lambda *about: pytest.fail("it looked"))
    started(Talking("a", "b"), "quick", watched=False)
    assert sweep().completed == 1


def test_at_most_so_many_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stored = Time(monkeypatch), list[float]()
    queries = type(Draft.objects.none())
    store = queries.update

    def update(self: Any, **written: Any) -> int:
        if written.get("text"):
            stored.append(clock.now)
        return store(self, **written)

    def after(run: Run, said: str) -> None:
        clock.now += drafts.PERIOD / 4
        settle()

    monkeypatch.setattr(queries, "update", update)
    write(*(f"{number} " for number in range(20)), after=after)
    assert 4 <= len(stored) <= 6, "the time of five periods"
    assert min(later - one for one, later in pairwise(stored)) > 0.9 * drafts.PERIOD


def test_a_secret_in_two_pieces_is_never_stored(settings: Any) -> None:
    settings.AGENTRUNS_REDACT = HIDE
    words = "and so on, as this is what one says when there is nothing to be said, for a while. "
    seen: set[str] = set()

    def look(run: Run, said: str) -> None:
        settle()
        if said.endswith(words * 2):
            charged = "Your card [card] is charged. and so"
            wait_for(lambda: text_of(run).startswith(charged), "what may be shown")
        seen.add(text_of(run))

    write("Your card ", CARD[:9], CARD[9:], " is", " charged. ", words, words, after=look)
    assert len(seen) > 1
    assert not [text for text in seen if CARD[:4] in text], seen


def test_a_sensitive_result_in_two_pieces_is_masked() -> None:
    account = tool(name="account", sensitive_results=["iban"])(lambda: {"iban": "DE02 7001 0010"})
    expected = iter(["It is ", "It is ", "It is ***", "It is ***, for you."])
    pieces, turns = ("It is DE02", " 7001", " 0010", ", for you."), [{"tools": [call("account")]}]
    write(*pieces, after=lambda run, said: is_shown(run, next(expected)), turns=turns, tools=[account])


def test_with_sensitive_arguments_nothing_is_shown_before_the_reply() -> None:
    """It may name a value before it calls the tool: in the journal, that is masked from the beginning."""

    def look(run: Run, said: str) -> None:
        settle()
        assert text_of(run) == ""

    @tool(sensitive=["pin"])
    def unlock(pin: str) -> str:
        """Unlock it."""
        return "unlocked"

    write("I unlock it with 4711. ", "One moment.", after=look, tools=[unlock])


@given(st.lists(st.text("ab", min_size=4, max_size=9), min_size=1, max_size=4), st.text("abc", max_size=60))
@pytest.mark.django_db(transaction=False)
def test_what_was_shown_of_a_text_that_goes_on_stays_true(values: list[str], text: str) -> None:
    """So no part of a value is ever shown, wherever the text is cut."""
    mask = Mask()
    mask.results_of["tool"] = ("*",)
    mask.secrets = Secrets(values)
    whole = mask.json(text)
    for length in range(len(text) + 1):
        assert whole.startswith(drafts.shown(text[:length], mask))


def test_a_table_that_fails_disturbs_nobody_and_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*about: Any) -> None:
        raise OperationalError("no such table")

    def after(run: Run, said: str) -> None:
        settle()
        if said == "abc":
            wait_for(lambda: bool(caplog.records), "the failure")

    for name in ("_look", "_store"):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "agentruns"):
            patch.setattr(drafts, name, fail)
            run = write(*"abc", after=after, session=name)
        why = f"No draft of the reply of run={run.pk}: no such table"
        assert [record.message for record in caplog.records] == [why]
        caplog.clear()


def test_a_lock_on_the_draft_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite locks the whole file")
    model = Talking("a", "b", "c")
    model.after = lambda said: wait_for(somebody_waits, "the writer to wait for the lock")
    run = started(model)
    monkeypatch.setattr(db, "LOCK_TIMEOUT", db.LOCK_TIMEOUT.replace(f"'{db.LOCK_SECONDS}s'", "'300s'"))
    with transaction.atomic():
        Draft.objects.select_for_update().get(pk=run.pk)
        assert elsewhere(sweep).completed == 1
        assert somebody_waits(), "the writer, and nobody else"


@pytest.mark.parametrize("verb", [pause_run, cancel_run])
def test_a_pause_or_a_cancel_stops_the_reply(verb: Callable[..., Run]) -> None:
    model = Talking(*"abcdefghijklmnopqrstuvwxyz" * 10)
    run, said = started(model, watched=False), list[str]()

    def look(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            elsewhere(lambda: verb(run.pk))
            settle()

    model.after = look
    sweep()
    run = sound(run)
    status = "paused" if verb is pause_run else "cancelled"
    assert (run.status, len(said) < len(model.pieces)) == (status, True)
    assert kinds(run)[3:] == ["model_failed", f"run_{status}"]
    (failed,) = payloads(run, "model_failed")
    assert failed["error"]["type"] == "reply_stopped"
    if verb is pause_run:  # again
        model.after = lambda text: None
        assert resume_run(run.pk).status == "completed"
        assert kinds(run).count("assistant") == 1


def test_a_piece_that_comes_after_the_reply_is_over_is_nobodys_and_a_sweep_forgets_who_watched() -> None:
    kept: list[Any] = []

    def keep(request: ModelRequest) -> dict[str, str]:
        kept.append(request.on_text)
        return {"text": "done"}

    run, other = started(ScriptedModel([keep])), started(Talking("a"), "s2", watched=False)
    Draft.objects.create(run=other, watched_until=Now() - timedelta(minutes=2), text="left by the dead")
    assert sweep().completed == 2
    assert list(Draft.objects.values_list("pk", flat=True)) == [run.pk]
    wait_for(is_quiet, "the thread to end")
    kept[0]("late")
    assert is_quiet()


def test_of_a_long_reply_the_beginning_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "LONGEST", 10)
    write("123456789 ", "abc", after=lambda run, said: is_shown(run, "123456789 "))
