"""Random histories, forked anywhere, replayed, exported and imported: each copy says what its origin said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from hypothesis import given, note, strategies as st
from pydantic import BaseModel

from agentruns import ToolContext, ask_human, export_run, fork_run, replay_run, run_again, start_run, tool
from agentruns.exceptions import RunStateError
from agentruns.journal.store import load
from agentruns.journal.verify import problems
from agentruns.models import Approval, Definition, Message, Notification, Run, Session, triggers
from agentruns.services.data.repair import repair_session
from agentruns.services.sweep import sweep
from agentruns.services.transfer import import_run
from agentruns.testing import check_messages
from tests.effects import Effects
from tests.properties.faults import CALLS, CLICKS, DEATHS, NUMBER, clear, drive, scripts, surviving, tried_on
from tests.properties.machine import OLD_TOOLS
from tests.registry import isolated_registry
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

INLINE_MAX = 2_000
ASKED = "do it " * 500
REPEATABLE = ("lookup", "search", "charge")  # they may act twice, with the same key


@tool(safe_to_retry=True)
def report(ctx: ToolContext) -> str:
    """Return more than a row should hold."""
    return "all of it " * 300


class Answer(BaseModel):
    """What a last text does not fit."""

    total: int


TOOLS = [*OLD_TOOLS, report, ask_human]
TURNS = scripts([*CALLS, *[call("report"), call("ask_human", question="Which?"), call("wire", cents=1)] * 2])
OPTIONS: list[dict[str, Any]] = [{}, {}, {"on_orphan": "surface"}, {"output_type": Answer}, {"max_steps": 2}]
# Which run, where in it, with what text, and whether the fork is driven.
CUTS = st.tuples(st.integers(0, 9), st.integers(0, 99), st.sampled_from([None, "and now?"]), st.booleans())
LIVES = st.tuples(CLICKS | st.just(["wait"]), DEATHS)


class World:
    """An agent, its runs and their copies, and what happens to them."""

    def __init__(self, effects: Effects, deaths: list[Any]) -> None:
        self.effects, self.deaths = effects, deaths
        self.runs: list[Run] = []
        self.confirmed = 0  # times that somebody said that an effect did not happen

    def live(self, run: Run, life: tuple[list[str], list[Any]]) -> None:
        """Drive a run through clicks and deaths."""
        clicks, self.deaths[:] = life
        self.confirmed += clicks.count("not_occurred")
        drive(run, clicks)
        self.deaths.clear()

    def fork(self, cut: tuple[int, int, str | None, bool], life: Any) -> None:
        """Fork one of the runs at one of its rows."""
        which, where, text, is_driven = cut
        run = self.runs[which % len(self.runs)]
        seqs = list(run.messages.order_by("seq").values_list("seq", flat=True))
        before = self.effects.count()
        try:
            made = fork_run(run.pk, seqs[where * len(seqs) // 100], text=text)
        except RunStateError as error:
            note(f"# {error}")
            assert text is None
            return
        state = load("default", made.session_id, made.pk)
        check_messages(state.conversation.messages())
        assert (state.run.open_calls(), self.effects.count(), problems(made.session_id)) == ([], before, [])
        if is_driven:
            self.live(made, life)
        self.runs.append(made)

    def check(self) -> None:
        """Nothing was done twice, columns are what journals say, and each replay is equal."""
        keys = [line["key"] for line in self.effects.lines() if line["tool"] not in REPEATABLE]
        assert len(keys) <= len(set(keys)) + self.confirmed, "an effect was repeated"
        for run in self.runs:
            assert repair_session("default", run.session_id) == ([], [])
            for model in (None, "own"):
                found = replay_run(run.pk, model=model)
                assert (found.difference, found.seq, found.notes) == (None, None, [])


def elsewhere(folder: Path) -> None:
    """Let this be another database and storage, which know nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    with triggers.lifted(connection), transaction.atomic():
        for model in (Notification, Approval, Message, Run, Session, Definition):
            model.objects.all().delete()


def stored() -> tuple[list[Any], list[Any]]:
    """Read all of runs and cards but who drives, whose they are and who decided."""
    names = ("id", "session_id", "agent", "version", "definition_id", "input", "step", "usage", "output")
    names += ("error", "pending_calls", "idempotency_key", "origin_id", "origin_seq")
    cards = list(Approval.objects.order_by("pk").values())
    for card in cards:
        del card["decided_by_id"], card["decided_by_name"]  # marked as imported
    return list(Run.objects.order_by("pk").values(*names)), cards


def move(runs: list[Run], folder: Path) -> None:
    """Export each session, import it elsewhere, and export it again: the same lines, an open run closed."""
    exports = {run.session_id: list(export_run(run.pk, true_values=True)) for run in runs}
    before, closed = stored(), False
    unfinished = set(Run.objects.unfinished().values_list("session_id", flat=True))
    elsewhere(folder)
    for session_id, lines in exports.items():
        imported = import_run(lines)
        assert problems(imported.session_id) == []
        again = list(export_run(imported.pk, true_values=True))[1:-1]
        assert again[: len(lines) - 2] == lines[1:-1]
        closing = [line["kind"] for line in again[len(lines) - 2 :]]
        assert (closing[-1:] == ["run_cancelled"]) == (session_id in unfinished)
        assert set(closing[:-1]) <= {"tool_result"}
        closed = closed or bool(closing)
    assert closed or stored() == before


@tried_on(20, brief=6, long=500)
@given(
    turns=TURNS, options=st.sampled_from(OPTIONS), life=LIVES, ends=st.booleans(), forked=LIVES,
    cuts=st.lists(CUTS, min_size=1, max_size=4),
)  # fmt: skip
def test_copies_say_what_their_origins_said(
    turns: list[Any],
    options: dict[str, Any],
    life: Any,
    ends: bool,
    forked: Any,
    cuts: list[Any],
    effects: Effects,
    deaths: list[Any],
    folder: Path,
    settings: Any,
) -> None:
    settings.AGENTRUNS_PAYLOAD_INLINE_MAX = INLINE_MAX
    Order.objects.get_or_create(number="A1", customer="Ada", total_cents=100)
    effects.path.unlink(missing_ok=True)
    elsewhere(folder)
    world = World(effects, deaths)
    with isolated_registry():
        shop_agent("copied", *turns, tools=TOOLS, **options)
        session = f"copied-{next(NUMBER)}"
        world.runs.append(start_run("copied", ASKED, session, idempotency_key=session))
        world.live(world.runs[0], life)
        if ends:
            clear(world.runs[0])
            world.runs.append(run_again(world.runs[0].pk))
            surviving(sweep)
        for cut in cuts:
            world.fork(cut, forked)
        world.check()
        move(world.runs, folder)
