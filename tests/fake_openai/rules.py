"""Rules that both APIs have: the shape of parameters, tools, schemas and files."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Collection
from io import BytesIO
from typing import Any

from PIL import Image

from tests.fake_anthropic import rules
from tests.fake_anthropic.faults import Refused

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
REASONING = re.compile(r"o\d|gpt-[5-9]")  # models that reason
BEGIN = {
    "image/jpeg": (b"\xff\xd8\xff",), "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/gif": (b"GIF87a", b"GIF89a"), "image/webp": (b"RIFF",),
}  # fmt: skip
_UNSUPPORTED = frozenset({"allOf", "not", "oneOf", "patternProperties", "prefixItems", "default"})


def require(holds: object, text: str, code: str | None = None, status: int = 400) -> None:
    """Raise Refused unless a rule holds."""
    if not holds:
        raise Refused(text, status, code=code)


def known(value: Any, where: str, names: Collection[str], required: Collection[str] = ()) -> dict[str, Any]:
    """Take an object with these names, among them the required ones, and no others."""
    found: dict[str, Any] = of(dict, value, where)
    for name in required:
        require(name in found, f"Missing required parameter: '{where}.{name}'.", "missing_required_parameter")
    for name in found:
        require(name in (*names, *required), f"Unknown parameter: '{where}.{name}'.", "unknown_parameter")
    return found


def of(kind: type, value: Any, where: str) -> Any:
    """Take a value of this JSON type."""
    require(isinstance(value, kind), f"Invalid type for '{where}': expected {kind.__name__}.", "invalid_type")
    return value


def filled(value: Any, where: str) -> Any:
    """Take a list that is not empty."""
    require(of(list, value, where), f"Invalid '{where}': empty array.", "empty_array")
    return value


def one_of(value: Any, where: str, allowed: Collection[str]) -> str:
    """Take one of these."""
    require(value in allowed, f"Invalid value for '{where}': '{value}'.", "invalid_value")
    return str(value)


def named(value: Any, where: str) -> None:
    """Refuse what cannot be the name of a tool."""
    is_name = isinstance(value, str) and NAME.fullmatch(value)
    require(is_name, f"Invalid '{where}': string does not match pattern.", "invalid_value")


def function(tool: dict[str, Any], where: str, *, is_strict: bool) -> None:
    """Check a function as a tool."""
    named(tool.get("name"), f"{where}.name")
    schema = of(dict, tool.get("parameters"), f"{where}.parameters")
    text = f"Invalid schema for function '{tool['name']}': schema must be of type 'object'."
    require(schema.get("type") == "object", text, "invalid_function_parameters")
    text = f"Invalid schema for function '{tool['name']}': object schema missing properties."
    require("properties" in schema, text, "invalid_function_parameters")
    text = f"Invalid schema for function '{tool['name']}': no oneOf, anyOf or allOf at the top level."
    require(not schema.keys() & {"oneOf", "anyOf", "allOf"}, text, "invalid_function_parameters")
    if is_strict:
        strict(schema, f"function '{tool['name']}'")


def form(value: Any, where: str) -> None:
    """Check the form of structured output."""
    known(value, where, ("description", "type"), ("name", "schema", "strict"))
    named(value["name"], f"{where}.name")
    is_object = value["schema"].get("type") == "object"
    require(is_object, f"Invalid schema for '{where}': must be an object.", "invalid_json_schema")
    if value["strict"]:
        strict(value["schema"], where)


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
            wrong = "'additionalProperties' is required to be false"
        elif sorted(schema.get("required", [])) != sorted(schema.get("properties", {})):
            wrong = "'required' is required to be an array including every key in properties"
    if found := _UNSUPPORTED & schema.keys():
        wrong = f"'{min(found)}' is not permitted"
    if "$ref" in schema and len(schema) > 1:
        wrong = "$ref cannot have keywords beside it"
    require(not wrong, f"Invalid schema for {where}: {wrong}.", "invalid_function_parameters")
    for name in ("properties", "$defs"):
        for each in schema.get(name, {}).values():
            strict(each, where)
    for name in ("items", "anyOf"):
        strict(schema.get(name), where)


def image(url: Any, where: str) -> None:
    """Check the address of a picture, or the picture in it."""
    if of(str, url, where).startswith("https://"):
        return
    media_type, data = _data(url, where)
    require(media_type in BEGIN, f"You uploaded an unsupported image: {media_type}.", "invalid_image_format")
    is_right = data.startswith(BEGIN[media_type])
    require(is_right, "The data does not represent a valid image.", "invalid_image_format")
    try:
        found = Image.open(BytesIO(data))
        found.load()
    except Exception:
        raise Refused("The data does not represent a valid image.", code="invalid_image_format") from None
    is_still = media_type != "image/gif" or getattr(found, "n_frames", 1) == 1
    require(is_still, "You uploaded an unsupported image: animated.", "invalid_image_format")


def file(name: Any, url: Any, where: str) -> None:
    """Check a PDF."""
    is_named = isinstance(name, str) and name.endswith(".pdf")
    require(is_named, f"Invalid '{where}.filename': {name!r}.", "unsupported_file")
    media_type, data = _data(url, where)
    is_pdf = media_type == "application/pdf" and data.startswith(b"%PDF-")
    require(is_pdf, f"Invalid file data: '{where}.file_data'.", "invalid_file_data")
    try:
        rules.pages_of(data, where)
    except Refused:
        raise Refused(f"Invalid file data: '{where}.file_data'.", code="invalid_file_data") from None


def _data(url: Any, where: str) -> tuple[str, bytes]:
    match = re.fullmatch(r"data:([\w/+.-]+);base64,(.+)", of(str, url, where), re.DOTALL)
    if match is None:
        raise Refused(f"Invalid '{where}'. Expected a base64-encoded data URL.", code="invalid_value")
    try:
        return match[1], base64.b64decode(match[2], validate=True)
    except binascii.Error:
        raise Refused(f"Invalid base64 in '{where}'.", code="invalid_base64_image") from None
