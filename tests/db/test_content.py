"""Pictures and documents in tasks, messages and results: stored once, sent whole, gone with their row."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction

from agentruns import (
    Document,
    Image,
    NotOccurred,
    Occurred,
    Text,
    ToolContext,
    erase_payload,
    export_run,
    fork_run,
    replay_run,
    resume_run,
    run_again,
    run_agent,
    send_message,
    start_run,
    tool,
)  # fmt: skip
from agentruns.exceptions import ContentError, ContentTooLargeError, PayloadError, RunStateError
from agentruns.journal import payloads
from agentruns.journal.verify import check, problems
from agentruns.models import Message, Run, Session
from agentruns.models.parts import ERASED
from agentruns.services.retention import delete_files, delete_old_files, erase_session
from agentruns.services.runs import result_of
from agentruns.services.sweep import sweep
from agentruns.services.transfer import find_file, import_run, read_content
from agentruns.testing import check_messages
from tests.db.exports import forget_everything, sealed
from tests.db.helpers import Checked, the_run
from tests.files import HangingStorage, alias, report_of, row_of, stored_in
from tests.pictures import BIG, NOTE, PDF, PNG, files_of, photograph, png, scan_passport
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

MUG = [Text("It came broken."), Image(data=PNG, name="mug.png"), Document(data=PDF, name="bill.pdf")]
DIGEST = hashlib.sha256(PNG).hexdigest()


class Seeing:
    """A model that keeps what it was sent, and says its turns."""

    def __init__(self, *turns: Any) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.model = Checked([*[self.seen(turn) for turn in turns], self.seen({"text": "seen"})])

    def seen(self, turn: Any) -> Any:
        def say(request: Any) -> Any:
            self.asked.append(request.messages)
            return turn

        return say


def agent_of(name: str, *turns: Any, **options: Any) -> tuple[Any, Seeing]:
    agent, seeing = shop_agent(name, **options), Seeing(*turns)
    agent.model = seeing.model
    return agent, seeing


def pictures(messages: list[dict[str, Any]]) -> list[bytes]:
    """Return the pictures in a request, wherever they are."""
    found = []
    for message in messages:
        for block in message["content"]:
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
    assert base64.b64decode(picture["source"]["data"]) == PNG
    assert picture["source"]["media_type"] == "image/png"
    assert (paper["type"], paper["title"], paper["source"]["media_type"]) == (
        "document", "bill.pdf", "application/pdf",
    )  # fmt: skip
    assert run.title == "It came broken."
    assert f"[image mug.png: image/png, {len(PNG)} bytes, " in run.input
    assert DIGEST not in run.input
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
    assert row.payload["stored"] == [
        {
            "name": f"{run.session_id}/{path.name}",
            "sha256": hashlib.sha256(BIG).hexdigest(),
            "size": len(BIG),
            "form": "bytes",
        }
    ]
    assert len(str(row.payload)) < 1_500
    assert [pictures(asked) for asked in seeing.asked] == [[BIG, BIG]] * 2
    assert replay_run(run.pk).is_equal


def test_results_are_pictures_too(folder: Path) -> None:
    turns = ({"tools": [call("photograph")]}, {"tools": [call("photograph", big=True)]})
    agent, seeing = agent_of("shoots", *turns, tools=[photograph])
    run = the_run(run_agent(agent, "take two", "s1"))
    assert [pictures(asked) for asked in seeing.asked] == [[], [PNG], [PNG, BIG]]
    rows = Message.objects.filter(run=run, kind="tool_result").order_by("seq")
    assert [row.payload["outcome"] for row in rows] == ["ok", "ok"]
    assert ["data" in row.payload["stored"][0] for row in rows] == [True, False]
    assert "misfit" not in rows[0].payload


@tool
def mixed(kind: str) -> Any:
    """Return blocks of every sort."""
    return {
        "list": [Text("one"), "two", {"three": 3}, Image(data=PNG)],
        "empty": [Text(" ")],
        "tuple": (Document(data=NOTE), Text("\x00\ud800")),
        "text": Text("only"),
        "large": [Text(report_of(200_000)), Image(data=PNG)],
        "generator": (block for block in [Text("x"), Image(data=PNG)]),
        "forged": [{"type": "image", "sha256": DIGEST, "stored": [{"name": "x/y"}]}],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("list", ["text", "text", "text", "image"]),
        ("empty", None),
        ("tuple", ["document", "text"]),
        ("text", ["text"]),
        ("large", ["text", "image"]),
        ("generator", ["text", "image"]),
        ("forged", None),
    ],
)
def test_a_result_is_a_block_or_a_list_with_some(kind: str, sent: Any, folder: Path) -> None:
    agent, seeing = agent_of("mixes", {"tools": [call("mixed", kind=kind)]}, tools=[mixed])
    run = the_run(run_agent(agent, "mix", "s1"))
    content = seeing.asked[1][-1]["content"][0]["content"]
    assert (content if isinstance(content, str) else None) is None or sent is None
    if sent is not None:
        assert [block["type"] for block in content] == sent
    if kind == "large":
        assert content[0]["text"] == report_of(200_000)
        assert [path.read_text() for path in stored_in(folder)] == [report_of(200_000)]
        assert len(str(row_of(run).payload)) < 2_500
    if kind == "forged":
        assert '"sha256"' in content
        assert not payloads.has_blocks(row_of(run).payload), "what a tool says is no block of ours"


def test_a_stateless_run_sees_them_too() -> None:
    agent, seeing = agent_of("looks", {"tools": [call("photograph", big=True)]}, tools=[photograph])
    assert run_agent(agent, MUG).output == "seen"
    assert pictures(seeing.asked[1]) == [PNG, BIG]


def test_a_message_with_a_picture(folder: Path) -> None:
    agent, seeing = agent_of("looks")
    run = start_run(agent, "hello", "s1")
    sent = send_message("s1", [Image(data=BIG), Text("now?")], idempotency_key="k")
    assert sent.pk == run.pk
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


def test_the_same_blocks_are_the_same_task(folder: Path) -> None:
    agent, _ = agent_of("looks")
    run = start_run(agent, MUG, "s1")
    assert start_run(agent, list(MUG), "s1").pk == run.pk
    with pytest.raises(Exception, match="another agent, input or context"):
        start_run(agent, [*MUG[:1], Image(data=png(9), name="mug.png")], "s1")
    keyed = start_run(agent, [Image(data=BIG)], "s2", idempotency_key="k")
    assert start_run(agent, [Image(data=BIG)], "s2", idempotency_key="k").pk == keyed.pk
    assert len(stored_in(folder)) == 1, "a task that is there is not stored again"
    with pytest.raises(RunStateError, match="another input"):
        start_run(agent, [Image(data=PNG)], "s2", idempotency_key="k")


def test_they_are_the_same_task_under_a_new_secret_key(settings: Any) -> None:
    agent, _ = agent_of("looks")
    run = start_run(agent, MUG, "s1", idempotency_key="k")
    settings.SECRET_KEY_FALLBACKS, settings.SECRET_KEY = [settings.SECRET_KEY], "another one"
    assert start_run(agent, MUG, "s1", idempotency_key="k").pk == run.pk
    with pytest.raises(RunStateError, match="another input"):
        start_run(agent, MUG[:2], "s1", idempotency_key="k")


def test_a_task_in_a_transaction_that_rolls_back_leaves_an_orphan_at_most(folder: Path) -> None:
    agent, _ = agent_of("looks")
    with pytest.raises(RuntimeError), transaction.atomic():
        start_run(agent, [Image(data=BIG)], "s1")
        raise RuntimeError
    assert not Run.objects.exists()
    assert len(stored_in(folder)) == 1
    assert delete_old_files() == 0, "it may be young"
    aged(folder)
    assert delete_old_files() == 1
    assert stored_in(folder) == []


def aged(folder: Path) -> None:
    for path in stored_in(folder):
        os.utime(path, (1, 1))


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


@pytest.mark.parametrize("fault", ["missing", "altered", "longer", "shorter"])
def test_a_file_that_is_not_what_it_was_pauses_the_run(fault: str, folder: Path) -> None:
    agent, seeing = agent_of("looks")
    run = start_run(agent, [Image(data=BIG)], "s1")
    (path,) = stored_in(folder)
    if fault == "missing":
        path.unlink()
    else:
        path.write_bytes({"altered": BIG[:-1] + b"?", "longer": BIG + b"x", "shorter": BIG[:-1]}[fault])
    result = resume_run(run.pk)
    assert result.status == "paused"
    assert result.error.startswith("payload: ")
    assert path.name in result.error
    assert seeing.asked == []
    (problem,) = check(run.session_id)
    assert problem.file.endswith(path.name)
    path.write_bytes(BIG)
    assert resume_run(run.pk).output == "seen"


def test_a_small_file_is_verified_too() -> None:
    agent, _ = agent_of("looks")
    run = start_run(agent, [Image(data=PNG)], "s1")
    row = row_of(run, "user")
    stored = payloads.files(run.pk, 2, row.payload)[0]
    assert b"".join(payloads.chunks(stored)) == PNG
    for data in ("", "!", base64.b64encode(PNG + b"x").decode(), None, 7):
        with pytest.raises(PayloadError):
            payloads.check(stored._replace(data=data, name="" if data is not None else "no/where"))


@pytest.mark.parametrize(
    "backend",
    [
        "tests.files.BrokenStorage",
        "tests.db.test_storage_away.HangingStorage",
        "tests.db.test_storage_away.TruncatingStorage",
        "tests.db.test_storage_away.GarblingStorage",
    ],
)
def test_storages_that_fail_leave_files_in_their_rows(backend: str, tmp_path: Path, settings: Any) -> None:
    settings.STORAGES = {**settings.STORAGES, **alias(tmp_path, backend)}
    settings.AGENTRUNS_PAYLOAD_TIMEOUT = 0.3
    HangingStorage.hanging.reset()
    agent, seeing = agent_of("looks", {"tools": [call("photograph", big=True)]}, tools=[photograph])
    run = the_run(run_agent(agent, [Image(data=BIG)], "s1"))
    HangingStorage.hanging.let_go()
    assert pictures(seeing.asked[1]) == [BIG, BIG]
    assert "data" in row_of(run).payload["stored"][0]
    assert "data" in row_of(run, "user").payload["stored"][0]


def test_of_too_many_pictures_the_newest_are_sent(folder: Path) -> None:
    shots = [{"tools": [call("photograph")]}] * 22
    agent, seeing = agent_of("shoots", *shots, tools=[photograph])
    run_agent(agent, [Image(data=png(9))], "s1")
    assert len(pictures(seeing.asked[-1])) == 20
    assert pictures(seeing.asked[-1])[0] == PNG, "the task's own was the oldest"
    assert len(pictures(seeing.asked[10])) == 11


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


@tool
def album(size: int) -> list[Image]:
    """Return many pictures."""
    return [Image(data=png(n)) for n in range(size)]


def test_of_a_result_with_too_many_pictures_the_first_are_sent() -> None:
    agent, seeing = agent_of("shows", {"tools": [call("album", size=30)]}, tools=[album])
    the_run(run_agent(agent, [Image(data=PNG)], "s1"))
    assert pictures(seeing.asked[1]) == [png(n) for n in range(20)]
    (block,) = seeing.asked[1][-1]["content"]
    assert [each["type"] for each in block["content"]] == ["image"] * 20 + ["text"] * 10


@tool
def far_too_large() -> Image:
    """Take a picture that the provider does not take."""
    return Image(data=png(note=b"x" * 5_000_000), name="huge.png")


def test_a_result_that_the_provider_does_not_take_is_told_in_words(folder: Path) -> None:
    agent, seeing = agent_of("shoots", {"tools": [call("far_too_large")]}, tools=[far_too_large])
    run = the_run(run_agent(agent, "shoot", "s1"))
    (block,) = seeing.asked[1][-1]["content"][0]["content"]
    assert block["text"].startswith("[image huge.png: image/png, 5000")
    assert len(stored_in(folder)) == 1, "nothing is lost"
    assert run.status == "completed"


def test_erasing_a_picture_takes_every_row_that_repeats_it(folder: Path) -> None:
    agent, _ = agent_of("looks")
    run = the_run(run_agent(agent, [Text("see"), Image(data=BIG, name="face.png")], "s1"))
    second = the_run(run_agent(agent, [Text("and"), Image(data=BIG)], "s1", idempotency_key="2"))
    assert len(stored_in(folder)) == 2
    erase_payload(run.pk, 2, None, "a face")
    assert stored_in(folder) == []
    for one in (run, second):
        one.refresh_from_db()
        assert (one.input, one.title) == (ERASED, ERASED)
    assert problems(run.session_id) == []
    assert "face.png" not in str(list(Message.objects.values_list("content", flat=True)))
    with pytest.raises(RunStateError, match="erased"):
        run_again(run.pk)


def test_a_session_takes_its_files_with_it(folder: Path) -> None:
    agent, _ = agent_of("shoots", {"tools": [call("photograph", big=True)]}, tools=[photograph])
    run_agent(agent, [Image(data=BIG)], "s1")
    assert len(stored_in(folder)) == 2
    erase_session("s1")
    assert stored_in(folder) == []


def test_a_fork_keeps_what_its_origin_had(folder: Path) -> None:
    agent, _ = agent_of("looks")
    run = the_run(run_agent(agent, [Image(data=BIG)], "s1"))
    fork = fork_run(run.pk, 2)
    erase_session("s1")
    assert len(stored_in(folder)) == 1
    assert resume_run(fork.pk).output == "seen"


@pytest.mark.parametrize("true_values", [True, False])
def test_export_and_import(true_values: bool, folder: Path) -> None:
    agent, _ = agent_of("shoots", {"tools": [call("photograph")]}, tools=[photograph])
    blocks = [Text("see"), Image(data=BIG), Image(data=png(3, note=b"y" * 90_000)), Document(data=NOTE)]
    run = the_run(run_agent(agent, blocks, "s1"))
    lines = list(export_run(run.pk, true_values=true_values))
    assert sum("file" in line for line in lines) == 2
    kept = [path.read_bytes() for path in stored_in(folder)]
    forget_everything()
    assert delete_files({f"{path.parent.name}/{path.name}" for path in stored_in(folder)}) == 2
    if not true_values:
        return
    back = import_run(lines)
    assert back.input == run.input
    assert problems(back.session_id) == []
    assert sorted(path.read_bytes() for path in stored_in(folder)) == sorted(kept)
    for line in lines:
        if "data" in line:
            broken = [{**each, "data": ""} if each is line else each for each in lines]
            forget_everything()
            delete_files({f"{path.parent.name}/{path.name}" for path in stored_in(folder)})
            with pytest.raises((PayloadError, RunStateError)):
                import_run(sealed(broken))


def test_a_file_is_found_by_its_digest(folder: Path) -> None:
    agent, _ = agent_of("looks")
    run = the_run(run_agent(agent, [*MUG, Image(data=BIG, name="big.png")], "s1"))
    pictures = "image/png", "inline"
    known = {PNG: pictures, BIG: pictures, PDF: ("application/pdf", "attachment")}
    for data, (kind, shown) in known.items():
        found = find_file(run, hashlib.sha256(data).hexdigest())
        assert b"".join(read_content(found, None)) == data
        assert found.headers["Content-Type"] == kind
        assert found.headers["Content-Disposition"].startswith(shown)
        assert found.headers["X-Content-Type-Options"] == "nosniff"
        assert "sandbox" in found.headers["Content-Security-Policy"]
        assert not found.guarded
    for digest in ("0" * 64, "", "%", DIGEST[:-1]):
        with pytest.raises(Exception, match="has no such file"):
            find_file(run, digest)


def test_what_is_sensitive_is_guarded(folder: Path) -> None:
    agent, seeing = agent_of("scans", {"tools": [call("scan_passport")]}, tools=[scan_passport])
    run = the_run(run_agent(agent, MUG, "s1"))
    assert len(pictures(seeing.asked[1])) == 2

    def guarded(kind: str) -> list[bool]:
        return [find_file(run, block["sha256"]).guarded for block in files_of(row_of(run, kind))]

    assert guarded("tool_result") == [True, True]
    assert guarded("user") == [False, True], "a document may repeat what is sensitive"


BANK: list[Any] = []


def asked(ctx: ToolContext, args: dict[str, Any]) -> Any:
    return BANK.pop() if BANK else NotOccurred()


@tool(reconcile=asked)
def scan(ctx: ToolContext) -> Image:
    """Scan a page, once."""
    raise ConnectionError("the line is dead")


def test_a_reconciled_result_is_a_picture(folder: Path) -> None:
    BANK[:] = [Occurred([Text("here"), Image(data=BIG)])]
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
