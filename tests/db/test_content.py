"""Pictures and documents in tasks, messages and results: stored once, sent whole, gone with their row."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from agentruns import Document, Image, NotOccurred, Occurred, Text, ToolContext, run_agent, start_run, tool
from agentruns.exceptions import ContentError, ContentTooLargeError, PayloadError, RunStateError
from agentruns.journal import payloads
from agentruns.journal.verify import check, problems
from agentruns.models import Message, Run, Session
from agentruns.models.parts import ERASED
from agentruns.services.data.erasure import erase_payload
from agentruns.services.data.retention import delete_old_files
from agentruns.services.history import replay_run
from agentruns.services.runs.forks import fork_run, run_again
from agentruns.services.runs.lifecycle import result_of, resume_run
from agentruns.services.runs.messages import send_message
from agentruns.services.sweep import sweep
from agentruns.services.transfer import export_run, find_file, import_run
from agentruns.testing import Script, check_messages
from tests.db.exports import forget_everything, sealed
from tests.db.helpers import the_run
from tests.files import HangingStorage, alias, report_of, row_of, stored_in
from tests.pictures import BIG, NOTE, PDF, PNG, files_of, photograph, png, scan_passport
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MUG = [Text("It came broken."), Image(data=PNG, name="mug.png"), Document(data=PDF, name="bill.pdf")]
DIGEST = hashlib.sha256(PNG).hexdigest()


class Seeing(Script):
    """A model that says its turns; `asked` are the conversations that it was sent."""

    asked = property(lambda self: [request.messages for request in self.requests])


def agent_of(name: str, *turns: Any, **options: Any) -> tuple[Any, Seeing]:
    agent = shop_agent(name, **options)
    agent.model = seeing = Seeing([*turns, {"text": "seen"}], "seeing")
    return agent, seeing


def pictures(messages: list[dict[str, Any]]) -> list[bytes]:
    """List the pictures in a request, wherever they are."""
    found = []
    for block in (block for message in messages for block in message["content"]):
        inner = block.get("content")
        for each in inner if isinstance(inner, list) else [block]:
            if each["type"] == "image":
                found.append(base64.b64decode(each["source"]["data"]))
    return found


def test_a_task_with_a_picture_and_a_document(folder: Path) -> None:
    agent, seeing = agent_of("looks")
    result = run_agent(agent, MUG, "s1")
    run = the_run(result)
    text, picture, paper = seeing.asked[0][0]["content"]
    assert text == {"type": "text", "text": "It came broken."}
    assert (pictures(seeing.asked[0]), picture["source"]["media_type"]) == ([PNG], "image/png")
    assert (paper["type"], paper["title"]) == ("document", "bill.pdf")
    assert paper["source"]["media_type"] == "application/pdf"
    assert (run.title, DIGEST in run.input) == ("It came broken.", False)
    assert f"[image mug.png: image/png, {len(PNG)} bytes, " in run.input
    assert not folder.exists(), "small ones are in their row"
    check_messages(result.messages)
    assert f"[image mug.png: image/png, {len(PNG)} bytes, {DIGEST}]" in str(result.messages)


def test_a_large_file_is_stored_once_before_its_row_and_sent_whole_with_each_request(folder: Path) -> None:
    agent, seeing = agent_of("looks", {"tools": [call("lookup", number="A1")]})
    blocks = [Image(data=BIG, name="a.png"), Text("see"), Image(data=BIG, name="b.png")]
    result = run_agent(agent, blocks, "s1")
    run = the_run(result)
    (path,) = stored_in(folder)
    assert path.read_bytes() == BIG
    row = row_of(run, "user")
    digest = hashlib.sha256(BIG).hexdigest()
    name = f"{run.session_id}/{path.name}"
    assert row.payload["stored"] == [{"name": name, "sha256": digest, "size": len(BIG), "form": "bytes"}]
    assert len(str(row.payload)) < 1_500
    assert [pictures(asked) for asked in seeing.asked] == [[BIG, BIG]] * 2
    assert replay_run(run.pk).is_equal


def test_results_are_pictures_too(folder: Path) -> None:
    turns = ({"tools": [call("photograph")]}, {"tools": [call("photograph", big=True)]})
    agent, seeing = agent_of("shoots", *turns, tools=[photograph])
    run = the_run(run_agent(agent, "take two", "s1"))
    assert [pictures(asked) for asked in seeing.asked] == [[], [PNG], [PNG, BIG]]
    small, big = Message.objects.filter(run=run, kind="tool_result").order_by("seq")
    assert ("data" in small.payload["stored"][0], "data" in big.payload["stored"][0]) == (True, False)
    assert (small.payload["outcome"], "misfit" in small.payload) == ("ok", False)
    agent, seeing = agent_of("alone", turns[1], tools=[photograph])
    assert run_agent(agent, MUG).output == "seen", "a stateless run sees them, too"
    assert pictures(seeing.asked[1]) == [PNG, BIG]


MIXED: dict[str, tuple[Any, list[str] | None]] = {
    "list": ([Text("one"), "two", {"three": 3}, Image(data=PNG)], ["text", "text", "text", "image"]),
    "empty": ([Text(" ")], None),
    "tuple": ((Document(data=NOTE), Text("\x00\ud800")), ["document", "text"]),
    "text": (Text("only"), ["text"]),
    "large": ([Text(report_of(200_000)), Image(data=PNG)], ["text", "image"]),
    "generator": ((block for block in [Text("x"), Image(data=PNG)]), ["text", "image"]),
    "forged": ([{"type": "image", "sha256": DIGEST, "stored": [{"name": "x/y"}]}], None),
}


def test_a_result_is_a_block_or_a_list_with_some(folder: Path, settings: Any) -> None:
    settings.AGENTRUNS_RESULT_SENT_MAX = None

    @tool
    def mixed(kind: str) -> Any:
        """Return blocks of every sort."""
        return MIXED[kind][0]

    turns = [{"tools": [call("mixed", kind=kind)]} for kind in MIXED]
    agent, seeing = agent_of("mixes", *turns, tools=[mixed])
    run = the_run(run_agent(agent, "mix", "s1"))
    told = dict(zip(MIXED, (asked[-1]["content"][0]["content"] for asked in seeing.asked[1:]), strict=True))
    rows = dict(zip(MIXED, Message.objects.filter(run=run, kind="tool_result").order_by("seq"), strict=True))
    for kind, (_, sent) in MIXED.items():
        assert (None if isinstance(told[kind], str) else [block["type"] for block in told[kind]]) == sent
    assert told["large"][0]["text"] == report_of(200_000)
    assert [path.read_text() for path in stored_in(folder)] == [report_of(200_000)]
    assert len(str(rows["large"].payload)) < 2_500
    assert '"sha256"' in told["forged"]
    assert not payloads.has_blocks(rows["forged"].payload), "what a tool says is no block of ours"


def test_a_message_with_a_picture(folder: Path) -> None:
    agent, seeing = agent_of("looks")
    run = start_run(agent, "hello", "s1")
    for _ in range(2):
        assert send_message("s1", [Image(data=BIG), Text("now?")], idempotency_key="k").pk == run.pk
    assert Message.objects.filter(run=run, kind="user").count() == 2
    with pytest.raises(RunStateError, match="another message"):
        send_message("s1", [Image(data=png(3)), Text("now?")], idempotency_key="k")
    resume_run(run.pk)
    assert pictures(seeing.asked[0]) == [BIG]
    run = send_message("s1", Image(data=PNG))
    assert result_of(run.pk).status == "queued"
    resume_run(run.pk)
    assert pictures(seeing.asked[1]) == [BIG, PNG]
    assert problems(run.session_id) == []


def test_the_same_blocks_are_the_same_task_also_under_a_new_secret_key(folder: Path, settings: Any) -> None:
    agent, _ = agent_of("looks")
    run = start_run(agent, MUG, "s1")
    assert start_run(agent, list(MUG), "s1").pk == run.pk
    with pytest.raises(Exception, match="another agent, input or context"):
        start_run(agent, [*MUG[:1], Image(data=png(9), name="mug.png")], "s1")
    keyed = start_run(agent, [Image(data=BIG)], "s2", idempotency_key="k")
    assert start_run(agent, [Image(data=BIG)], "s2", idempotency_key="k").pk == keyed.pk
    assert len(stored_in(folder)) == 1, "a task that is there is not stored again"
    settings.SECRET_KEY_FALLBACKS, settings.SECRET_KEY = [settings.SECRET_KEY], "another one"
    assert start_run(agent, [Image(data=BIG)], "s2", idempotency_key="k").pk == keyed.pk
    with pytest.raises(RunStateError, match="another input"):
        start_run(agent, [Image(data=PNG)], "s2", idempotency_key="k")


def test_a_task_in_a_transaction_that_rolls_back_leaves_an_orphan_at_most(folder: Path) -> None:
    agent, _ = agent_of("looks")
    with pytest.raises(RuntimeError), transaction.atomic():
        start_run(agent, [Image(data=BIG)], "s1")
        raise RuntimeError
    assert not Run.objects.exists()
    assert len(stored_in(folder)) == 1
    assert delete_old_files() == 0, "it may be young"
    os.utime(stored_in(folder)[0], (1, 1))
    assert (delete_old_files(), stored_in(folder)) == (1, [])


def test_a_run_again_has_the_same_pictures_and_a_fork_too(folder: Path) -> None:
    agent, seeing = agent_of("looks")
    run = the_run(run_agent(agent, [Text("see"), Image(data=BIG)], "s1"))
    again = run_again(run.pk)
    assert again.input == run.input
    fork = fork_run(run.pk, 2)
    assert fork.input == run.input
    sweep()
    assert sorted(map(len, map(pictures, seeing.asked[1:]))) == [1, 2]
    assert {each for asked in seeing.asked for each in pictures(asked)} == {BIG}
    assert len(stored_in(folder)) == 1
    assert [problems(pk) for pk in Session.objects.values_list("pk", flat=True)] == [[], []]


def test_a_file_that_is_not_what_it_was_pauses_the_run(folder: Path) -> None:
    agent, seeing = agent_of("looks")
    run = start_run(agent, [Image(data=BIG)], "s1")
    (path,) = stored_in(folder)
    for found in (None, BIG[:-1] + b"?", BIG + b"x", BIG[:-1]):
        path.unlink() if found is None else path.write_bytes(found)
        result = resume_run(run.pk)
        assert (result.status, seeing.asked) == ("paused", [])
        assert result.error.startswith("payload: ") and path.name in result.error
        (problem,) = check(run.session_id)
        assert problem.file.endswith(path.name)
    path.write_bytes(BIG)
    assert resume_run(run.pk).output == "seen"
    run = start_run(agent, [Image(data=PNG)], "s2")
    stored = payloads.files(run.pk, 2, row_of(run, "user").payload)[0]
    assert b"".join(payloads.chunks(stored)) == PNG, "a small file is verified, too"
    for data in ("", "!", base64.b64encode(PNG + b"x").decode(), None, 7):
        with pytest.raises(PayloadError):
            payloads.check(stored._replace(data=data, name="" if data is not None else "no/where"))


@pytest.mark.parametrize(
    "storage",
    ["files.Broken", *(f"db.test_storage_away.{fault}" for fault in ("Hanging", "Truncating", "Garbling"))],
)
def test_storages_that_fail_leave_files_in_their_rows(storage: str, tmp_path: Path, settings: Any) -> None:
    settings.STORAGES = {**settings.STORAGES, **alias(tmp_path, f"tests.{storage}Storage")}
    settings.AGENTRUNS_PAYLOAD_TIMEOUT = 0.3
    HangingStorage.hanging.reset()
    agent, seeing = agent_of("looks", {"tools": [call("photograph", big=True)]}, tools=[photograph])
    run = the_run(run_agent(agent, [Image(data=BIG)], "s1"))
    HangingStorage.hanging.let_go()
    assert pictures(seeing.asked[1]) == [BIG, BIG]
    assert all("data" in row_of(run, kind).payload["stored"][0] for kind in ("tool_result", "user"))


def test_of_too_many_pictures_the_newest_are_sent(folder: Path) -> None:
    album = tool(name="album")(lambda: [Image(data=png(n)) for n in range(30)])
    shots = [{"tools": [call("photograph")]}] * 22
    agent, seeing = agent_of("shoots", *shots, {"tools": [call("album")]}, tools=[photograph, album])
    run_agent(agent, [Image(data=png(9))], "s1")
    assert pictures(seeing.asked[22]) == [PNG] * 20, "the task's own was the oldest"
    assert len(pictures(seeing.asked[10])) == 11
    assert pictures(seeing.asked[23]) == [png(n) for n in range(20)], "of one result the first"
    (block,) = seeing.asked[23][-1]["content"]
    assert [each["type"] for each in block["content"]] == ["image"] * 20 + ["text"] * 10


def test_small_files_and_texts_stay_in_their_row_as_long_as_there_is_room(folder: Path) -> None:
    agent, seeing = agent_of("looks")
    blocks = [Image(data=png(1, note=b"x" * 60_000)), Image(data=png(2, note=b"x" * 60_000))]
    texts = [Text("short"), Text("a" * 3_000), Text("b" * 10_000)]
    run = the_run(run_agent(agent, [*blocks, *texts], "s1"))
    row = row_of(run, "user")
    assert [sorted(file)[0] for file in row.payload["stored"]] == ["data", "form", "form"]
    assert ["sha256" in block for block in row.payload["content"]] == [True, True, False, False, True]
    sent = seeing.asked[0][0]["content"]
    assert [block["text"] for block in sent[2:]] == [text.text for text in texts]
    assert run.input.endswith(f"short\n{'a' * 3_000}\n{'b' * 10_000}")
    assert run_again(run.pk).input == run.input


def test_a_result_that_the_provider_does_not_take_is_told_in_words(folder: Path) -> None:
    huge = tool(name="huge")(lambda: Image(data=png(note=b"x" * 5_000_000), name="huge.png"))
    agent, seeing = agent_of("shoots", {"tools": [call("huge")]}, tools=[huge])
    run = the_run(run_agent(agent, "shoot", "s1"))
    (block,) = seeing.asked[1][-1]["content"][0]["content"]
    assert block["text"].startswith("[image huge.png: image/png, 5000")
    assert (run.status, len(stored_in(folder))) == ("completed", 1), "nothing is lost"


def test_erasing_a_picture_takes_every_row_that_repeats_it(folder: Path) -> None:
    agent, _ = agent_of("looks")
    run = the_run(run_agent(agent, [Text("see"), Image(data=BIG, name="face.png")], "s1"))
    run_agent(agent, [Text("and"), Image(data=BIG)], "s1", idempotency_key="2")
    assert len(stored_in(folder)) == 2
    erase_payload(run.pk, 2, None, "a face")
    assert stored_in(folder) == []
    assert {*Run.objects.values_list("input", "title")} == {(ERASED, ERASED)}
    assert problems(run.session_id) == []
    assert "face.png" not in str(list(Message.objects.values_list("content", flat=True)))
    with pytest.raises(RunStateError, match="erased"):
        run_again(run.pk)


def test_export_and_import(folder: Path) -> None:
    agent, _ = agent_of("shoots", {"tools": [call("photograph")]}, tools=[photograph])
    blocks = [Text("see"), Image(data=BIG), Image(data=png(3, note=b"y" * 90_000)), Document(data=NOTE)]
    run = the_run(run_agent(agent, blocks, "s1"))
    lines = list(export_run(run.pk, true_values=True))
    for exported in (lines, export_run(run.pk)):
        assert sum("file" in line for line in exported) == 2
    kept = {path.read_bytes() for path in stored_in(folder)}
    forget_everything()
    shutil.rmtree(folder)
    for line in [line for line in lines if "data" in line]:
        with pytest.raises((PayloadError, RunStateError)):
            import_run(sealed([{**each, "data": ""} if each is line else each for each in lines]))
    back = import_run(lines)
    assert (back.input, problems(back.session_id)) == (run.input, [])
    assert {path.read_bytes() for path in stored_in(folder)} == kept


def test_what_is_sensitive_is_guarded(folder: Path) -> None:
    agent, seeing = agent_of("scans", {"tools": [call("scan_passport")]}, tools=[scan_passport])
    run = the_run(run_agent(agent, MUG, "s1"))
    assert len(pictures(seeing.asked[1])) == 2

    def guarded(kind: str) -> list[bool]:
        return [find_file(run, block["sha256"]).guarded for block in files_of(row_of(run, kind))]

    assert guarded("tool_result") == [True, True]
    assert guarded("user") == [False, True], "a document may repeat what is sensitive"


def test_a_reconciled_result_is_a_picture(folder: Path) -> None:
    bank = [Occurred([Text("here"), Image(data=BIG)])]

    @tool(reconcile=lambda ctx, args: bank.pop() if bank else NotOccurred())
    def scan(ctx: ToolContext) -> Image:
        """Scan a page, once."""
        raise ConnectionError("the line is dead")

    agent, seeing = agent_of("scans", {"tools": [call("scan")]}, tools=[scan])
    result = run_agent(agent, "scan", "s1")
    for _ in range(3):
        if result.status != "completed":
            result = resume_run(result.run_id)
    assert pictures(seeing.asked[-1]) == [BIG]
    the_run(result)


def test_bad_input_starts_nothing(settings: Any) -> None:
    agent, _ = agent_of("looks")
    settings.AGENTRUNS_SCANNER = "tests.pictures.scanner"
    for given in ([], [1], [Document(data=b"EICAR")], [Image(data=png(n)) for n in range(21)]):
        with pytest.raises(ContentError):
            start_run(agent, given, "s1")
        with pytest.raises(ContentError):
            run_agent(agent, given)
    assert not Session.objects.exists()
    assert issubclass(ContentTooLargeError, ContentError)
