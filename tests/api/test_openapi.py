"""The OpenAPI document: complete, true to its own schemas, and the one in the repository."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from ninja import NinjaAPI

from agentruns.api import router
from agentruns.api.errors import CONTENT_TYPE, PROBLEMS, URN
from tests.api import snapshot

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
    assert len(list(schema.get_all_operations())) == len(OPERATIONS) == 25
    assert DOCUMENT["info"]["description"].count("\n\n**") >= 6, "a short guide"


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS)
def test_each_operation_is_complete(method: str, path: str, operation: dict[str, Any]) -> None:
    assert operation["summary"] and operation["description"] and "_" not in operation["summary"]
    assert all(each.get("description") for each in operation["parameters"])
    names = {each["name"] for each in operation["parameters"]}
    if path.endswith("/health"):
        assert "security" not in operation
    else:
        assert operation["security"] == [{"BearerAuth": []}, {"SessionAuth": []}]
        assert {"401", "403", "429"} <= set(operation["responses"])
    if method == "post":
        assert "Idempotency-Key" in names
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
