"""The arguments of a server's tool, validated by the JSON Schema that the server declares.

A stranger wrote the schema, and a model the arguments, so a validation has a limit of work, counted in steps.
The schema's regular expressions are matched in linear time, because Python's `re` could take hours and block
the thread that extends the lease. The server checks patterns that cannot be matched in this way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, RootModel
from pydantic_core import SchemaError, SchemaValidator, core_schema

from agentruns.tools.card import one_line
from agentruns.utils import json as canonical

COMPARED = ("const", "enum", "uniqueItems")  # read every item of a value
QUOTED = (*COMPARED, "not", "oneOf")  # an error quotes what they demand, however large
MOST_STEPS = 100_000  # of a validation: keywords applied, and parts of large values that these read
MOST_MATCHED = 50_000_000  # size of an expression times characters of a text
_SHOWN_ERRORS = 10


class _TooMuchWork(Exception):
    """Raised inside of a validation that has taken all its steps."""


class _Work:
    """The steps that are left of one validation, and the sizes of the objects and lists in the arguments."""

    def __init__(self, given: Any) -> None:
        self.left = MOST_STEPS
        self.sizes: dict[int, int] = {}
        self._measure(given)

    def _measure(self, value: Any) -> int:
        if not isinstance(value, dict | list):
            return 1 + (len(value) if isinstance(value, str) else 0)
        names, items = (value.keys(), value.values()) if isinstance(value, dict) else ((), value)
        size = self.sizes[id(value)] = 1 + sum(map(len, names)) + sum(map(self._measure, items))
        return size

    def spend(self, word: str, keyword: Any, given: Any) -> None:
        """Take the steps for one keyword, whose value is `keyword`, and one value; raises _TooMuchWork."""
        size = len(given) if isinstance(given, str) else self.sizes.get(id(given), 0)
        lists = [each for each in (keyword, given) if isinstance(each, dict | list)]
        self.left -= 1 + size // 256 + sum(len(each) // 8 for each in lists)
        if word in QUOTED:
            self.left -= (self.sizes.get(id(keyword)) or self._measure(keyword)) // 256
        if word in COMPARED and isinstance(given, dict | list):
            self.left -= _items(given) * (len(keyword) if word == "enum" else 1) // 8
        if self.left < 0:
            raise _TooMuchWork


_work: ContextVar[_Work] = ContextVar("agentruns_validation")


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
            if isinstance(given, str) and _matches(pattern, given) is False:
                yield ValidationError(f"{given!r} does not match {pattern!r}")

        def properties(validator: Any, patterns: dict[str, Any], given: Any, schema: Any) -> Iterator[Any]:
            for pattern, inner in patterns.items() if isinstance(given, dict) else ():
                for name in given:
                    _work.get().spend("pattern", pattern, name)
                    if _matches(pattern, name):
                        yield from validator.descend(given[name], inner, path=name, schema_path=pattern)

        def additional(validator: Any, allowed: Any, given: Any, schema: Any) -> Iterator[Any]:
            if "patternProperties" not in schema:  # it would match these by Python's `re`
                yield from kind.VALIDATORS["additionalProperties"](validator, allowed, given, schema)

        def unique(validator: Any, wanted: Any, given: Any, schema: Any) -> Iterator[Any]:
            items = given if wanted and isinstance(given, list) else []
            if len({canonical.dumps(_equal(each)) for each in items}) < len(items):
                yield ValidationError(f"{given!r} has non-unique elements")

        def counted(word: str, check: Any, validator: Any, keyword: Any, given: Any, schema: Any) -> Any:
            _work.get().spend(word, keyword, given)
            return check(validator, keyword, given, schema)

        mine: dict[str, Any] = {"pattern": pattern, "patternProperties": properties, "uniqueItems": unique}
        mine["additionalProperties"] = additional
        mine["unevaluatedProperties"] = lambda validator, value, given, schema: ()  # left to the server
        checks = {**kind.VALIDATORS, **mine}
        made: Any = extend(kind, {word: partial(counted, word, check) for word, check in checks.items()})

        def evolve(self: Any, **changes: Any) -> Any:
            # The original would validate a part that has its own `$schema` without our keywords.
            return made(**{**{alias: getattr(self, name) for alias, name in fields}, **changes})

        fields = [(each.alias, each.name) for each in made.__attrs_attrs__ if each.init]
        made.evolve = evolve
        return made(schema, registry=Registry())

    def fitting(given: dict[str, Any]) -> dict[str, Any]:
        token = _work.set(_Work(given))
        try:
            errors = [*islice(validator().iter_errors(given), _SHOWN_ERRORS)]
        except _TooMuchWork:
            raise ValueError(
                f"to check these arguments by the schema of {name} takes too long: give fewer or smaller ones"
            ) from None
        except Exception as error:
            raise ValueError(f"the schema of {name} cannot be used: {one_line(str(error))}") from None
        finally:
            _work.reset(token)
        if errors:
            texts = [(e.json_path, e.message if quotes else f"does not fit {e.validator}") for e in errors]
            raise ValueError("; ".join(one_line(": ".join(each), 300) for each in texts))
        return given

    return RootModel[Annotated[dict[str, Any], AfterValidator(fitting)]]


def _items(value: Any) -> int:
    """Count the values in a JSON value, at any depth, and the value itself."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_items, inner))


def _equal(value: Any) -> Any:
    """Convert integral floats in a JSON value to integers, which are equal to them in JSON Schema."""
    if isinstance(value, dict):
        return {name: _equal(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_equal, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _matches(pattern: str, text: str) -> bool | None:
    """Search a text for a pattern; None if that may take long, or if Rust's engine cannot match it."""
    counts = [max(map(int, filter(None, each))) for each in re.findall(r"\{(\d+),?(\d*)\}", pattern)]
    is_quick = len(pattern) * math.prod(counts) * len(text) <= MOST_MATCHED
    matches = _compiled(pattern) if is_quick else None
    return None if matches is None else matches(text)


@cache
def _compiled(pattern: str) -> Callable[[Any], bool] | None:
    try:
        form = core_schema.str_schema(pattern=pattern, regex_engine="rust-regex", strict=True)
        return SchemaValidator(form).isinstance_python
    except SchemaError:
        return None
