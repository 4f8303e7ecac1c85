"""Rows whose content is gone: verified, shown, exported, imported, forked; and what no row accounts for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from agentruns import approve, export_run, fork_run, replay_run
from agentruns.exceptions import RunStateError
from agentruns.journal import events
from agentruns.journal.verify import problems
from agentruns.models import Approval, Run, triggers
from agentruns.services.repair import repair_session
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.services.transfer import import_run
from agentruns.services.write import write
from agentruns.testing import check_messages
from tests.api.http import Api
from tests.commands.running import run as command
from tests.db.exports import forget_everything
from tests.db.helpers import run_turns, the_run, user
from tests.effects import Effects
from tests.rows import erase
from tests.shop.agents import call

pytestmark = pytest.mark.django_db(transaction=True)

VERIFIER = Path(__file__).parents[2] / "docs/verify_export.py"
SECRET = "4929-1284-7730-1184"


@pytest.fixture
def run(effects: Effects) -> Run:
    """A completed run, of which every text says the same secret."""
    refund = call("refund", cents=5000)
    run = the_run(
        run_turns(
            {"text": f"I see {SECRET}", "tools": [refund, call("post", text=SECRET)]},
            {"text": f"Done with {SECRET}"},
            text=f"Pay {SECRET}",
        )
    )
    approve(Approval.objects.get().pk, None, arguments={"cents": 6000}, reason=f"for {SECRET}")
    sweep()
    return Run.objects.get(pk=run.pk)


def tell(run: Run, *seqs: int) -> None:
    """Write the rows that say who erased what."""

    def change(_run: Run, batch: Any) -> None:
        for seq in seqs:
            batch.add(events.PAYLOAD_ERASED, {"seq": seq, "actor": None, "reason": "asked for"})

    write(run.pk, change, closed=True)


def erased(run: Run) -> list[int]:
    """Erase the content of all rows of a run, say so, and fold its columns anew."""
    seqs = list(run.messages.order_by("seq").values_list("seq", flat=True))
    erase(*seqs, run=run)
    tell(run, *seqs)
    repair_session("default", run.session_id)
    return seqs


def test_content_that_is_gone_without_a_word_is_found(run: Run) -> None:
    seq = run.messages.filter(kind="tool_result").earliest("seq").seq
    erase(seq, run=run)
    gone = f"Session s1: seq {seq} (tool_result) its content is gone and no row says that it was erased."
    assert problems(run.session_id) == [gone]
    tell(run, seq + 1)
    assert problems(run.session_id) == [gone], "a row says so of another"
    tell(run, seq)
    assert problems(run.session_id) == []


def test_a_row_says_it_before_the_content_goes_is_no_excuse(run: Run) -> None:
    last = run.messages.latest("seq").seq
    tell(run, last + 2, 1)
    erase(last + 2, run=run)
    assert "no row says that it was erased" in problems(run.session_id)[0]


@pytest.mark.parametrize(
    "change",
    [
        {"content": None},
        {"content_salt": None},
        {"content_salt": "ab" * 16},
        {"content_hash": "ab" * 32},
        {"facts_salt": "ab" * 16},
        {"content": None, "content_salt": None, "content_hash": "ab" * 32},
        {"facts": {"v": 1}},
        {"content": {}},
    ],
)
def test_a_part_that_is_not_what_the_chain_committed_to_was_altered(run: Run, change: Any) -> None:
    with triggers.lifted(connection):
        run.messages.filter(seq=3).update(**change)
    assert problems(run.session_id) == ["Session s1: seq 3 (assistant) was altered."]


def test_everything_can_be_erased_and_all_that_reads_goes_on(run: Run, tmp_path: Path) -> None:
    staff = user("staff")
    staff.is_superuser = staff.is_staff = True
    staff.save()
    seqs = erased(run)
    assert problems(run.session_id) == []
    run = Run.objects.get(pk=run.pk)
    assert (run.status, run.output, run.step) == ("completed", "[erased]", 2)
    assert Approval.objects.get().arguments == {}
    assert SECRET not in str([row.payload for row in run.messages.all()])
    check_messages(result_of(run.pk).messages)
    api = Api(staff)
    status, page = api.get(f"/runs/{run.pk}/messages", limit=100)
    assert (status, len(page["items"])) == (200, len(seqs) * 2)
    assert api.get(f"/runs/{run.pk}")[0] == 200
    shown = command("show_run", str(run.pk))
    assert (shown.code, "row 3: asked for" in shown.out) == (0, True)
    with pytest.raises(RunStateError, match="rows of its session were erased: 2, 3"):
        replay_run(run.pk)


def test_an_erased_reply_keeps_its_calls_for_the_provider(run: Run) -> None:
    erased(run)
    blocks = [block for message in result_of(run.pk).messages for block in message["content"]]
    used = [block for block in blocks if block["type"] == "tool_use"]
    assert [(block["name"], block["input"]) for block in used] == [("refund", {}), ("post", {})]
    results = [block for block in blocks if block["type"] == "tool_result"]
    assert [block["content"] for block in results] == ["[erased]"] * 2
    assert [block["tool_use_id"] for block in results] == [block["id"] for block in used]


def test_an_export_of_erased_rows_is_verified_and_imported(run: Run, tmp_path: Path) -> None:
    erased(run)
    lines = list(export_run(run.pk, true_values=True))
    assert SECRET not in json.dumps([line for line in lines if "seq" in line])
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run([sys.executable, VERIFIER, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "intact")
    forget_everything()
    run = import_run(lines)
    assert problems(run.session_id) == []
    assert list(export_run(run.pk, true_values=True))[1:-1] == lines[1:-1]


def test_a_fork_of_erased_rows_says_that_they_were_erased(run: Run) -> None:
    seq = run.messages.get(kind="user").seq
    before = fork_run(run.pk, run.messages.latest("seq").seq, text="before")
    erase(seq, run=run)
    tell(run, seq)
    fork = fork_run(run.pk, run.messages.latest("seq").seq, text="and now?")
    assert (problems(before.session_id), problems(fork.session_id)) == ([], [])
    copied = fork.messages.get(seq=seq)
    assert (copied.content, copied.content_salt, copied.payload["copied"]["erased"]) == (None, None, True)
    with triggers.lifted(connection):
        before.messages.filter(seq=seq + 1).update(content=None, content_salt=None)
    assert "no row says that it was erased" in problems(before.session_id)[0]
