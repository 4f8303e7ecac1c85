"""An imported run is a record: read, verified, replayed and forked; nothing of it allows an effect."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from django.test import Client

from agentruns import (
    adopt_definition,
    answer,
    approve,
    cancel_run,
    deny,
    export_run,
    fork_run,
    pause_run,
    replay_run,
    resolve_orphan,
    resume_run,
    run_again,
    run_agent,
    start_run,
    state_at,
)
from agentruns.admin.approvals.card import precedents
from agentruns.exceptions import AgentRunsError, RunStateError
from agentruns.journal.events import Row, timestamp
from agentruns.journal.verify import problems
from agentruns.models import Approval, Notification, Run
from agentruns.services.control import hold_run
from agentruns.services.runs import surface_orphans
from agentruns.services.sweep import Swept, hold_all, sweep
from agentruns.services.transfer import import_run
from agentruns.services.waiting import uncleared
from agentruns.services.write import write
from tests.admin.people import user as person
from tests.api.http import Api
from tests.commands.running import run as command
from tests.db.exports import Line, forget_everything, sealed
from tests.db.helpers import names, outcomes, payloads, run_turns, user
from tests.effects import Effects
from tests.rows import sealed as seal
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)

GATED = {"tools": [call("refund", cents=5000)]}


def exported(run_id: Any) -> list[Line]:
    return list(export_run(str(run_id), true_values=True))


def with_rows(lines: list[Line], *added: dict[str, Any]) -> list[Line]:
    """Forge an export: add rows after the last one, each with a hash that fits."""
    lines = lines[:-1]  # without the hash of all of them
    head, last = lines[0], lines[-1]
    for line in added:
        row = Row(
            seq=last["seq"] + 1,
            run_id=UUID(last["run"]),
            kind=line["kind"],
            call_id=line["call_id"],
            tool_name=line["tool_name"],
            attempt=0,
            epoch=0,
            payload=line["payload"],
            created_at=datetime.fromisoformat(last["created_at"]),
            prev_hash=last["hash"],
            hash="",
            consumes=None,
        )
        row, parts = seal(UUID(head["session"]["id"]), row)
        last = {
            **row._asdict(), **parts._asdict(), "run": last["run"], "created_at": timestamp(row.created_at),
        }  # fmt: skip
        del last["run_id"], last["payload"]
        lines = [*lines, last]
    return sealed([{**head, "head": {"seq": last["seq"], "hash": last["hash"]}}, *lines[1:]])


def forged(effects: Effects) -> Run:
    """Import an export of a run that waits for a person, to which somebody added that person's approval."""
    waiting = run_turns(GATED)
    card = waiting.pending[0]
    who = {"id": str(user("somebody").pk), "name": "the boss"}  # an id that is somebody else here
    yes = {"v": 1, "verb": "approve", "digest": card.digest, "actor": who}
    lines = with_rows(
        exported(waiting.run_id),
        {
            "kind": "approval_decided",
            "call_id": card.call_id,
            "tool_name": "refund",
            "payload": {**yes, "reason": "fine", "channel": "console"},
        },
    )
    forget_everything()
    return import_run(lines)


def test_an_added_approval_starts_nothing(effects: Effects) -> None:
    run = forged(effects)
    assert problems(run.session_id) == []
    assert sweep() == Swept()
    with pytest.raises(RunStateError, match=r"was imported .*: it is a record"):
        resume_run(run.pk)
    assert (sweep(tell_model=True), effects.count()) == (Swept(), 0)
    approval = Approval.objects.get()
    assert (approval.status, approval.decided_by_id, approval.decided_by_name) == (
        "cancelled", None, "the boss (imported)",
    )  # fmt: skip
    assert state_at(run.pk, run.messages.latest("seq").seq).status == "cancelled"
    fork = fork_run(run.pk, run.messages.get(kind="approval_decided").seq)
    sweep()
    assert effects.count() == 0
    assert [row["outcome"] for row in payloads(fork, "tool_result")] == ["unknown"]


ACTS: dict[str, Callable[[Run], object]] = {
    "resume": lambda run: resume_run(run.pk),
    "resume later": lambda run: resume_run(run.pk, drive=False),
    "surface": lambda run: surface_orphans(run.pk, None),
    "cancel": lambda run: cancel_run(run.pk),
    "pause": lambda run: pause_run(run.pk),
    "hold": lambda run: hold_run(run.pk),
    "adopt": lambda run: adopt_definition(run.pk),
    "verdict": lambda run: resolve_orphan(
        run.pk, Approval.objects.get().call_id, "occurred", None, result="yes"
    ),
    "approve": lambda run: approve(Approval.objects.get().pk, None),
    "deny": lambda run: deny(Approval.objects.get().pk, None, "no"),
    "answer": lambda run: answer(Approval.objects.get().pk, None, "no"),
    "again": lambda run: run_again(run.pk),
    "start": lambda run: start_run("agent-s1", "something else", "s1"),
    "the same": lambda run: run_agent("agent-s1", "do it", "s1", idempotency_key="s1"),
    "its key": lambda run: start_run("agent-s1", "do it", "s1", idempotency_key="s1"),
    "a row": lambda run: write(run.pk, lambda run, batch: None, closed=True),
}


@pytest.mark.parametrize("act", ACTS)
def test_nothing_is_added_to_a_record(act: str, effects: Effects) -> None:
    run = forged(effects)
    head = run.session.next_seq
    with pytest.raises(AgentRunsError):
        ACTS[act](run)
    run = Run.objects.select_related("session").get()
    assert (run.status, run.session.next_seq, effects.count()) == ("cancelled", head, 0)
    assert problems(run.session_id) == []


def test_it_is_read_verified_replayed_and_forked(effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = ["tests.bells.ignore"]
    first = run_turns(GATED, {"tools": [call("post", text="hello")]}, {"text": "done"}, {"text": "once"})
    approve(first.pending[0].pk, None, reason="fine")
    sweep()
    lines = exported(first.run_id)
    forget_everything()
    before = names(effects)
    run = import_run(lines)
    assert (run.status, outcomes(run), hold_all()) == ("completed", ["ok", "ok"], 0)
    assert replay_run(run.pk).is_equal
    assert command("verify_journal").code == 0
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="and now?")
    assert names(effects) == before == ["refund", "post"]
    assert sweep().completed == 1
    fork.refresh_from_db()
    assert (fork.status, problems(fork.session_id), names(effects)) == ("completed", [], before)
    assert {*Notification.objects.values_list("run_id", flat=True)} == {fork.pk}, "nobody is told of a record"


def test_everything_that_shows_it_says_that_it_was_imported(effects: Effects) -> None:
    run = forged(effects)
    superuser = person("superuser")
    api, console = Api(superuser), Client()
    console.force_login(superuser)
    status, shown = api.get(f"/runs/{run.pk}")
    assert (status, shown["imported_at"] is not None) == (200, True)
    (approval,) = api.get("/approvals")[1]["items"]
    assert (approval["decided_by"], approval["decided_by_name"]) == (None, "the boss (imported)")
    assert api.post(f"/runs/{run.pk}/resume", {})[0] == 409
    assert api.post(f"/approvals/{approval['id']}/approve", {"digest": approval["digest"]})[0] == 409
    page = console.get(f"/admin/agentruns/run/{run.pk}/change/").content.decode()
    assert "a record; its decisions were made in another database" in page
    assert "the boss (imported)" in page
    assert "imported" in command("show_run", str(run.pk)).out
    resumed = command("resume_runs", "--run", str(run.pk))
    assert (effects.count(), resumed.code) == (0, 0)
    mine = start_run(shop_agent("mine"), "do it", "mine")
    assert api.get(f"/runs/{mine.pk}")[1]["imported_at"] is None
    assert uncleared("default", run) == []


def test_its_decisions_are_no_precedents(effects: Effects) -> None:
    first = run_turns(GATED)
    approve(first.pending[0].pk, None)
    sweep()
    lines = exported(first.run_id)
    forget_everything()
    import_run(lines)
    card = run_turns(GATED, session="s2").pending[0]
    assert precedents(Approval.objects.all(), card) == ("", [])
