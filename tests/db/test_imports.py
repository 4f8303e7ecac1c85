"""An export read into a database that has nothing of it: imported whole, or refused and nothing is stored.

The imported run is a record: read, verified, replayed and forked; nothing of it allows an effect.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.test import Client
from hypothesis import HealthCheck, given, settings, strategies as st

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
    tool,
)
from agentruns.admin.approvals.card import precedents
from agentruns.exceptions import AgentRunsError, PayloadError, RunStateError
from agentruns.journal.events import Row, timestamp
from agentruns.journal.verify import problems
from agentruns.models import Approval, Definition, Message, Notification, Run, Session
from agentruns.models.parts import commitment
from agentruns.services.approvals.decisions import extend
from agentruns.services.runs.control import hold_run
from agentruns.services.runs.lifecycle import surface_orphans
from agentruns.services.runs.waiting import uncleared
from agentruns.services.runs.write import write
from agentruns.services.sweep import Swept, hold_all, sweep
from agentruns.services.transfer import import_run
from agentruns.utils import json as canonical
from tests.admin.people import user as person
from tests.api.http import Api
from tests.commands.running import run as command
from tests.db.doubts import wire
from tests.db.exports import Line, forget_everything, report, sealed
from tests.db.helpers import names, outcomes, payloads, run_turns, the_run, user
from tests.effects import Effects
from tests.files import stored_in
from tests.rows import sealed as seal
from tests.settings import BRIEF
from tests.shop.agents import TOOLS, call, shop_agent
from tests.statements import broken_commit

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

GATED = {"tools": [call("refund", cents=5000)]}
FOLDED = ("id", "status", "step", "input", "output", "idempotency_key")
OUTSIDE = {"prev_hash", "hash", "facts", "facts_salt", "content", "content_salt"}


def lines_of(run: Run | str | None) -> list[Line]:
    return list(export_run(str(getattr(run, "pk", run)), true_values=True))


def moved(run: Run | str | None) -> list[Line]:
    """Export a run, and let the database forget it."""
    lines = lines_of(run)
    forget_everything()
    return lines


def chained(lines: list[Line]) -> list[Line]:
    """Compute all commitments and hashes anew, as a forger would."""
    head = ""
    for line in lines:
        if "seq" not in line:
            continue
        for part in ("facts", "content"):
            if isinstance(line.get(part), str) and isinstance(line.get(f"{part}_salt"), str):
                line[f"{part}_hash"] = commitment(line[f"{part}_salt"], line[part])
        line["prev_hash"] = head or line["prev_hash"]
        row = {name: value for name, value in line.items() if name not in OUTSIDE}
        row["session"] = lines[0]["session"]["id"]
        line["hash"] = head = canonical.sha256(line["prev_hash"] + canonical.dumps(row))
    lines[0]["head"]["hash"] = head
    return sealed(lines)


# The same rows, the same hashes


def story() -> Run:
    """Run two tasks in a session, the first with a gated call, both ended."""
    first = run_turns({"tools": [call("lookup", number="A1"), call("refund", cents=5000)]})
    approve(first.pending[0].pk, None, reason="fine")
    assert sweep().completed == 1
    agent = shop_agent("later", {"text": "odd \x00 \ud800", "tools": [call("post", text="hi")]})
    return the_run(run_agent(agent, "more", "s1", idempotency_key="k2"))


def contents(*models: Any) -> list[Any]:
    left_out = {"id", "owner_id", "created_at", "imported_at", "decided_by_name"}
    rows = [row for model in models for row in model.objects.order_by("pk").values()]
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]


def test_everything_comes_back_with_the_same_hashes() -> None:
    run = story()
    before = contents(Message, Session, Approval), [*Run.objects.order_by("pk").values(*FOLDED)]
    lines = [json.loads(json.dumps(line)) for line in moved(run)]
    run_agent(shop_agent("mine"), "other", "other", idempotency_key="k2")
    with pytest.raises(RunStateError, match="Idempotency key 'k2' stands for run"):
        import_run(lines)
    assert Session.objects.count() == 1
    forget_everything()
    imported = import_run(lines)
    assert (contents(Message, Session, Approval), [*Run.objects.order_by("pk").values(*FOLDED)]) == before
    assert (problems(imported.session_id), lines_of(imported)[1:-1]) == ([], lines[1:-1])
    assert sweep() == Swept(), "nothing of it is at work here"
    assert Approval.objects.get().decided_by_name == "(imported)"
    assert Session.objects.get().imported_at is not None
    with pytest.raises(RunStateError, match=r"There is a session .* already; nothing was imported"):
        import_run(lines)


@pytest.mark.parametrize("waits", ["for a person", "held, with a call in doubt"])
def test_a_run_at_work_is_closed_here(waits: str, effects: Effects) -> None:
    if waits == "for a person":
        started = run_turns(GATED)
    else:
        started = run_turns({"tools": [call("wire", text="x")]}, tools=[wire])
        assert hold_all() == 1
    before, lines = effects.count(), moved(started.run_id)
    run = import_run(lines)
    assert (run.status, outcomes(run), problems(run.session_id)) == ("cancelled", ["unknown"], [])
    again = lines_of(run)
    assert again[1 : len(lines) - 1] == lines[1:-1]
    assert [line["kind"] for line in again[len(lines) - 1 : -1]] == ["tool_result", "run_cancelled"]
    (closed,) = payloads(run, "run_cancelled")
    assert closed["reason"].endswith(" then: it may go on in the database it came from")
    for card in Approval.objects.all():
        assert card.status == "cancelled"
        with pytest.raises(RunStateError, match="it is a record"):
            approve(card.pk, None)
    assert (sweep(), effects.count()) == (Swept(), before)


def test_whose_it_was_and_an_acknowledgement_that_is_lost() -> None:
    ann, staff = user("ann"), user("staff", "fork_run")
    run = the_run(run_agent(shop_agent("hers"), "do it", "hers", actor=ann))
    lines = moved(run_again(run.pk, staff))
    with broken_commit(1, went_through=True):
        import_run(lines)
    assert {*Run.objects.values_list("owner_name", "session__owner_name")} == {("ann", "ann")}


def without_definitions(lines: list[Line]) -> None:
    lines[1:] = [line for line in lines[1:] if "definition" not in line]


def alter(number: int, **changes: Any) -> Callable[[list[Line]], None]:
    return lambda lines: lines[number].update(changes)


DAMAGES: list[tuple[Callable[[list[Line]], Any], str]] = [
    (lambda lines: lines.pop(), "last line, with the hash of all others, is missing"),
    (lambda lines: lines.pop(-2), "the journal ends at"),
    (lambda lines: lines.append(lines[-1]), "goes on after its last line"),
    (lambda lines: lines.insert(1, lines[1]), "is there twice"),
    (alter(0, exported_at="2026-01-01T00:00:00+00:00"), "last line, with the hash of all others"),
    (alter(0, version=2), "no export of version 3"),
    (alter(-1, end="0" * 64), "last line, with the hash of all others"),
    (lambda lines: lines.pop(5), "is missing"),
    (lambda lines: lines.insert(6, lines[5]), "is missing"),
    (alter(5, facts='{"v":1}'), "was altered"),
    (alter(5, kind="user"), "was altered"),
    (alter(5, content_redacted="x"), "redacted"),
    (alter(5, created_at="yesterday"), "created_at is .yesterday., no time"),
    (alter(1, body='{"agent":"other"}'), "was altered"),
    (without_definitions, "lacks the definitions"),
    (alter(0, version=4), "no export of version 3"),
    (alter(0, run="01a20189-67e9-70a1-9b0c-1b07670a3b0b"), "has no row of run"),
    (lambda lines: lines.clear(), "no export of version 3"),
]


def test_nothing_is_stored_of_an_export_that_is_not_whole(folder: Path) -> None:
    lines = moved(story())
    for number, (damage, said) in enumerate(DAMAGES):
        damage(changed := copy.deepcopy(lines))
        with pytest.raises(RunStateError, match=said):
            import_run(changed)
        assert nothing_is_stored(folder), number


def test_a_fork_without_its_origin(tmp_path: Path) -> None:
    run = story()
    fork = fork_run(run.pk, run.messages.filter(kind="tool_result").latest("seq").seq)
    sweep()
    path = tmp_path / "run.jsonl"
    path.write_text(command("export_run", str(fork.pk), "--true-values").out, encoding="utf-8")
    forget_everything()
    outcome = command("import_run", str(path))
    assert (outcome.code, "intact" in outcome.out) == (0, True)
    fork = Run.objects.get()
    assert (fork.origin_id, fork.input, problems(fork.session_id)) == (run.pk, "more", [])
    refused = command("import_run", str(path))
    assert (refused.code, "already" in refused.err) == (1, True)
    forget_everything()
    first, _second, *rest = path.read_text(encoding="utf-8").splitlines()
    for text in ('{"format": ' + "[" * 100_000, "[]", "7", "nonsense", '{"format": 1e999}'):
        path.write_text("\n".join([first, text, *rest]), encoding="utf-8")
        outcome = command("import_run", str(path))
        assert (outcome.code, outcome.out) == (1, "")
        assert ("Line " in outcome.err, "Traceback" in outcome.err) == (True, False)
        assert not Session.objects.exists(), text[:20]
    assert command("import_run", str(tmp_path / "none")).code == 2


# Changed and forged


def with_a_file(folder: Path) -> list[Line]:
    """Export a run with a file and an approval, and forget the run and the file."""
    turn = {"tools": [call("report"), call("refund", cents=5000)]}
    run = the_run(run_turns(turn, tools=[report, *TOOLS], text="long " * 20_000))
    approve(Approval.objects.get().pk, None)
    assert sweep().completed == 1
    lines = [json.loads(json.dumps(line)) for line in moved(run)]
    empty(folder)
    return lines


def empty(folder: Path) -> None:
    for path in stored_in(folder):
        path.unlink()


def nothing_is_stored(folder: Path) -> bool:
    rows = any(model.objects.exists() for model in (Session, Run, Message, Approval, Definition))
    return not rows and not stored_in(folder)


def test_files_come_along(folder: Path) -> None:
    lines = with_a_file(folder)
    parts = [line for line in lines if "file" in line]
    assert len({part["file"] for part in parts}) == 2
    first, last = (lines.index(parts[place]) for place in (0, -1))
    left_out = {"file": parts[0]["file"], "of": parts[0]["of"], "left_out": "secret"}
    for error, said, changed in (
        (PayloadError, "altered", [*lines[:last], *lines[last + 1 :]]),
        (PayloadError, "altered", [*lines[:last], {**parts[-1], "data": "AAAA"}, *lines[last + 1 :]]),
        (RunStateError, "is left out: secret", [*lines[:first], left_out, *lines[first + 1 :]]),
    ):
        with pytest.raises(error, match=said):
            import_run(sealed(changed))
        assert nothing_is_stored(folder), "nor the file before that one"
    imported = import_run(lines)
    assert (imported.input, problems(imported.session_id)) == ("long " * 20_000, [])
    assert lines_of(imported)[1:-1] == lines[1:-1]


def test_a_row_that_nobody_could_read_is_not_imported() -> None:
    lines = moved(the_run(run_turns({"tools": [call("post", text="hi")]})))
    (place,) = (number for number, line in enumerate(lines) if line.get("kind") == "tool_result")
    for depth in (150, 488, 600, 5_000):
        deep = copy.deepcopy(lines)
        deep[place]["content"] = deep[place]["content"].replace('"post done"', "[" * depth + "]" * depth)
        with pytest.raises(RunStateError, match=r"nested more than 128 levels|cannot be folded|no export"):
            import_run(chained(deep))
        assert not Session.objects.exists(), depth


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        found += places(inner, (*path, name))
    return found


VALUES = [
    None, True, -1, 0, 1.0, 2**31, 2**63, 10**400, "", "\x00", "\ud800", "x" * 300, "../../etc/passwd", {},
    [], "2026-01-01", "9999-12-31T23:59:59-23:59", "01a20189-67e9-70a1-9b0c-1b07670a3b0b",
]  # fmt: skip
ODD = st.one_of(
    st.sampled_from(VALUES),
    st.text(max_size=5),
    st.integers(),
    st.sampled_from([150, 900]).map(lambda depth: reduce(lambda value, _: [value], range(depth), [])),
)


def mutated(lines: list[Line], data: st.DataObject) -> None:
    """Change one place of the lines, or inside the text of one part of a row."""
    number = data.draw(st.integers(0, len(lines) - 2))
    line, odd = lines[number], data.draw(ODD)
    if "seq" in line and data.draw(st.booleans()):
        part = data.draw(st.sampled_from(["facts", "content"]))
        payload = json.loads(line[part])
        paths = places(payload)
        if paths:
            *path, name = data.draw(st.sampled_from(paths))
            reduce(getitem, path, payload)[name] = odd
        try:
            line[part] = canonical.dumps(payload)
        except (ValueError, TypeError):
            line[part] = json.dumps(payload)
        return
    *path, name = data.draw(st.sampled_from(places(line)))
    reduce(getitem, path, line)[name] = odd


def test_any_change_is_refused_or_imported_whole(folder: Path) -> None:
    lines = with_a_file(folder)

    @settings(max_examples=40 if BRIEF else 400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        made = copy.deepcopy(lines)
        mutated(made, data)
        if data.draw(st.booleans()):
            with suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
                made = chained(copy.deepcopy(made))
        try:
            run = import_run(made)
        except (RunStateError, PayloadError):
            assert nothing_is_stored(folder)
            return
        assert problems(run.session_id) == []
        forget_everything()
        empty(folder)

    check()
    assert import_run(lines).status == "completed"


TIMES = {
    "not_before": "run_started", "expires_at": "approval_requested", "from": "approval_extended",
    "started_at": "orphan_found", "remind_at": "approval_requested", "escalate_at": "approval_requested",
    "due": "approval_reminded", "copied.at": "user", "created_at": "tool_result",
}  # fmt: skip
NO_TIMES = [
    "2026-01-01", "2026-01-01T00:00:00", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+00:00", "", "soon",
    7, True, [], {},
]  # fmt: skip


def test_no_time_without_an_offset_is_imported() -> None:
    hour = timedelta(hours=1)
    soon = {"remind_after": timedelta(microseconds=1), "escalate_after": hour, "escalate_to": "managers"}
    asks = tool(requires_approval=True, expires_in=hour, name="asks", **soon)(lambda: "done")  # type: ignore[call-overload]
    started = run_turns({"tools": [call("asks")]}, {"tools": [call("wire", text="b")]}, tools=[asks, wire])
    sweep()
    extend(started.pending[0].pk, None, hour)
    approve(started.pending[0].pk, None)
    sweep()
    cancel_run(str(started.run_id))
    lines = moved(fork_run(str(started.run_id), Message.objects.count() - 1, text="go on", session="fork"))
    for name, kind in TIMES.items():
        place = next(at for at, line in enumerate(lines) if line.get("kind") == kind)
        for odd in NO_TIMES:
            line = (changed := copy.deepcopy(lines))[place]
            if name == "created_at":
                line[name] = odd
            else:
                facts = json.loads(line["facts"])
                reduce(getitem, name.split(".")[:-1], facts)[name.split(".")[-1]] = odd
                line["facts"] = canonical.dumps(facts)
            says = f"Line {place + 1}: Row {line['seq']} ({kind}): {name} is {odd!r}, no time with its offset"
            with pytest.raises(RunStateError, match="^" + re.escape(says)):
                import_run(chained(changed))
        assert not Session.objects.exists()
    assert import_run(lines).session.key == "fork"


NAMES = [
    "/etc/passwd", "../secret", "{session}/../x", "{session}/a/b", "{session}/", "{session}/..", "{session}",
    "{session}/.hidden", "{session}/a\\b", "{session}/a\x00b", "other", "", "{session}/a\u202eb",
    "01a20189-67e9-70a1-9b0c-1b07670a3b0b/input-00", "{session}/" + "a" * 300,
]  # fmt: skip


def test_a_file_has_the_name_of_one_of_its_session(folder: Path) -> None:
    lines = with_a_file(folder)
    for name in NAMES:
        changed = copy.deepcopy(lines)
        for line in changed:
            if '"stored"' in (line.get("content") or ""):
                content = json.loads(line["content"])
                content["stored"]["name"] = name.format(session=lines[0]["session"]["id"])
                line["content"] = canonical.dumps(content)
        with pytest.raises(PayloadError, match=r"^Line \d+: .* is not named as the files of its session are"):
            import_run(chained(changed))
        assert nothing_is_stored(folder), name


# A record allows nothing


def with_approval(lines: list[Line], card: Approval) -> list[Line]:
    """Forge an export: add an approval after its last row, with a hash that fits."""
    head, last = lines[0], lines[-2]
    who = {"id": str(user("somebody").pk), "name": "the boss"}  # an id that is somebody else here
    yes = {"v": 1, "verb": "approve", "digest": card.digest, "actor": who}
    row = Row(
        seq=last["seq"] + 1, run_id=UUID(last["run"]), kind="approval_decided", call_id=card.call_id,
        tool_name="refund", attempt=0, epoch=0, payload={**yes, "reason": "fine", "channel": "console"},
        created_at=datetime.fromisoformat(last["created_at"]), prev_hash=last["hash"], hash="", consumes=None,
    )  # fmt: skip
    row, parts = seal(UUID(head["session"]["id"]), row)
    added = {
        **row._asdict(), **parts._asdict(), "run": last["run"], "created_at": timestamp(row.created_at),
    }  # fmt: skip
    del added["run_id"], added["payload"]
    return sealed([{**head, "head": {"seq": row.seq, "hash": row.hash}}, *lines[1:-1], added])


def forged() -> Run:
    """Import an export of a run that waits for a person, to which somebody added that person's approval."""
    waiting = run_turns(GATED)
    lines = with_approval(lines_of(waiting.run_id), waiting.pending[0])
    forget_everything()
    return import_run(lines)


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


def test_an_added_approval_starts_nothing(effects: Effects) -> None:
    run = forged()
    assert (problems(run.session_id), sweep()) == ([], Swept())
    with pytest.raises(RunStateError, match=r"was imported .*: it is a record"):
        resume_run(run.pk)
    head = run.session.next_seq
    for name, act in ACTS.items():
        with pytest.raises(AgentRunsError):
            act(run)
        now = Run.objects.select_related("session").get()
        assert (now.status, now.session.next_seq, effects.count()) == ("cancelled", head, 0), name
    assert (problems(run.session_id), sweep(tell_model=True), effects.count()) == ([], Swept(), 0)
    approval = Approval.objects.get()
    assert (approval.status, approval.decided_by_id, approval.decided_by_name) == (
        "cancelled", None, "the boss (imported)",
    )  # fmt: skip
    assert state_at(run.pk, run.messages.latest("seq").seq).status == "cancelled"
    fork = fork_run(run.pk, run.messages.get(kind="approval_decided").seq)
    sweep()
    assert effects.count() == 0
    assert [row["outcome"] for row in payloads(fork, "tool_result")] == ["unknown"]


def test_it_is_read_verified_replayed_and_forked(effects: Effects, settings: Any) -> None:
    settings.AGENTRUNS_NOTIFIERS = ["tests.bells.ignore"]
    first = run_turns(GATED, {"tools": [call("post", text="hello")]}, {"text": "done"}, {"text": "once"})
    approve(first.pending[0].pk, None, reason="fine")
    sweep()
    before, run = names(effects), import_run(moved(first.run_id))
    card = run_turns(GATED, session="s2").pending[0]
    assert precedents(Approval.objects.all(), card) == ("", []), "its decisions are none"
    cancel_run(card.run_id)
    Notification.objects.all().delete()
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
    run = forged()
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
