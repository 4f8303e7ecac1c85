"""Arguments of a call: from what a model wrote to what is shown, approved, stored and passed on."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, to_json

from agentruns.exceptions import AgentRunsError
from agentruns.tools.card import one_line
from agentruns.utils import json as canonical

_MAX_ERRORS = 10
_MAX_NAME = 60


class InvalidArguments(AgentRunsError, ValueError):
    """The input does not fit the tool's signature. The text is meant for the model: short, field by field."""


def effective(model: type[BaseModel], raw: Any) -> dict[str, Any]:
    """Return the effective arguments of `raw`: validated, coerced, defaults filled in, as JSON.

    Raises InvalidArguments, also when validating the result again would give something else: after a
    restart the handler would get other arguments than those shown and approved.
    """
    arguments = dump(validate(model, raw))
    again = dump(validate(model, arguments))
    try:
        same = canonical.dumps(arguments) == canonical.dumps(again)
    except (TypeError, ValueError, RecursionError):
        raise InvalidArguments("The arguments cannot be stored as JSON.") from None
    if not same:
        raise InvalidArguments(f"{_changed(arguments, again)}: this value does not read back as itself.")
    return arguments


def validate(model: type[BaseModel], raw: Any) -> BaseModel:
    """Return the model of `raw`; raises InvalidArguments whatever goes wrong in it."""
    if not isinstance(raw, dict):
        raise InvalidArguments(f"The input must be a JSON object, not {type(raw).__name__}.")
    try:
        text = to_json(raw, inf_nan_mode="constants")
    except Exception:
        text = None  # a lone surrogate, or not JSON: only the lenient way can say which
    try:
        # As JSON, because it is: a strict datetime then accepts its text, as it must after a restart.
        return model.model_validate(raw) if text is None else model.model_validate_json(text)
    except ValidationError as error:
        raise InvalidArguments(_explain(model, error)) from None
    except Exception as error:
        raise InvalidArguments(f"The arguments could not be validated: {type(error).__name__}.") from error


def dump(arguments: BaseModel) -> dict[str, Any]:
    """Return validated arguments as a JSON object; raises InvalidArguments."""
    try:
        return arguments.model_dump(mode="json", by_alias=True, round_trip=True, warnings=False)
    except Exception as error:
        raise InvalidArguments(f"The arguments cannot be stored as JSON: {type(error).__name__}.") from error


def misfit(error: Exception) -> str:
    """Return in a line why a result does not fit its annotation."""
    if not isinstance(error, ValidationError):
        return type(error).__name__
    # The result was validated inside a list of one.
    return "; ".join(_line(each["loc"][1:], each["msg"], "result") for each in _details(error)[:3])


def _explain(model: type[BaseModel], error: ValidationError) -> str:
    found = _details(error)
    lines = [f"- {_line(each['loc'], each['msg'], 'input')}" for each in found[:_MAX_ERRORS]]
    if len(found) > _MAX_ERRORS:
        lines.append(f"- and {len(found) - _MAX_ERRORS} more")
    if any(each["type"] == "extra_forbidden" for each in found):
        names = [field.alias or name for name, field in model.model_fields.items()]
        lines.append(f"Parameters: {', '.join(names) or 'none'}.")
    return "Invalid arguments:\n" + "\n".join(lines)


def _details(error: ValidationError) -> list[ErrorDetails]:
    return error.errors(include_url=False, include_context=False, include_input=False)


def _line(loc: tuple[int | str, ...], message: str, otherwise: str) -> str:
    where = ".".join(str(part) for part in loc) or otherwise
    return f"{one_line(where, _MAX_NAME)}: {one_line(message)}"


def _changed(first: dict[str, Any], second: dict[str, Any]) -> str:
    names = [
        name
        for name in first
        if name not in second or canonical.dumps(first[name]) != canonical.dumps(second[name])
    ]
    return ", ".join(names) or "input"
