"""Pictures, documents and large contents through the API: as blocks in the JSON, as files beside it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.asgi import ASGIRequest

from agentruns import run_agent, session_token
from agentruns.agents.agent import Agent
from agentruns.content import type_of
from agentruns.models import Message, Run
from agentruns.services.runs.lifecycle import result_of
from agentruns.services.sweep import sweep
from agentruns.services.transfer import download, find_content, read_content
from agentruns.tools.card import MASK
from tests.api.http import ROOT, Api, Program, make_user, refused
from tests.db.helpers import the_run
from tests.files import MEGABYTE, fetch_secretly, fetched, report_of, row_of, stored_in
from tests.pictures import BIG, HOSTILE, JPEG, NOTE, PDF, PNG, UNFIT, files_of, photograph, png, scan_passport
from tests.shop.agents import call, shop_agent

pytestmark = pytest.mark.django_db(transaction=True)


def block(data: bytes, media_type: str = "image/png", **members: Any) -> dict[str, Any]:
    kind = "image" if media_type.startswith("image/") else "document"
    return {"type": kind, "media_type": media_type, "data": base64.b64encode(data).decode(), **members}


SEEN = {"type": "text", "text": "It came broken."}
PATHS = {"/runs": "input", "/sessions/s1/messages": "content"}


def start(api: Api, path: str, given: Any, **members: Any) -> tuple[int, Any]:
    return api.post(path, body_of(path, given, **members))


@pytest.fixture(params=PATHS)
def path(request: Any, api: Api, shop: Agent) -> str:
    if request.param != "/runs":
        assert start(api, "/runs", "hello")[0] == 201
    return str(request.param)


def upload(api: Api, path: str, body: Any, *files: SimpleUploadedFile, **headers: str) -> tuple[int, Any]:
    data = {} if body is None else {"body": body if isinstance(body, str) else json.dumps(body)}
    given = {**data, **{f"f{number}": file for number, file in enumerate(files)}}
    return api._answer(api.client.post(ROOT + path, given, headers=headers))


def body_of(path: str, given: Any, **members: Any) -> dict[str, Any]:
    return {"agent": "shop", PATHS[path]: given, **({"session": "s1"} if path == "/runs" else {}), **members}


def photo(data: bytes = PNG, name: str = "mug.png", kind: str = "image/png") -> SimpleUploadedFile:
    return SimpleUploadedFile(name, data, content_type=kind)


def test_blocks_in_the_json(api: Api, path: str) -> None:
    given = [SEEN, block(PNG, name="mug.png"), block(PDF, "application/pdf", name="bill.pdf")]
    status, run = start(api, path, given, idempotency_key="k")
    assert status == 201
    row = Message.objects.filter(run=run["id"], kind="user").latest("seq")
    assert [each["name"] for each in files_of(row)] == ["mug.png", "bill.pdf"]
    assert start(api, path, given, idempotency_key="k")[0] == 200
    assert start(api, path, [SEEN, block(png(3), name="mug.png")], idempotency_key="k")[0] == 409
    the_run(result_of(row.run_id))


def test_files_beside_it(api: Api, path: str, folder: Path) -> None:
    files = [photo(), photo(BIG, "big.png"), photo(NOTE, "note.txt", "text/plain")]
    body = body_of(path, "It came broken.", idempotency_key="k")
    status, run = upload(api, path, body, *files)
    assert status == 201, run
    row = Message.objects.filter(run=run["id"], kind="user").latest("seq")
    assert row.payload["content"][0] == SEEN
    assert [each["name"] for each in files_of(row)] == ["mug.png", "big.png", "note.txt"]
    assert [path.read_bytes() for path in stored_in(folder)] == [BIG]
    for file in files:
        file.seek(0)
    assert upload(api, path, body, *files)[0] == 200
    assert upload(api, path, body, photo())[0] == 409
    again = [SEEN, block(PNG, name="mug.png"), block(BIG, name="big.png")]
    again.append(block(NOTE, "text/plain", name="note.txt"))
    assert start(api, path, again, idempotency_key="k")[0] == 200, "the form makes no difference"


REFUSED: dict[str, tuple[Any, int, str]] = {
    "no blocks": ([], 422, "content"),
    "an object": ({"type": "text", "text": "x"}, 422, "validation"),
    "a number": (7, 422, "validation"),
    "a list of texts": (["x"], 422, "validation"),
    "an unknown type": ([{"type": "video", "data": ""}], 422, "validation"),
    "no type": ([{"text": "x"}], 422, "validation"),
    "an empty text": ([{"type": "text", "text": " "}], 422, "validation"),
    "a path": ([{"type": "image", "media_type": "image/png", "path": "/etc/passwd"}], 422, "validation"),
    "a path beside data": ([block(PNG, path="/etc/passwd")], 422, "validation"),
    "an address": ([block(PNG, url="http://127.0.0.1/")], 422, "validation"),
    "no data": ([{"type": "image", "media_type": "image/png"}], 422, "validation"),
    "bad base64": ([{**block(PNG), "data": "no base64!"}], 422, "content"),
    "cut base64": ([{**block(PNG), "data": "iVBORw0KGg"}], 422, "content"),
    "odd base64": ([{**block(PNG), "data": "\ud800é"}], 422, "content"),
    "a lie": ([block(PNG, "image/jpeg")], 422, "content"),
    "a lie of a text": ([block(PDF, "text/plain")], 422, "content"),
    "another type": ([block(b"<svg/>", "image/svg+xml")], 415, "content-type"),
    "html": ([block(b"<script>", "text/html")], 415, "content-type"),
    "a picture as document": ([{**block(PNG), "type": "document"}], 415, "content-type"),
    "too many blocks": ([SEEN] * 101, 422, "content"),
    "too many pictures": ([block(png(n)) for n in range(21)], 413, "content-too-large"),
}


def test_what_is_refused(api: Api, path: str) -> None:
    rows = Message.objects.count()
    for kind, (given, status, problem) in REFUSED.items():
        assert refused(start(api, path, given), status, problem), kind
    for file, status in (
        (photo(PNG, kind="image/jpeg"), 422),
        (photo(b"MZ", "a.exe", "application/x-msdownload"), 415),
        (photo(NOTE, "a.txt", "application/octet-stream"), 415),
        (photo(b"", "empty.png"), 422),
    ):
        assert upload(api, path, body_of(path, "see"), file)[0] == status
    assert Message.objects.count() == rows


STATUS = {"an animation": 415, "many pixels": 413, "many pages": 413}  # what a provider does not take


@pytest.mark.parametrize("kind", UNFIT)
def test_a_file_that_no_model_can_read_is_refused_with_the_reason(kind: str, api: Api, path: str) -> None:
    rows, (name, data, why) = Message.objects.count(), UNFIT[kind]
    media_type = type_of(data)
    for status, problem in (
        upload(api, path, body_of(path, "see"), photo(data, name, media_type)),
        start(api, path, [SEEN, block(data, media_type, name=name)]),
    ):
        assert (status, why in problem["detail"]) == (STATUS.get(kind, 422), True), problem
        assert repr(name) in problem["detail"]
    assert Message.objects.count() == rows


@pytest.mark.parametrize("media_type", ["image/jpg", "image/pjpeg"])
def test_a_jpeg_may_have_the_names_that_are_in_use(media_type: str, api: Api, path: str) -> None:
    status, run = upload(api, path, body_of(path, "see"), photo(JPEG, "mug.exe", media_type))
    assert status == 201, run
    (file,) = files_of(Message.objects.filter(run=run["id"], kind="user").latest("seq"))
    assert file["media_type"] == "image/jpeg"
    response = api.client.get(f"{ROOT}/runs/{run['id']}/files/{file['sha256']}")
    assert 'filename="mug.exe.jpg"' in response["Content-Disposition"]


def test_what_is_too_large(api: Api, path: str, settings: Any, folder: Path) -> None:
    settings.AGENTRUNS_FILE_MAX = 50_000
    problem = refused(upload(api, path, body_of(path, "see"), photo(BIG)), 413, "content-too-large")
    assert "more than 50000 bytes" in problem["detail"]
    settings.AGENTRUNS_FILE_MAX = 20 * 2**20
    status, problem = upload(api, path, body_of(path, "see"), photo(png(note=b"x" * 4_000_000)))
    assert (status, problem["type"]) == (413, "urn:agentruns:content-too-large")
    refused(upload(api, path, body_of(path, "see"), photo(b"%PDF-" + bytes(30_000_000))), 413, "too-large")
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    refused(upload(api, path, body_of(path, "x" * 2000), photo()), 413, "too-large")
    assert upload(api, path, body_of(path, "see"), photo(BIG))[0] == 201, "files are no part of that"
    assert len(stored_in(folder)) == 1


def test_a_malformed_upload_and_a_picture_alone(api: Api, shop: Agent) -> None:
    for body in (None, "", "{", "[]", {"agent": "shop"}, {"agent": "shop", "input": "x", "owner_": 1}):
        status, problem = (400, "malformed") if body in (None, "{") else (422, "validation")
        refused(upload(api, "/runs", body, photo()), status, problem)
    assert not Run.objects.exists()
    status, run = upload(api, "/runs", {"agent": "shop", "input": []}, photo())
    assert (status, run["input"]) == (201, run["title"])
    assert run["title"].startswith(f"[image mug.png: image/png, {len(PNG)} bytes, ")


def test_only_who_may_start_is_read(api: Api, shop: Agent) -> None:
    nobody = Api()
    assert upload(nobody, "/runs", {"agent": "shop", "input": "x"}, photo())[0] == 401
    assert upload(nobody, "/runs", None, photo())[0] == 401, "not even what is wrong with it"
    careless = Api(make_user("careless"), csrf=True)
    assert upload(careless, "/runs", {"agent": "shop", "input": "x"}, photo())[0] == 403
    assert upload(api, "/runs/x/cancel", {"reason": "no"}, photo())[0] in (400, 404)


def test_a_visitor_sends_a_picture(shop: Agent) -> None:
    run = run_agent(shop_agent("chat"), "hello", "s1")
    visitor = Program(session_token(Run.objects.get(pk=run.run_id).session, timedelta(minutes=5)))
    status, sent = upload(visitor, "/sessions/s1/messages", {"content": "look"}, photo())
    assert status == 201, sent
    assert files_of(Message.objects.get(run=sent["id"], kind="user"))


def served(api: Api, run: Any, data: bytes) -> Any:
    return api.client.get(f"{ROOT}/runs/{run}/files/{hashlib.sha256(data).hexdigest()}")


def test_files_are_served(api: Api, shop: Agent, folder: Path) -> None:
    files = [photo(PNG, HOSTILE), photo(BIG, "b.png"), photo(PDF, "a.pdf", "application/pdf")]
    files.append(photo(NOTE, "n.txt", "text/plain"))
    _, run = upload(api, "/runs", {"agent": "shop", "input": "see"}, *files)
    for data, kind, shown in (
        (PNG, "image/png", "inline"), (BIG, "image/png", "inline"),
        (PDF, "application/pdf", "attachment"), (NOTE, "text/plain; charset=utf-8", "attachment"),
    ):  # fmt: skip
        answer = served(api, run["id"], data)
        assert (answer.status_code, b"".join(answer.streaming_content)) == (200, data)
        assert (answer["Content-Type"], answer["Content-Length"]) == (kind, str(len(data)))
        assert answer["Content-Disposition"].startswith(f"{shown}; filename")
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert answer["Content-Security-Policy"] == "default-src 'none'; sandbox"
        assert "X-Evil" not in answer.headers
    assert "\n" not in served(api, run["id"], PNG)["Content-Disposition"]
    # Files that are not there, or were altered.
    _, other = upload(api, "/runs", {"agent": "shop", "input": "see"}, photo())
    big = hashlib.sha256(BIG).hexdigest()
    for path in (f"{other['id']}/files/{big}", f"{run['id']}/files/x", "x/files/y"):
        assert api.get(f"/runs/{path}")[0] == 404
    (stored,) = stored_in(folder)
    stored.write_bytes(BIG[:-1] + b"?")
    answer = served(api, run["id"], BIG)
    assert (answer.status_code, answer.json()["type"]) == (500, "urn:agentruns:payload")


def test_sensitive_results_take_the_permission(api: Api, owner: Any, folder: Path) -> None:
    agent = shop_agent(
        "scans", {"tools": [call("scan_passport"), call("photograph")]}, tools=[scan_passport, photograph]
    )
    run = the_run(run_agent(agent, "scan", "s1", actor=owner))
    passport, shot = Message.objects.filter(run=run, kind="tool_result").order_by("seq")
    revealer = Api(make_user("revealer", "view_run", "reveal_arguments"))
    for about in files_of(passport):
        path = f"/runs/{run.pk}/files/{about['sha256']}"
        refused(api.get(path), 403, "permission-denied")
        assert revealer.client.get(ROOT + path).status_code == 200
    assert served(api, run.pk, PNG).status_code == 200
    (about,) = files_of(shot)
    rows = json.dumps(api.get(f"/runs/{run.pk}/messages")[1])
    assert about["sha256"] in rows
    for hidden in ("passport.png", "7731-55", *[each["sha256"] for each in files_of(passport)], "base64"):
        assert hidden not in rows
    assert '"data"' not in rows
    items = {item["seq"]: item["payload"] for item in json.loads(rows)["items"]}
    assert items[passport.seq]["content"] == MASK


def test_rows_and_conversations_name_files(api: Api, shop: Agent, folder: Path) -> None:
    _, run = upload(api, "/runs", {"agent": "shop", "input": "see", "session": "s1"}, photo())
    (said, *_) = api.get("/sessions/s1/messages")[1]["items"]
    assert said["text"].startswith("see\n[image mug.png: image/png")
    row = api.get(f"/runs/{run['id']}/messages")[1]["items"][1]
    assert row["payload"]["content"][1]["sha256"] == hashlib.sha256(PNG).hexdigest()
    staff = Api(make_user("auditor", "view_run"))
    for reader in (api, staff):
        stored = reader.get(f"/runs/{run['id']}/messages")[1]["items"][1]["payload"]["stored"]
        assert "data" not in stored[0]
    sweep()
    assert row_of(Run.objects.get(pk=run["id"]), "user")


def test_content_in_a_file(folder: Path, api: Api, owner: Any) -> None:
    run = fetched(actor=owner)
    seq = row_of(run).seq
    (item,) = (one for one in api.get(f"/runs/{run.pk}/messages")[1]["items"] if one["seq"] == seq)
    assert item["payload"]["stored"]["size"] == MEGABYTE
    assert item["payload"]["content"].startswith(report_of(500) + "\n[only the beginning")
    path = f"/runs/{run.pk}/messages/{seq}/content"
    response: Any = api.client.get(api.root + path)
    assert response.getvalue().decode() == report_of(MEGABYTE)
    assert response["Content-Type"] == "text/plain; charset=utf-8"
    assert response["Content-Length"] == str(MEGABYTE)
    assert response["Content-Disposition"] == f'attachment; filename="{run.pk}-{seq}.txt"'
    assert response["X-Content-Type-Options"] == "nosniff"
    assert api.get(f"/runs/{run.pk}/messages/1/content")[0] == 404
    (file,) = stored_in(folder)
    file.write_bytes(b"X" + file.read_bytes()[1:])
    problem = refused(api.get(path), 500, "payload")
    assert "was altered" in problem["detail"]
    file.unlink()
    status, problem = api.get(path)
    assert (status, "is missing" in problem["detail"]) == (500, True)
    assert f"seq {seq}: file" in problem["detail"]


def test_under_asgi_content_is_streamed_too(folder: Path, owner: Any) -> None:
    run = fetched(actor=owner)
    content = find_content(run, row_of(run).seq)
    request = ASGIRequest({"type": "http", "method": "GET", "path": "/", "headers": []}, BytesIO())
    response = download(request, read_content(content, owner), content.headers)

    async def receive() -> list[bytes]:
        return [chunk async for chunk in response]

    with ThreadPoolExecutor() as thread:  # this one may have the loop of a browser
        chunks = thread.submit(lambda: asyncio.run(receive())).result()
    assert (response.is_async, len(chunks) > 1) == (True, True)
    assert b"".join(chunks).decode() == report_of(MEGABYTE)


def test_content_that_is_guarded(folder: Path, api: Api, owner: Any) -> None:
    run = fetched(tools=[fetch_secretly], actor=owner)
    path = f"/runs/{run.pk}/messages/{row_of(run).seq}/content"
    refused(api.get(path), 403, "permission-denied")
    revealer = Api(make_user("revealer", "view_run", "reveal_arguments"))
    response: Any = revealer.client.get(revealer.root + path)
    assert response.getvalue().decode() == report_of(MEGABYTE)
