"""Structured output: the text of the last reply must be a value of the agent's `output_type`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

CORRECTION = (
    "Your answer is not of the required form, so it could not be used:\n{problem}\n"
    "Answer again with only the corrected JSON."
)
MAX_PROBLEM = 2000


def schema_of(output_type: type[BaseModel] | None) -> dict[str, Any] | None:
    """Build the JSON Schema of an output type; None without a type."""
    return None if output_type is None else output_type.model_json_schema()


def problem_with(output_type: type[BaseModel] | None, text: str) -> str:
    """Explain why a text is no JSON value of the output type; "" if it is one, or if there is no type."""
    if output_type is None:
        return ""
    try:
        output_type.model_validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)
        lines = [f"- {'.'.join(map(str, one['loc'])) or 'the whole'}: {one['msg']}" for one in wrong]
        return "\n".join(lines)[:MAX_PROBLEM]
    except Exception as error:  # from the project's own validator
        return f"{type(error).__name__}: {error}"[:MAX_PROBLEM]
    return ""


def value_of(output_type: type[BaseModel] | None, text: str | None) -> Any:
    """Convert a stored output to a value of the type; return the text if it does not fit."""
    if output_type is None or text is None:
        return text
    try:
        return output_type.model_validate_json(text)
    except Exception:  # from the project's own validator, or because it has changed since
        return text


def shown(output: Any) -> Any:
    """Convert a value of a pydantic model to JSON text; return any other output unchanged."""
    return output.model_dump_json() if isinstance(output, BaseModel) else output
