"""The arguments of a server's tool, validated by the JSON Schema that the server declares.

The schema's regular expressions are matched in linear time, because Python's `re` could take hours and block
the thread that extends the lease. The server checks patterns that cannot be matched in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, RootModel
from pydantic_core import SchemaError, SchemaValidator, core_schema

from agentruns.tools.card import one_line

_SHOWN_ERRORS = 10


def arguments_model(name: str, schema: dict[str, Any], *, quotes: bool) -> type[BaseModel]:
    """Build a model that accepts the arguments that fit a JSON Schema, and does not change them.

    The server adds the defaults and checks `unevaluatedProperties`. Errors quote the arguments if `quotes`.
    """

    @cache
    def validator() -> Any:  # importing it takes long; and a $ref outside of the schema is not followed
        from jsonschema.exceptions import ValidationError
        from jsonschema.validators import extend, validator_for
        from referencing import Registry

        kind = validator_for(schema)

        def pattern(validator: Any, pattern: str, given: Any, schema: Any) -> Iterator[Any]:
            matches = _matcher(pattern)
            if isinstance(given, str) and matches is not None and not matches(given):
                yield ValidationError(f"{given!r} does not match {pattern!r}")

        def properties(validator: Any, patterns: dict[str, Any], given: Any, schema: Any) -> Iterator[Any]:
            for pattern, inner in patterns.items() if isinstance(given, dict) else ():
                matches = _matcher(pattern)
                for name in filter(matches, given) if matches is not None else ():
                    yield from validator.descend(given[name], inner, path=name, schema_path=pattern)

        def additional(validator: Any, allowed: Any, given: Any, schema: Any) -> Iterator[Any]:
            if "patternProperties" not in schema:  # it would match these by Python's `re`
                yield from kind.VALIDATORS["additionalProperties"](validator, allowed, given, schema)

        mine: dict[str, Any] = {"pattern": pattern, "patternProperties": properties}
        mine["additionalProperties"] = additional
        mine["unevaluatedProperties"] = lambda validator, value, given, schema: ()  # left to the server
        return extend(kind, mine)(schema, registry=Registry())

    def fitting(given: dict[str, Any]) -> dict[str, Any]:
        try:
            errors = [*islice(validator().iter_errors(given), _SHOWN_ERRORS)]
        except Exception as error:
            raise ValueError(f"the schema of {name} cannot be used: {one_line(str(error))}") from None
        if errors:
            texts = [(e.json_path, e.message if quotes else f"does not fit {e.validator}") for e in errors]
            raise ValueError("; ".join(one_line(": ".join(each), 300) for each in texts))
        return given

    return RootModel[Annotated[dict[str, Any], AfterValidator(fitting)]]


@cache
def _matcher(pattern: str) -> Callable[[Any], bool] | None:
    """Build a predicate that searches a text for the pattern; None if Rust's engine cannot match it."""
    try:
        form = core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True)
        return SchemaValidator(form).isinstance_python
    except SchemaError:
        return None
