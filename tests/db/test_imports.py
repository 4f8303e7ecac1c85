"""An export read back into a database that has nothing of it: the same rows, the same hashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.files.storage import storages

from agentruns import ToolContext, approve, export_run, fork_run, run_again, run_agent, tool
from agentruns.exceptions import PayloadError, RunStateError
from agentruns.journal.verify import problems
from agentruns.models import Approval, Definition, Message, Run, Session
from agentruns.models.parts import commitment
from agentruns.services.sweep import Swept, hold_all, sweep
from agentruns.services.transfer import import_run
from agentruns.utils import json as canonical
from tests.commands.running import run as command
from tests.db.doubts import wire
from tests.db.exports import Line, forget_everything, sealed
from tests.db.helpers import outcomes, payloads, run_turns, the_run, user
from tests.effects import Effects
from tests.shop.agents import call, shop_agent
from tests.statements import broken_commit

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def story() -> Run:
    """A session of two runs, the first with a gated call, both ended."""
    first = run_turns({"tools": [call("lookup", number="A1"), call("refund", cents=5000)]})
    approve(first.pending[0].pk, None, reason="fine")
    assert sweep().completed == 1
    agent = shop_agent("later", {"text": "odd \x00 \ud800", "tools": [call("post", text="hi")]})
    return the_run(run_agent(agent, "more", "s1", idempotency_key="k2"))


def contents(*models: Any) -> list[Any]:
    left_out = {"id", "owner_id", "created_at", "imported_at", "decided_by_name"}
    return [
        {
            name: value
            for name, value in row.items()
            if name not in left_out or (model is Run and name == "id")
        }
        for model in models
        for row in model.objects.order_by("pk").values()
    ]


def test_everything_comes_back_with_the_same_hashes() -> None:
    run = story()
    run.refresh_from_db()
    lines = [json.loads(json.dumps(line)) for line in export_run(run.pk, true_values=True)]
    before = contents(Message, Session, Approval)
    folded = list(
        Run.objects.order_by("pk").values("id", "status", "step", "input", "output", "idempotency_key")
    )
    forget_everything()
    imported = import_run(lines)
    assert contents(Message, Session, Approval) == before
    assert (
        list(Run.objects.order_by("pk").values("id", "status", "step", "input", "output", "idempotency_key"))
        == folded
    )
    assert problems(imported.session_id) == []
    again = list(export_run(imported.pk, true_values=True))
    assert again[1:-1] == lines[1:-1]
    assert sweep() == Swept(), "nothing of it is at work here"
    assert Approval.objects.get().decided_by_name == "(imported)"
    assert Session.objects.get().imported_at is not None
    with pytest.raises(RunStateError, match=r"There is a session .* already; nothing was imported"):
        import_run(lines)


def test_a_run_at_work_is_closed_here(effects: Effects) -> None:
    waiting = run_turns({"tools": [call("refund", cents=5000)]})
    lines = list(export_run(str(waiting.run_id), true_values=True))
    forget_everything()
    run = import_run(lines)
    assert (run.status, outcomes(run), Approval.objects.get().status) == (
        "cancelled", ["unknown"], "cancelled",
    )  # fmt: skip
    (closed,) = payloads(run, "run_cancelled")
    assert closed["reason"] == ("imported, waiting then: it may go on in the database it came from")
    with pytest.raises(RunStateError, match="it is a record"):
        approve(Approval.objects.get().pk, None)
    assert sweep() == Swept()
    assert (effects.count(), problems(run.session_id)) == (0, [])


def test_a_run_that_is_held_with_a_call_in_doubt() -> None:
    doubtful = run_turns({"tools": [call("wire", text="x")]}, tools=[wire])
    assert hold_all() == 1
    lines = list(export_run(str(doubtful.run_id), true_values=True))
    forget_everything()
    run = import_run(lines)
    assert (run.status, outcomes(run), problems(run.session_id)) == ("cancelled", ["unknown"], [])
    again = list(export_run(run.pk, true_values=True))
    assert again[1 : len(lines) - 1] == lines[1:-1]
    assert [line["kind"] for line in again[len(lines) - 1 : -1]] == ["tool_result", "run_cancelled"]


def test_whose_it_was_and_an_acknowledgement_that_is_lost() -> None:
    ann, staff = user("ann"), user("staff", "fork_run")
    run = the_run(run_agent(shop_agent("hers"), "do it", "hers", actor=ann))
    lines = list(export_run(run_again(run.pk, staff).pk, true_values=True))
    forget_everything()
    with broken_commit(1, went_through=True):
        import_run(lines)
    assert {*Run.objects.values_list("owner_name", "session__owner_name")} == {("ann", "ann")}


def alter(number: int, **changes: Any) -> Callable[[list[Line]], None]:
    return lambda lines: lines[number].update(changes)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
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
        (alter(5, created_at="yesterday"), "no export of a run"),
        (alter(1, body='{"agent":"other"}'), "was altered"),
        (
            lambda lines: [lines.remove(one) for one in lines[1:] if "definition" in one],
            "lacks the definitions",
        ),
        (alter(0, version=4), "no export of version 3"),
        (alter(0, run="01a20189-67e9-70a1-9b0c-1b07670a3b0b"), "has no row of run"),
        (lambda lines: lines.clear(), "no export of version 3"),
    ],
)
def test_nothing_is_stored_of_an_export_that_is_not_whole(
    damage: Callable[[list[Line]], None], said: str
) -> None:
    lines = list(export_run(story().pk, true_values=True))
    forget_everything()
    damage(lines)
    with pytest.raises(RunStateError, match=said):
        import_run(lines)
    assert not Session.objects.exists()
    assert not Definition.objects.exists()


def test_a_key_that_stands_for_a_run_here() -> None:
    lines = list(export_run(story().pk, true_values=True))
    forget_everything()
    run_agent(shop_agent("mine"), "other", "other", idempotency_key="k2")
    with pytest.raises(RunStateError, match="Idempotency key 'k2' stands for run"):
        import_run(lines)
    assert Session.objects.count() == 1


def test_a_fork_without_its_origin(tmp_path: Path) -> None:
    run = story()
    fork = fork_run(run.pk, run.messages.filter(kind="tool_result").latest("seq").seq)
    sweep()
    exported = tmp_path / "run.jsonl"
    exported.write_text(command("export_run", str(fork.pk), "--true-values").out, encoding="utf-8")
    forget_everything()
    outcome = command("import_run", str(exported))
    assert (outcome.code, "intact" in outcome.out) == (0, True)
    fork = Run.objects.get()
    assert (fork.origin_id, fork.input, problems(fork.session_id)) == (run.pk, "more", [])
    refused = command("import_run", str(exported))
    assert (refused.code, "already" in refused.err) == (1, True)
    assert command("import_run", str(tmp_path / "none")).code == 2


@tool(name="report", safe_to_retry=True)
def report(ctx: ToolContext) -> str:
    """Return far more than a row should hold."""
    return "all of it " * 20_000


def test_files_come_along(folder: Path) -> None:
    shop_agent("reporting", {"tools": [call("report")]}, tools=[report])
    run = the_run(run_agent("reporting", "long " * 20_000, "s7", idempotency_key="s7"))
    lines = list(export_run(run.pk, true_values=True))
    parts = [line for line in lines if "file" in line]
    assert len({part["file"] for part in parts}) == 2
    forget_everything()
    for part in parts:
        storages["agentruns"].delete(part["file"])
    with pytest.raises(PayloadError, match="altered"):
        import_run(sealed([line for line in lines if line != parts[-1]]))
    left_out = {"file": parts[0]["file"], "of": parts[0]["of"], "left_out": "secret"}
    with pytest.raises(RunStateError, match="is left out: secret"):
        import_run(sealed([left_out if line == parts[0] else line for line in lines]))
    assert not Session.objects.exists()
    imported = import_run(lines)
    assert (imported.input, problems(run.session_id)) == ("long " * 20_000, [])
    assert list(export_run(run.pk, true_values=True))[1:-1] == lines[1:-1]


@pytest.mark.parametrize("depth", [150, 488, 600, 5_000])
def test_a_row_that_nobody_could_read_is_not_imported(depth: int, effects: Effects) -> None:
    run = the_run(run_turns({"tools": [call("post", text="hi")]}))
    lines = list(export_run(run.pk, true_values=True))
    forget_everything()
    deep, head = "[" * depth + "]" * depth, ""
    for line in (line for line in lines if "seq" in line):
        if line["kind"] == "tool_result":
            line["content"] = line["content"].replace('"post done"', deep)
            line["content_hash"] = commitment(line["content_salt"], line["content"])
        line["prev_hash"] = head or line["prev_hash"]
        outside = {"prev_hash", "hash", "facts", "facts_salt", "content", "content_salt"}
        row = {name: value for name, value in line.items() if name not in outside}
        text = canonical.dumps({**row, "session": lines[0]["session"]["id"]})
        line["hash"] = head = canonical.sha256(line["prev_hash"] + text)
    lines[0]["head"]["hash"] = head
    with pytest.raises(RunStateError, match=r"nested more than 128 levels|cannot be folded|no export"):
        import_run(lines)
    assert not Session.objects.exists()
