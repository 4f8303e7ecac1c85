"""Rules that both APIs have: the shape of parameters, tools, schemas and files, in OpenAI's own words."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection
from typing import Any

from tests.fake_anthropic.files import BEGIN

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
REASONING = re.compile(r"o\d|gpt-[5-9]")  # models that reason
_UNSUPPORTED = frozenset({"allOf", "not", "oneOf", "patternProperties", "prefixItems", "default"})


class Refused(Exception):
    """The request is answered with an error."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        type: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.headers = message, status, headers or {}
        self.error = {"message": message, "type": type, "param": None, "code": code}


def known(value: Any, where: str, names: Collection[str], required: Collection[str] = ()) -> dict[str, Any]:
    """Return `value` if it is an object with these names, among them the required ones."""
    if not isinstance(value, dict):
        raise Refused(f"Invalid type for '{where}': expected an object.", code="invalid_type")
    for name in required:
        if name not in value:
            raise Refused(f"Missing required parameter: '{where}.{name}'.", code="missing_required_parameter")
    for name in value:
        if name not in names and name not in required:
            raise Refused(f"Unknown parameter: '{where}.{name}'.", code="unknown_parameter")
    return value


def of(kind: type, value: Any, where: str) -> Any:
    """Return a value that is of this JSON type."""
    if not isinstance(value, kind):
        raise Refused(f"Invalid type for '{where}': expected {kind.__name__}.", code="invalid_type")
    return value


def one_of(value: Any, where: str, allowed: Collection[str]) -> str:
    """Return a value that is one of these."""
    if value not in allowed:
        listed = ", ".join(f"'{each}'" for each in sorted(allowed))
        raise Refused(f"Invalid value: '{value}'. Supported values are: {listed}.", code="invalid_value")
    return str(value)


def named(value: Any, where: str) -> None:
    """Refuse what cannot be the name of a tool."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise Refused(f"Invalid '{where}': string does not match pattern. Expected a string that matches "
                      f"the pattern '^[a-zA-Z0-9_-]+$'.", code="invalid_value")  # fmt: skip


def limit(body: dict[str, Any], name: str) -> None:
    """Check a bound on the reply's tokens."""
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or value < 16):
        raise Refused(f"Invalid '{name}': integer below minimum value.", code="integer_below_min_value")


def function(tool: dict[str, Any], where: str, *, is_strict: bool) -> None:
    """Check a function as a tool."""
    named(tool.get("name"), f"{where}.name")
    schema = of(dict, tool.get("parameters"), f"{where}.parameters")
    if schema.get("type") != "object":
        raise Refused(
            f"Invalid schema for function '{tool['name']}': schema must be a JSON Schema of 'type: "
            f'"object"\', got \'type: "{schema.get("type")}"\'.',
            code="invalid_function_parameters",
        )
    if is_strict:
        strict(schema, f"function '{tool['name']}'")


def form(value: Any, where: str) -> None:
    """Check the form of structured output."""
    known(value, where, ("description", "type"), ("name", "schema", "strict"))
    named(value["name"], f"{where}.name")
    if value["schema"].get("type") != "object":
        raise Refused(
            f"Invalid schema for response_format '{value['name']}': schema must be an object.",
            code="invalid_json_schema",
        )
    if value["strict"]:
        strict(value["schema"], f"response_format '{value['name']}'")


def strict(schema: Any, where: str) -> None:
    """Refuse a schema that strict mode has no grammar for."""
    if isinstance(schema, list):
        for each in schema:
            strict(each, where)
    if not isinstance(schema, dict):
        return
    wrong = ""
    if schema.get("type") == "object":
        if schema.get("additionalProperties") is not False:
            wrong = "'additionalProperties' is required to be supplied and to be false"
        elif sorted(schema.get("required", [])) != sorted(schema.get("properties", {})):
            wrong = (
                "'required' is required to be supplied and to be an array including every key in properties"
            )
    if found := _UNSUPPORTED & schema.keys():
        wrong = f"'{min(found)}' is not permitted"
    if "$ref" in schema and len(schema) > 1:
        wrong = "$ref cannot have keywords beside it"
    if wrong:
        raise Refused(
            f"Invalid schema for {where}: In context=(), {wrong}.", code="invalid_function_parameters"
        )
    for name in ("properties", "$defs"):
        for each in schema.get(name, {}).values():
            strict(each, where)
    for name in ("items", "anyOf"):
        strict(schema.get(name), where)


def image(url: Any, where: str) -> None:
    """Check the address of a picture, or the picture in it."""
    of(str, url, where)
    if url.startswith("https://"):
        return
    media_type, data = _data(url, where)
    if media_type not in BEGIN:
        raise Refused(f"You uploaded an unsupported image: {media_type}.", code="invalid_image_format")
    if not data.startswith(BEGIN[media_type]):
        raise Refused(
            "The image data you provided does not represent a valid image.", code="invalid_image_format"
        )


def file(name: Any, url: Any, where: str) -> None:
    """Check a PDF."""
    if not isinstance(name, str) or not name.endswith(".pdf"):
        raise Refused(f"Invalid '{where}.filename': {name!r}.", code="unsupported_file")
    media_type, data = _data(url, where)
    if media_type != "application/pdf" or not data.startswith(b"%PDF-"):
        raise Refused(f"Invalid file data: '{where}.file_data'.", code="invalid_file_data")


def _data(url: Any, where: str) -> tuple[str, bytes]:
    match = re.fullmatch(r"data:([\w/+.-]+);base64,(.+)", of(str, url, where), re.DOTALL)
    if match is None:
        raise Refused(f"Invalid '{where}'. Expected a base64-encoded data URL.", code="invalid_value")
    try:
        return match[1], base64.b64decode(match[2], validate=True)
    except binascii.Error:
        raise Refused(f"Invalid base64 in '{where}'.", code="invalid_base64_image") from None
