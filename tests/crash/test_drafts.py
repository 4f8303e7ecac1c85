"""A worker dies or freezes while it writes: its words are in no history, and nobody is shown them later."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from django.db.models.functions import Now

from agentruns import Agent, ModelReply, ModelRequest, start_run
from agentruns.api import stream
from agentruns.api.stream import Poller
from agentruns.engine import drafts
from agentruns.journal.verify import problems
from agentruns.models import Draft, Message, Run
from agentruns.services.sweep import sweep
from agentruns.services.transfer import export_run
from tests.api.http import make_user
from tests.api.streaming import Stream
from tests.crash import child
from tests.crash.processes import Forked, ended, expire_lease, finish, freeze, start
from tests.effects import Effects
from tests.waiting import pause, wait_for

pytestmark = pytest.mark.django_db(transaction=True)

WORDS = "words of one who is gone"


class Writing:
    """A model that writes for as long as there is a gate, or ends at once, as its process is told."""

    identity = "writing"

    def propose(self, request: ModelRequest) -> ModelReply:
        """Write."""
        if os.environ.get("SHOP_SLOW") != "writing":
            return ModelReply([{"type": "text", "text": "the answer"}], "end_turn")
        assert request.on_text is not None
        request.on_text(WORDS)
        while os.path.exists(os.environ["SHOP_GATE"]):
            request.on_text(".")
            Effects.from_environment().record("piece")
            pause()
        return ModelReply([{"type": "text", "text": WORDS}], "end_turn")


Agent("writes-long", instructions="Write.", model=Writing(), starters="anyone")


def serve(orders: child.Orders, pipe: Connection) -> None:
    """Serve, with the agent of this module, and look often."""
    drafts.LOOKS, drafts.PERIODS, drafts.PERIOD = 0.02, {}, 0.02
    child.serve(orders, pipe)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "poller", Poller())
    for name in ("FIRST_PAUSE", "LONGEST_PAUSE", "WRITING_PAUSE"):
        monkeypatch.setattr(Poller, name, 0.05)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file; the model stops writing when it is gone."""
    gate = tmp_path / "gate"
    gate.touch()
    return gate


def writing(gate: Path, **options: Any) -> tuple[Forked, Run, Stream]:
    """Start a worker that writes to a listener; return it when something has come."""
    owner = make_user("listener")
    run = start_run("writes-long", "do it", "s1", actor=owner)
    listener = Stream(owner, run)
    Draft.objects.update_or_create(pk=run.pk, defaults={"watched_until": Now() + timedelta(hours=1)})
    place = {"SHOP_SLOW": "writing", "SHOP_GATE": str(gate)}
    worker = start("advance", str(run.pk), serve=serve, **place, **options)
    wait_for(lambda: bool(Draft.objects.get(pk=run.pk).text), "a draft")
    return worker, run, listener


def nowhere(run: Run) -> None:
    """The words are in no history, and no listener who comes now is shown them."""
    assert problems(run.session_id) == []
    assert WORDS not in str(list(Message.objects.values_list("facts", "content")))
    assert WORDS not in str(list(export_run(run.pk)))
    assert Run.objects.get(pk=run.pk).output == "the answer"


def late(run: Run, listener: Any) -> None:
    """The sweep takes away what nobody watches."""
    late = Stream(listener, run)
    late.to_the_end()
    assert late.drafted() == []
    Draft.objects.update(watched_until=Now() - timedelta(minutes=2))
    sweep()
    assert not Draft.objects.exists()


def test_killed_while_it_writes(gate: Path) -> None:
    worker, run, listener = writing(gate)
    wait_for(lambda: bool(listener.poll() or listener.drafted()), "the draft")
    assert listener.drafted()[0].startswith(WORDS)
    worker.close()  # by SIGKILL
    assert WORDS in Draft.objects.get(pk=run.pk).text, "nobody was there to take it away"
    expire_lease(run)
    assert sweep().completed == 1
    seen = len(listener.drafted())
    listener.to_the_end()
    assert len(listener.drafted()) == seen, "of the dead nothing more is shown"
    nowhere(run)
    late(run, run.owner)


@pytest.mark.parametrize("point", ["after_model", "after_finish"])
def test_killed_at_the_moment_of_the_row(point: str, gate: Path) -> None:
    worker, run, _listener = writing(gate, point=point, dies=True)
    gate.unlink()
    assert ended(worker) == -signal.SIGKILL
    assert WORDS in Draft.objects.get(pk=run.pk).text
    run.refresh_from_db()
    if point == "after_model":
        expire_lease(run)
        assert sweep().completed == 1
        nowhere(run)
    else:
        assert (run.status, run.output) == ("completed", WORDS)
    late(run, run.owner)


def test_a_frozen_one_wakes_up_and_writes_on(gate: Path, effects: Effects) -> None:
    worker, run, listener = writing(gate)
    freeze(worker)
    expire_lease(run)
    listener.poll()
    frozen = len(listener.drafted())
    assert sweep().completed == 1
    written = effects.count("piece")
    worker.signal(signal.SIGCONT)
    wait_for(lambda: effects.count("piece") > written, "the words after")
    gate.unlink()
    finish(worker)
    listener.to_the_end()
    assert len(listener.drafted()) == frozen
    nowhere(run)
    late(run, run.owner)


def test_a_zombie_writes_over_nobodys_draft(gate: Path, effects: Effects) -> None:
    worker, run, listener = writing(gate)
    freeze(worker)
    expire_lease(run)
    run.refresh_from_db()
    mine = {"epoch": run.lease_epoch + 1, "text": "mine"}
    Run.objects.filter(pk=run.pk).update(lease_epoch=run.lease_epoch + 1)  # another has it now
    Draft.objects.filter(pk=run.pk).update(**mine)
    before = len(listener.drafted())
    listener.poll()
    written = effects.count("piece")
    worker.signal(signal.SIGCONT)

    def has_written() -> bool:
        listener.poll()
        return effects.count("piece") > written + 10 or not worker.process.is_alive()

    wait_for(has_written, "many words more, or the end of who has lost the run")
    assert listener.drafted()[before:] == ["mine"]
    gate.unlink()
    finish(worker)
    assert Draft.objects.get(pk=run.pk).text == "mine"
    listener.response.close()
