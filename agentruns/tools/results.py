"""Convert the result of a handler, whatever its type, to JSON."""

from __future__ import annotations

import base64
import enum
import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import to_json, to_jsonable_python

from agentruns.utils import json as canonical
from agentruns.utils.bounds import MAX_RESULT_DEPTH

_MAX_BITS = 14_000
_RESULT = ConfigDict(arbitrary_types_allowed=True, ser_json_inf_nan="constants")


class SameKeyError(ValueError):
    """Raised if two keys of a mapping have the same form in JSON."""


def result_adapter(annotation: Any) -> TypeAdapter[Any]:
    """Build an adapter for a list that holds one value of type `annotation`; raises any error of pydantic.

    The list is needed because only inside it our configuration applies to a model's fields. The configuration
    keeps NaN, which pydantic would write as null.
    """
    return TypeAdapter(list[annotation], config=_RESULT)


def dumped(adapter: TypeAdapter[Any], value: Any, **options: Any) -> Any:
    """Convert a list of one value to JSON by its adapter; return the list.

    Raises any error of pydantic. Raises SameKeyError if two keys of a mapping become the same key, because
    one of the two members would be dropped silently.
    """
    plain = adapter.dump_python(value, mode="json", by_alias=True, warnings=False, **options)
    text = adapter.dump_json(value, by_alias=True, warnings=False, **options)
    json.loads(text, object_pairs_hook=_distinct)
    return plain


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise SameKeyError("two of its keys are the same in JSON, so one of them is renamed")


def to_jsonable(value: Any) -> tuple[Any, bool]:
    """Convert `value` to JSON that `canonical.dumps` accepts; return the JSON and a flag.

    The flag is True if a part that has no form in JSON became text, or if one of two equal keys was renamed.
    Never raises, because the effect has happened by now, and an error would lose a known result.
    """
    walk = _Walk()
    try:
        content = walk.convert(value, 0)
        canonical.dumps(content)
    except Exception:
        return _text(value), True
    return content, walk.stringified


class _Walk:
    """The state of one conversion: the ids of the containers around the value, and `stringified`."""

    def __init__(self) -> None:
        self.stringified = False
        self.inside: set[int] = set()

    def convert(self, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return self.convert(value.value, depth)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            number = int.__int__(value)
            # Python refuses to print very large numbers in decimal, hex has no limit.
            return self.text(hex(number)) if number.bit_length() > _MAX_BITS else number
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, bytes | bytearray | memoryview):
            try:
                return bytes(value).decode()
            except UnicodeDecodeError:
                return base64.b64encode(bytes(value)).decode()
        # Containers and objects of other types; one that holds itself becomes a text.
        is_container = isinstance(value, Mapping | list | tuple | set | frozenset | deque)
        if isinstance(value, Iterator) and not is_container:
            return self.text(value)  # consuming it would run more of the handler's code
        if id(value) in self.inside:
            return self.text("<circular reference>")
        if is_container and depth >= MAX_RESULT_DEPTH:
            return self.text(value)
        self.inside.add(id(value))
        try:
            if isinstance(value, Mapping):
                members = list[tuple[str, Any]]()
                for key, item in value.items():
                    plain = self.convert(key, MAX_RESULT_DEPTH)
                    name = json.dumps(plain) if plain is None or isinstance(plain, bool) else str(plain)
                    members.append((name, self.convert(item, depth + 1)))
                self.stringified = self.stringified or len(dict(members)) < len(members)
                return canonical.distinct(members)
            if is_container:
                return [self.convert(item, depth + 1) for item in value]
            return self.convert(self.foreign(value), depth + 1)
        finally:
            self.inside.discard(id(value))

    def foreign(self, value: Any) -> Any:
        """Convert dates, decimals, models, dataclasses and the like to JSON as pydantic does."""
        try:
            if isinstance(value, BaseModel):
                return dumped(_model_adapter(type(value)), [value], fallback=self.text)[0]
            plain = to_jsonable_python(value, by_alias=True, inf_nan_mode="constants", fallback=self.text)
            text = to_json(value, by_alias=True, inf_nan_mode="constants", fallback=self.text)
            json.loads(text, object_pairs_hook=_distinct)
            return plain
        except Exception:
            kind = type(value)
            names = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "__dataclass_fields__", None)
            with suppress(Exception):
                if names:
                    return {name: getattr(value, name) for name in names}
            return self.text(value)

    def text(self, value: Any) -> str:
        self.stringified = True
        return _text(value)


_model_adapter = lru_cache(maxsize=256)(result_adapter)


def _text(value: Any) -> str:
    for form in (str, repr):
        with suppress(Exception):
            return str.__str__(form(value))
    return f"<unprintable {type(value).__name__}>"
