"""Contents too large for a row: in a file before their row, and read back as they were or not at all."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, transaction
from django.db.models import TextField
from django.db.models.functions import Cast

from agentruns import resolve_orphan, resume_run, run_agent, start_run, tool
from agentruns.agents.agent import Agent
from agentruns.checks.settings import check_payload_storage, check_values
from agentruns.journal import payloads
from agentruns.journal.payloads import Stored
from agentruns.journal.store import DatabaseStore, load
from agentruns.journal.verify import check, problems
from agentruns.models import Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel, check_messages
from tests.admin.doubts import timed_out
from tests.commands.running import run as command
from tests.db.exports import exported, verified
from tests.db.helpers import the_run
from tests.files import MEGABYTE, alias, fetch, fetched, report_of, row_of, said, sha256, stored_in
from tests.shop.agents import call, shop_agent
from tests.shop.models import Order

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT = 65_536


def test_a_result_of_ten_megabytes(folder: Path) -> None:
    asked: list[str] = []
    run = fetched(10 * MEGABYTE, lambda request: asked.append(sha256(said(request))) or {"text": "read"})
    assert (run.status, run.output) == ("completed", "read")
    texts = run.messages.annotate(text=Cast("content", TextField())).values_list("text", flat=True)
    assert sum(map(len, texts)) < 4_000
    row = row_of(run)
    assert len(json.dumps(row.payload)) < 2_000
    (path,) = stored_in(folder)
    known = sha256(path.read_text())
    assert asked == [known], "the model was sent all of it"
    assert row.payload["stored"] == {
        "name": f"{run.session_id}/{path.name}", "sha256": known, "size": 10 * MEGABYTE, "form": "text",
    }  # fmt: skip
    assert path.name.startswith(f"{row.call_id}-1-")
    assert payloads.names_in(row.payload) == [row.payload["stored"]["name"]]
    messages = result_of(run.pk).messages
    assert len(json.dumps(messages)) < 4_000, "who asks for the result is told a preview"
    check_messages(messages)
    assert said_by(messages).startswith(report_of(payloads.PREVIEW) + "\n[only the beginning of 10485760")
    the_run(result_of(run.pk))
    assert "ok: [10485760 bytes in a file] Order 1004" in command("show_run", str(run.pk)).out


def said_by(messages: Any) -> str:
    """Find the one tool result in a conversation."""
    blocks = [block for message in messages for block in message["content"]]
    (text,) = (block["content"] for block in blocks if block["type"] == "tool_result")
    return str(text)


ODD = {
    "text": "\u20ac\x00\x10" * 20_000,
    "surrogate": "\ud800" + "x" * LIMIT,
    "json": {"b": [1, 2.5, None, math.inf], "a": "\x00\ud800" + "x" * LIMIT},
    "list": ["x" * 1000] * 100,
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_read_back_is_what_was_stored(kind: str, folder: Path) -> None:
    row = payloads.put("s/c", ODD[kind])
    stored = payloads.of(Run(input="").pk, 7, row)
    assert stored is not None
    assert (stored.is_text, payloads.content_of(stored)) == (kind == "text", ODD[kind])
    assert len(row["content"]) < payloads.PREVIEW + 150
    for odd in (None, [], {}, {"stored": None}, {"stored": "x"}, {"stored": {"name": 1}}):
        assert payloads.names_in(odd) == []
    with pytest.raises(payloads.PayloadError, match="seq 3"):
        payloads.of(Run().pk, 3, {"stored": {"name": "x"}})
    with pytest.raises(payloads.PayloadError, match="cannot be read"):
        payloads.check(Stored(Run().pk, 3, "../../etc/passwd", "0", 1, "text"))


def test_the_limit_is_in_bytes_and_no_file_is_ever_overwritten(folder: Path) -> None:
    assert payloads.put("s/c", "x" * LIMIT) == {}
    assert (payloads.put("s/c", "\u20ac" * (LIMIT // 3)), fetched(1000).status) == ({}, "completed")
    assert not folder.exists(), "small results never come near the storage"
    names = {payloads.put("s/c", text)["stored"]["name"] for text in ("x" * (LIMIT + 1), "\u20ac" * LIMIT)}
    assert len(names) == len(stored_in(folder)) == 2


@tool
def stop() -> str:
    raise MemoryError


@pytest.mark.parametrize("fault", ["missing", "altered", "longer", "unreadable"])
def test_a_file_that_is_not_what_it_was(fault: str, folder: Path) -> None:
    asked: list[Any] = []
    turns = [{"tools": [call("stop")]}, lambda request: asked.append(request) or {"text": "end"}]
    run = fetched(MEGABYTE, *turns, tools=[fetch, stop])
    assert run.status == "orphaned", "a worker that comes later has to read the file"
    (path,) = stored_in(folder)
    whole, seq = path.read_bytes(), row_of(run).seq
    if fault == "unreadable":
        path.unlink()
        path.mkdir()
    elif fault == "missing":
        path.unlink()
    else:
        path.write_bytes(b"X" + whole[1:] if fault == "altered" else whole + b"more")
    assert resume_run(run.pk).status == "paused"
    run.refresh_from_db()
    says = {"missing": "is missing", "unreadable": "cannot be read"}.get(fault, "was altered")
    for text in (f"payload: Run {run.pk}, seq {seq}", path.name, says, "then resume"):
        assert text in run.blocked_reason
    assert asked == []
    (problem,) = check(run.session_id)
    assert (problem.seq, problem.kind, problem.file) == (seq, "tool_result", f"{run.session_id}/{path.name}")
    outcome = command("verify_journal")
    assert (outcome.code, f"seq {seq} (tool_result)" in outcome.out, says in outcome.out) == (1, True, True)
    assert check(run.session_id, files=False) == []
    assert len(result_of(run.pk).messages) >= 3, "and nobody else has to read it"
    if path.is_dir():
        path.rmdir()
    path.write_bytes(whole)
    assert resume_run(run.pk).status == "completed"
    (request,) = asked
    assert request.messages[2]["content"][0]["content"] == whole.decode()
    check_messages(request.messages)
    assert problems(run.session_id) == []


def test_without_the_storage_a_check_says_so_and_results_stay_inline(
    folder: Path, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One that fails loses nothing either."""
    assert check_payload_storage(None) == []
    settings.STORAGES |= alias(folder, "tests.files.BrokenStorage")
    told = row_of(run := fetched(session="s2")).payload
    assert (run.status, told["content"], "stored" in told) == ("completed", report_of(MEGABYTE), False)
    assert "No space left on device" in caplog.text
    assert problems(run.session_id) == []
    settings.STORAGES = {name: one for name, one in settings.STORAGES.items() if name != "agentruns"}
    (found,) = check_payload_storage(None)
    assert (found.id, "FileSystemStorage" in str(found.hint)) == ("agentruns.W005", True)
    assert row_of(fetched()).payload["content"] == report_of(MEGABYTE)
    stateless = shop_agent("stateless", {"tools": [call("fetch", size=MEGABYTE)]}, tools=[fetch])
    assert said_by(run_agent(stateless, "x" * MEGABYTE).messages) == report_of(MEGABYTE)
    assert not folder.exists()
    settings.AGENTRUNS_PAYLOAD_STORAGE = ""
    assert check_payload_storage(None) == []
    settings.AGENTRUNS_PAYLOAD_INLINE_MAX = "64k"
    assert [one.id for one in check_values(None)] == ["agentruns.E012"]


@pytest.mark.parametrize(
    ("kind", "fails"), [("plain", False), ("transactional", False), ("transactional", True)]
)
def test_a_known_result_waits_for_the_database_and_is_put_away_once(
    kind: str, fails: bool, folder: Path
) -> None:
    """The database refuses each append of a plain tool's run once, and one with a result six times."""
    tries = Counter[int]()

    class FullDisk(DatabaseStore):
        def append(self, batch: Any, **options: Any) -> None:
            tries[batch.first_seq] += 1
            often = 6 if batch.rows[0].kind == "tool_result" else 1
            if kind == "plain" and tries[batch.first_seq] <= often:
                raise OperationalError("No space left on device")
            super().append(batch, **options)

    @tool(transactional=kind == "transactional")
    def annotate() -> str:
        Order.objects.create(number="A1", customer="x", total_cents=1)
        if fails:
            raise ValueError("x" * MEGABYTE)
        return report_of(MEGABYTE)

    agent = shop_agent("flaky", {"tools": [call("annotate")]}, tools=[annotate])
    run = the_run(run_agent(agent, "do it", "s1", store=FullDisk()))
    (path,) = stored_in(folder)
    assert row_of(run).payload["stored"]["name"] == f"{run.session_id}/{path.name}"
    assert (run.status, Order.objects.count()) == ("completed", not fails)
    assert kind != "plain" or max(tries.values()) == 7


def test_what_came_too_late_can_be_told_as_it_was(folder: Path) -> None:
    run, late = timed_out(report_of(MEGABYTE))
    late.report()
    evidence = row_of(run, "late_result")
    (path,) = stored_in(folder)
    resolve_orphan(run.pk, evidence.call_id, "occurred", None, result=evidence.payload["content"])
    assert row_of(run).payload["stored"] == evidence.payload["stored"]
    assert stored_in(folder) == [path]
    assert said_by(load("default", run.session_id, run.pk).conversation.messages()) == report_of(MEGABYTE)
    assert (sweep().completed, problems(run.session_id)) == (1, [])


def test_a_long_task(folder: Path) -> None:
    text, asked = report_of(MEGABYTE), []
    model = ScriptedModel([lambda request: asked.append(request.messages) or {"text": "read"}] * 2)
    agent = Agent("listener", instructions="Listen.", model=model)
    run = start_run(agent, text, "s1")
    assert start_run(agent, text, "s1").pk == run.pk
    (path,) = stored_in(folder)
    stored = row_of(run, "user").payload["stored"]
    assert (path.parent.name, stored["form"], run.input) == (str(run.session_id), "text", text)
    assert sweep().completed == 1
    with transaction.atomic():  # no transaction waits for a storage
        again = start_run(agent, text + "!", "s1", idempotency_key="k2")
    assert "stored" not in row_of(again, "user").payload
    assert sweep().completed == 1
    whole = {"role": "user", "content": [{"type": "text", "text": text}]}
    assert (asked[0], asked[1][0], problems(run.session_id)) == ([whole], whole, [])
    assert stored_in(folder) == [path]


def test_an_export_carries_the_files_unless_it_is_redacted(
    folder: Path, settings: Any, tmp_path: Path
) -> None:
    run, path = fetched(3 * MEGABYTE), tmp_path / "run.jsonl"
    lines = exported(run, path)
    parts = [line for line in lines if "data" in line]
    assert [line["part"] for line in parts] == [1, 2, 3, 4, 5]
    assert max(map(len, path.read_text().splitlines())) < 1_000_000
    code, out = verified(path)
    assert (code, "1 files (0 left out)" in out) == (0, True), out
    for change in (lambda: parts[2].update(data=parts[1]["data"]), lambda: lines.remove(parts[4])):
        change()
        path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        code, out = verified(path)
        assert (code, f"the file of row {row_of(run).seq} is missing or was altered" in out) == (1, True), out
    settings.AGENTRUNS_REDACT = "tests.files.without_cards"
    (line,) = (line for line in exported(run, path) if "file" in line)
    assert (line["of"], "data" in line) == (row_of(run).seq, False)
    assert "not to be shown" in line["left_out"]
    code, out = verified(path)
    assert (code, "0 files (1 left out)" in out) == (0, True), out
    secret = "x" * (payloads.PREVIEW - 8) + "4242 4242 4242 4242"
    for content in (f"{secret}" + "y" * LIMIT, [secret, "y" * LIMIT]):
        row = payloads.put("s/c", content)
        assert ("4242" in row["content"], "[card]" in row["content"]) == (False, True)
    stored_in(folder)[0].unlink()
    exported(run, path, true_values=True)
    code, out = verified(path)
    assert (code, "is missing" in out) == (1, True), out
