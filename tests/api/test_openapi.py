"""The OpenAPI document, its page and clients generated of it; and the API mounted anywhere, by anybody."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import jsonschema_rs
import pytest
from django.contrib.staticfiles import finders
from django.http import HttpRequest
from django.templatetags.static import static
from django.urls import include, path as at, reverse
from ninja import NinjaAPI
from ninja.errors import ConfigError
from pytest_django.live_server_helper import LiveServer

from agentruns import Agent, start_run
from agentruns.api import build_api, router
from agentruns.api.errors import CONTENT_TYPE, PROBLEMS, URN
from agentruns.models import Run
from agentruns.services.api_tokens import create_token
from tests.api import snapshot
from tests.api.hosting import Bearer, host
from tests.api.http import Api, make_user
from tests.programs import run_program

pytestmark = pytest.mark.django_db(transaction=True)

JSON = "application/json"
DOCUMENT = json.loads(snapshot.FILE.read_text())
OPERATIONS = [
    pytest.param(method, path, operation, id=operation["operationId"])
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
DOCUMENTED: list[Any] = [each.values[2] for each in OPERATIONS]


def bodies(operation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return each media type and its contents that an operation takes or answers."""
    holders = [operation.get("requestBody", {}), *operation["responses"].values()]
    return [each for holder in holders for each in holder.get("content", {}).items()]


def examples(content: dict[str, Any]) -> list[Any]:
    """Return the examples of a content."""
    named = [each["value"] for each in content.get("examples", {}).values()]
    return [*named, content["example"]] if "example" in content else named


def test_the_snapshot_is_what_the_code_says() -> None:
    assert snapshot.text() == snapshot.FILE.read_text(), (
        "The API has changed, and so has what others build on. If that is meant, renew the snapshot: "
        "python -m tests.api.snapshot > docs/openapi.json"
    )


def test_it_is_openapi_3_1() -> None:
    import schemathesis  # takes a second

    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.validate()
    assert len(list(schema.get_all_operations())) == len(OPERATIONS) == 36
    assert DOCUMENT["info"]["description"].count("\n\n**") >= 6, "a short guide"


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS)
def test_each_operation_is_complete(method: str, path: str, operation: dict[str, Any]) -> None:
    assert operation["summary"] and operation["description"] and "_" not in operation["summary"]
    assert all(each.get("description") for each in operation["parameters"])
    names = {each["name"] for each in operation["parameters"]}
    if path.endswith("/health"):
        assert "security" not in operation
    else:
        signed = [{"SignatureAuth": []}] if "/events/{name}" in path else []
        assert operation["security"] == [*signed, {"BearerAuth": []}, {"SessionAuth": []}]
        assert {"401", "403", "429"} <= set(operation["responses"])
    if method == "post":
        assert ("Idempotency-Key" in names) == ("/events/{name}" not in path)  # the first delivery counts
        assert {"400", "409", "413", "422"} <= set(operation["responses"])
    for status, response in operation["responses"].items():
        kinds = set(response.get("content", {}))
        if status in ("200", "201"):
            binary = all(each["schema"].get("format") == "binary" for each in response["content"].values())
            assert binary or kinds & {JSON, "text/event-stream"}
        elif status != "304":
            assert kinds == {CONTENT_TYPE}
            assert URN in response["description"]
    for kind, content in bodies(operation):
        if content["schema"].get("format") == "binary":
            continue
        assert examples(content)
        if kind != "text/event-stream":
            schema = {**content["schema"], "components": DOCUMENT["components"]}
            for example in examples(content):
                jsonschema_rs.validate(schema, example)


def test_problems_are_those_there_are() -> None:
    found = {
        (int(status), example["type"], example["title"])
        for operation in DOCUMENTED
        for status, response in operation["responses"].items()
        for example in examples(response.get("content", {}).get(CONTENT_TYPE, {}))
        if status == str(example["status"])
    }
    titles = {URN + name: (status, title) for status, name, title in PROBLEMS.values()}
    for status, kind, title in found:
        assert titles.get(kind, (status, title)) == (status, title)
    assert len(found) > 20


def test_an_api_of_a_hosts_documents_the_same() -> None:
    api = NinjaAPI(urls_namespace="documents")
    api.add_router("/agents", router)
    paths = api.get_openapi_schema(path_prefix="x/")["paths"]
    theirs = {each["operationId"]: each for methods in paths.values() for each in methods.values()}
    for operation in DOCUMENTED:
        known = theirs[operation["operationId"]]
        assert {int(status) for status in operation["responses"]} == set(known["responses"])
        assert len(known["parameters"]) == len(operation["parameters"])


@pytest.mark.parametrize("installed", [False, True])
def test_all_that_the_page_of_the_documentation_loads_is_here(settings: Any, installed: bool) -> None:
    """With and without ninja's own files."""
    if installed:
        settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "ninja"]
    api = Api()
    page = api.client.get("/api/docs").content.decode()
    assert ('"url": "openapi.json"' if installed else 'href="openapi.json"') in page
    assert 'data-api-csrf="true"' in page or not installed
    assert "://" not in page
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert loaded and not any("//" in each for each in loaded)
    for url in loaded:
        if url.startswith(static("")):
            assert finders.find(url.removeprefix(static(""))), url
        else:
            assert api.client.get(urljoin("/api/docs", url)).json() == DOCUMENT
    # Under a strict policy a script is a file.
    scripts = re.findall(r"<script([^>]*)>([^<]*)", page)
    assert all('type="application/json"' in about or not text.strip() for about, text in scripts)
    assert (len(scripts) > 1) is installed
    assert ("INSTALLED_APPS" in page) is not installed
    assert "style=" not in page and "<style" not in page


BIN = Path(sys.executable).parent


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Run a generator in a folder from which its code can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def generate(*words: str) -> str:
        done = run_program(BIN / words[0], *words[1:], cwd=tmp_path)
        return done.stdout + done.stderr

    yield generate
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("client_of_agentruns", "models_of_agentruns"):
            del sys.modules[name]


def test_openapi_python_client(generated: Callable[..., str], live_server: LiveServer, shop: Agent) -> None:
    user = make_user("generator", "start_run", "view_run", "cancel_run", "pause_run", "resume_run")
    _, token = create_token(user, ["runs:read", "runs:write"])
    said = generated(
        "openapi-python-client", "generate", "--path", str(snapshot.FILE),
        "--output-path", "client_of_agentruns", "--meta", "none",
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
        "datamodel-codegen", "--input", str(snapshot.FILE), "--input-file-type", "openapi",
        "--output", "models_of_agentruns.py", "--output-model-type", "pydantic_v2.BaseModel",
        "--formatters", "builtin",
    )  # fmt: skip
    models: Any = importlib.import_module("models_of_agentruns")
    run = start_run(shop, "hi", "s1", actor=owner)
    shown = api.get(f"/runs/{run.pk}")[1]
    assert models.RunOut.model_validate(shown).model_dump(mode="json") == shown
    for tool in api.get("/agents")[1]["items"][0]["tools"]:
        assert models.ToolOut.model_validate(tool).model_dump(mode="json") == tool


def test_there_is_one_api_per_process_and_our_router_takes_no_operation_of_somebody_else() -> None:
    assert build_api() is build_api()
    assert reverse("agentruns:list_runs") == "/api/runs"
    assert reverse("agentruns:approve", args=["x"]) == "/api/approvals/x/approve"
    with pytest.raises(ConfigError, match="Cannot modify router"):

        @router.get("/theirs")
        def theirs(request: HttpRequest) -> None:
            """Return nothing."""


def test_under_a_namespace_and_twice(api: Api, urlconf: Any, shop: Agent, owner: Any) -> None:
    run = start_run(shop, "hi", "s1", actor=owner)
    inner = [at("agents/", include("agentruns.urls"))]
    urlconf(
        at("v1/", include((inner, "inner"), namespace="outer")),
        at("v2/<slug:tenant>/", include("agentruns.urls")),
        at("", include("agentruns.urls")),
    )
    assert reverse("outer:agentruns:list_runs") == "/v1/agents/runs"
    for root in ("/v1/agents", "/v2/acme", ""):
        there = Api(owner, root=root)
        assert there.get(f"/runs/{run.pk}")[0] == 200
        assert there.get("/runs/x")[0] == 404
        assert there.get("/sessions/s1")[1]["runs"]["items"][0]["id"] == str(run.pk)
        assert f"{root}/runs" in there.client.get(f"{root}/openapi.json").json()["paths"]
        assert there.client.get(f"{root}/docs").status_code == 200


def test_in_somebody_elses_api_with_and_without_register_errors(
    urlconf: Any, shop: Agent, owner: Any
) -> None:
    urlconf(at("host/", host().urls))
    ours = Api(owner, root="/host/agents")
    assert ours.get("/runs") == (200, {"items": [], "next": None})
    assert ours.post("/runs", {"agent": "shop", "input": "hi"})[0] == 201
    for query, expected in (("/x", 404), ("?status=x", 422), ("?cursor=x", 400)):
        assert ours.get(f"/runs{query}")[0] == expected
    assert ours.post("/runs", "{")[0] == 400
    assert ours.request("DELETE", "/runs")[0] == 405
    assert Api(root="/host/agents").get("/runs")[0] == 401

    # Their own routes answer as before, but for what only agentruns raises.
    def theirs(raises: str, **query: str) -> tuple[int, Any]:
        answer = ours.client.get("/host/theirs", {"raises": raises, **query})
        return answer.status_code, answer.json()

    assert theirs("http") == (400, {"theirs": "bad"})
    assert theirs("key") == (418, {"theirs": True})
    for expected, (status, answer) in {404: theirs("404"), 422: theirs("key", number="x")}.items():
        assert (status, [*answer]) == (expected, ["detail"])
    status, answer = theirs("busy")
    assert (status, answer["run_id"]) == (409, "the run")
    urlconf(at("host/", host(errors=False).urls))
    client = ours.client
    for url, status in {"/runs/x": 404, "/runs?cursor=x": 400, "/runs?status=x": 422}.items():
        response = client.get("/host/agents" + url)
        assert (response.status_code, response["Content-Type"]) == (status, "application/json; charset=utf-8")


def test_a_host_may_bring_its_own_auth(urlconf: Any, shop: Agent, owner: Any) -> None:
    urlconf(at("host/", host(auth=Bearer()).urls))
    api = Api(root="/host/agents", csrf=True)
    body = {"agent": "shop", "input": "hi"}
    assert api.post("/runs", body)[0] == 401
    assert api.post("/runs", body, Authorization="Bearer owner")[1]["owner"] == str(owner.pk)
    start_run(shop, "the program's", "s2")
    # An anonymous user owns nothing, and is never taken for the program.
    for send in (api.client.get, api.client.post):
        rogue = {"Authorization": "Bearer rogue"}
        assert send("/host/agents/runs", body, "application/json", headers=rogue).status_code == 401
    assert Run.objects.count() == 2


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_another_database(pending: Any, owner: Any, decider: Any, settings: Any) -> None:
    """Everything but the users is where AGENTRUNS_DATABASE says."""
    settings.AGENTRUNS_DATABASE = "other"
    approval = pending()
    assert approval._state.db == "other"
    api, staff = Api(owner), Api(decider)
    run = api.get("/runs")[1]["items"][0]
    assert api.post("/runs", {"agent": "shop", "input": "again", "session": "s1"})[1]["run_id"] == run["id"]
    assert len(api.get(f"/runs/{run['id']}/messages")[1]["items"]) == 4
    assert staff.post(f"/approvals/{approval.pk}/approve", {"digest": approval.digest})[0] == 200
    assert staff.get("/approvals", status="approved")[1]["items"][0]["id"] == str(approval.pk)
    assert api.post(f"/runs/{run['id']}/cancel")[0] == 200
    assert api.post(f"/runs/{run['id']}/cancel")[1]["ended_by_name"] == "owner"
    assert not Run.objects.using("default").exists()
