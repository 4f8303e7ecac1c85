"""The content of a row that is in a file, over the API."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIRequest

from agentruns.services.transfer import download, find_content, read_content
from tests.api.http import Api, make_user
from tests.files import MEGABYTE, fetch_secretly, fetched, report_of, row_of, stored_in

pytestmark = pytest.mark.django_db(transaction=True)


def test_content(folder: Path, api: Api, owner: Any) -> None:
    run = fetched(actor=owner)
    seq = row_of(run).seq
    (item,) = (one for one in api.get(f"/runs/{run.pk}/messages")[1]["items"] if one["seq"] == seq)
    assert item["payload"]["stored"]["size"] == MEGABYTE
    assert item["payload"]["content"].startswith(report_of(500) + "\n[only the beginning")
    path = f"/runs/{run.pk}/messages/{seq}/content"
    response = api.client.get(api.root + path)
    assert b"".join(response.streaming_content).decode() == report_of(MEGABYTE)
    assert response["Content-Type"] == "text/plain; charset=utf-8"
    assert response["Content-Length"] == str(MEGABYTE)
    assert response["Content-Disposition"] == f'attachment; filename="{run.pk}-{seq}.txt"'
    assert response["X-Content-Type-Options"] == "nosniff"
    assert api.get(f"/runs/{run.pk}/messages/1/content")[0] == 404
    assert Api(make_user("stranger")).get(path)[0] == 404
    assert Api().get(path)[0] == 401
    (file,) = stored_in(folder)
    file.write_bytes(b"X" + file.read_bytes()[1:])
    status, problem = api.get(path)
    assert (status, problem["type"]) == (500, "urn:agentruns:payload")
    assert "was altered" in problem["detail"]
    file.unlink()
    status, problem = api.get(path)
    assert (status, f"seq {seq}: file" in problem["detail"], "is missing" in problem["detail"]) == (
        500,
        True,
        True,
    )


def test_under_asgi_it_is_streamed_too(folder: Path, owner: Any) -> None:
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


def test_what_is_guarded(folder: Path, api: Api, owner: Any) -> None:
    run = fetched(tools=[fetch_secretly], actor=owner)
    path = f"/runs/{run.pk}/messages/{row_of(run).seq}/content"
    assert (api.get(path)[0], api.get(path)[1]["type"]) == (403, "urn:agentruns:permission-denied")
    revealer = Api(make_user("revealer", "view_run", "reveal_arguments"))
    response = revealer.client.get(revealer.root + path)
    assert b"".join(response.streaming_content).decode() == report_of(MEGABYTE)
