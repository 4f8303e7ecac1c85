"""Clients that generators make of the OpenAPI document, at a server with real runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_django.live_server_helper import LiveServer

from agentruns import Agent, start_run
from agentruns.models import Run
from agentruns.services.api_tokens import create_token
from tests.api.http import Api, make_user
from tests.programs import run_program

pytestmark = pytest.mark.django_db(transaction=True)

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.json"
BIN = Path(sys.executable).parent


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Run a generator in a folder from which its code can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def generate(*words: str) -> str:
        done = run_program(BIN / words[0], *words[1:], cwd=tmp_path)
        return done.stdout + done.stderr

    yield generate
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("client_of_agentruns", "models_of_agentruns")
    ]:
        del sys.modules[name]


def test_openapi_python_client(generated: Callable[..., str], live_server: LiveServer, shop: Agent) -> None:
    user = make_user("generator", "start_run", "view_run", "cancel_run", "pause_run", "resume_run")
    _, token = create_token(user, ["runs:read", "runs:write"])
    said = generated(
        "openapi-python-client", "generate", "--path", str(DOCUMENT), "--output-path", "client_of_agentruns",
        "--meta", "none",
    )  # fmt: skip
    assert "WARNING parsing" not in said and "Unable to" not in said, said

    def part(name: str) -> Any:
        return importlib.import_module(f"client_of_agentruns.{name}")

    def call(name: str, *args: Any, **options: Any) -> Any:
        answer = part(f"api.agent_runs.{name}").sync_detailed(*args, client=client, **options)
        assert answer.status_code.value < 300, answer.content
        return answer.parsed

    with part("client").AuthenticatedClient(base_url=live_server.url, token=token) as client:
        [listed] = [one for one in call("list_agents").items if one.name == shop.name]
        assert {tool.name: tool.requires_approval for tool in listed.tools}["post"] is False
        assert {tool.name: tool.requires_approval for tool in listed.tools}["refund"].value == "predicate"
        started = call("start_run", body=part("models").StartRun(agent=shop.name, input_="hi", session="s1"))
        assert call("get_run", started.id).status == "queued"
        assert [row.kind for row in call("list_messages", started.id).items] == ["run_started", "user"]
        for name in ("pause_run", "resume_run", "cancel_run"):  # their bodies may be left out
            call(name, started.id)
        assert Run.objects.get().status == "cancelled"


def test_datamodel_codegen(generated: Callable[..., str], shop: Agent, owner: Any, api: Api) -> None:
    generated(
        "datamodel-codegen", "--input", str(DOCUMENT), "--input-file-type", "openapi",
        "--output", "models_of_agentruns.py", "--output-model-type", "pydantic_v2.BaseModel",
        "--formatters", "builtin",
    )  # fmt: skip
    models: Any = importlib.import_module("models_of_agentruns")
    run = start_run(shop, "hi", "s1", actor=owner)
    shown = api.get(f"/runs/{run.pk}")[1]
    assert models.RunOut.model_validate(shown).model_dump(mode="json") == shown
    for tool in api.get("/agents")[1]["items"][0]["tools"]:
        assert models.ToolOut.model_validate(tool).model_dump(mode="json") == tool
