"""Everything around a handler: arguments in, the call itself, the result as JSON."""

from __future__ import annotations

import asyncio
import base64
import enum
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache
from typing import Any, TypeVar

from asgiref.sync import async_to_sync
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json, to_jsonable_python

from agentruns.exceptions import ToolRefused
from agentruns.tools.card import one_line
from agentruns.utils import json as canonical

T = TypeVar("T")

_MAX_ERRORS = 10
_MAX_NAME = 60
# Far above any sensible result, far below what json and the recursion limit bear.
_MAX_DEPTH = 100
_MAX_BITS = 14_000
_RESULT = ConfigDict(arbitrary_types_allowed=True, ser_json_inf_nan="constants")


class InvalidArguments(ToolRefused, ValueError):
    """Input that does not fit the tool's signature; the message is for the model: short, field by field."""


def effective(model: type[BaseModel], raw: Any) -> dict[str, Any]:
    """Return the effective arguments of `raw`: validated, coerced, with defaults, as JSON.

    Raises InvalidArguments, also if validating the result again changes it: after a restart the handler
    would receive different arguments from those that were shown and approved.
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
    """Return `raw` as an instance of `model`; raises InvalidArguments for any failure."""
    if not isinstance(raw, dict):
        raise InvalidArguments(f"The input must be a JSON object, not {type(raw).__name__}.")
    try:
        text = to_json(raw, inf_nan_mode="constants")
    except Exception:
        text = None  # a lone surrogate, or not JSON: only lenient validation can tell which
    try:
        # Validated as JSON, so that a strict datetime accepts its text, as it must after a restart.
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
    """Return one line that says why a result does not fit its annotation; never raises."""
    if not isinstance(error, ValidationError):
        return type(error).__name__
    try:
        # The result was validated inside a list of one.
        return "; ".join(_line(each["loc"][1:], each["msg"], "result") for each in _details(error)[:3])
    except Exception:
        return type(error).__name__


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


def call(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a developer's function, sync or async, and return its result, awaited if necessary."""
    result = fn(*args, **kwargs)
    return wait(result) if inspect.isawaitable(result) else result


def wait(awaitable: Awaitable[T]) -> T:
    """Await from sync code, even in a thread that is running an event loop."""

    async def finish() -> T:
        return await awaitable

    # Not asyncio.run: asgiref sends the coroutine's ORM work back to this thread, so it uses this thread's
    # connection, which the engine keeps healthy and a TestCase wraps in its transaction.
    run = async_to_sync(finish, force_new_loop=True)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentruns-async")
    try:
        return thread.submit(copy_context().run, run).result()
    finally:
        thread.shutdown(wait=False)


def result_adapter(annotation: Any) -> TypeAdapter[Any]:
    """Return an adapter for a list of one `annotation`; raises whatever pydantic raises for it.

    Only inside a list do a model's fields follow our configuration: NaN is kept, where pydantic writes
    null.
    """
    return TypeAdapter(list[annotation], config=_RESULT)


def to_jsonable(value: Any) -> tuple[Any, bool]:
    """Return `value` as JSON that `canonical.dumps` accepts, and whether any part of it became text.

    Never fails: the effect has happened by now, and an error here would lose a known result.
    """
    walk = _Walk()
    try:
        content = walk.convert(value, 0)
        canonical.dumps(content)
    except Exception:
        return _text(value), True
    return content, walk.stringified


class _Walk:
    """One conversion: the containers around the current value, and whether anything needed `str()`."""

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
            return self.integer(int.__int__(value))
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, bytes | bytearray | memoryview):
            return _decode(bytes(value))
        if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
            return self.container(value, depth)
        return self.other(value, depth)

    def integer(self, value: int) -> Any:
        # Python refuses to print very large numbers in decimal, hex has no limit.
        if value.bit_length() > _MAX_BITS:
            self.stringified = True
            return hex(value)
        return value

    def container(self, value: Any, depth: int) -> Any:
        if id(value) in self.inside:
            self.stringified = True
            return "<circular reference>"
        if depth >= _MAX_DEPTH:
            return self.text(value)
        self.inside.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self.mapping(value, depth)
            return [self.convert(item, depth + 1) for item in value]
        finally:
            self.inside.discard(id(value))

    def mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in value.items():
            name = self.key(key)
            if name in result:
                self.stringified = True
                name = _free(name, result)
            result[name] = self.convert(item, depth + 1)
        return result

    def key(self, key: Any) -> str:
        plain = self.convert(key, _MAX_DEPTH)
        if isinstance(plain, str):
            return plain
        if plain is None or isinstance(plain, bool):
            return {None: "null", True: "true", False: "false"}[plain]
        return str(plain)

    def other(self, value: Any, depth: int) -> Any:
        if isinstance(value, Iterator):
            return self.text(value)  # consuming it would run more of the handler's code
        if id(value) in self.inside:
            self.stringified = True
            return "<circular reference>"
        self.inside.add(id(value))
        try:
            return self.convert(self.foreign(value), depth + 1)
        finally:
            self.inside.discard(id(value))

    def foreign(self, value: Any) -> Any:
        """Return dates, decimals, models, dataclasses ... as pydantic writes them in JSON."""
        odd: list[Any] = []

        def fallback(part: Any) -> Any:
            odd.append(part)
            return _text(part)

        try:
            if isinstance(value, BaseModel):
                dump = _model_adapter(type(value)).dump_python
                plain = dump([value], mode="json", by_alias=True, warnings=False, fallback=fallback)[0]
            else:
                plain = to_jsonable_python(value, by_alias=True, inf_nan_mode="constants", fallback=fallback)
        except Exception:
            return self.fields(value)
        self.stringified = self.stringified or bool(odd)
        return plain

    def fields(self, value: Any) -> Any:
        names = getattr(type(value), "__pydantic_fields__", None) or getattr(
            type(value), "__dataclass_fields__", None
        )
        try:
            return {name: getattr(value, name) for name in names} if names else self.text(value)
        except Exception:
            return self.text(value)

    def text(self, value: Any) -> str:
        self.stringified = True
        return _text(value)


@lru_cache(maxsize=256)
def _model_adapter(kind: type[BaseModel]) -> TypeAdapter[Any]:
    return result_adapter(kind)


def _free(name: str, taken: dict[str, Any]) -> str:
    number = 2
    while f"{name} ({number})" in taken:
        number += 1
    return f"{name} ({number})"


def _decode(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()


def _text(value: Any) -> str:
    try:
        return str.__str__(str(value))
    except Exception:
        try:
            return str.__str__(repr(value))
        except Exception:
            return f"<unprintable {type(value).__name__}>"
