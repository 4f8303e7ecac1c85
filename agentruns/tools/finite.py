"""Find NaN and infinity in arguments, because a gate such as `amount > 50` would let NaN pass.

A parameter or field allows NaN and infinity by `Annotated[float, Field(allow_inf_nan=True)]`. The walk reads
validated values, in which a text such as "NaN" is a number only if pydantic made it a number.
"""

from __future__ import annotations

import cmath
import types
from collections.abc import Iterable, Iterator, Mapping, Set as AbstractSet
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from itertools import chain
from numbers import Number, Rational
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, RootModel
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

MESSAGE = "Input should be a finite number; NaN and infinity are not accepted"
# As tuples, because to build a union takes longer than to ask it.
OPAQUE, LISTS = (str, bytes, type, types.ModuleType), (list, tuple, AbstractSet)

Step = tuple[Any, Any]  # a holder of values, and the name, key or index of one of them; None: a key itself
Path = tuple[Step, ...]


def places(value: Any, annotation: Any = Any) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the place of each NaN and infinity in a value, and whether the annotation there allows it."""
    for path in _non_finite(value, (), {}):
        guides = [annotation]
        for holder, name in path:
            guides = [each for guide in guides for each in _inner(guide, holder, name)]
        place: list[str] = []
        for holder, name in path:
            if not isinstance(holder, RootModel):  # JSON has no level for it
                field = type(holder).model_fields.get(name) if isinstance(holder, BaseModel) else None
                # The name that the model uses.
                place.append(str((field and field.alias) or ("[key]" if name is None else name)))
        yield tuple(place), any(allows for _plain, allows in _opened(guides))


def _non_finite(value: Any, path: Path, seen: dict[int, Any]) -> Iterator[Path]:
    if value is None or id(value) in seen or isinstance(value, OPAQUE):
        return
    if isinstance(value, Number):
        number: Any = value
        # A rational first: a large integer has no float.
        is_whole = isinstance(number, Rational)
        if not (number.is_finite() if isinstance(number, Decimal) else is_whole or cmath.isfinite(number)):
            yield path
        return
    seen[id(value)] = value  # kept, so that its id stays its own
    if isinstance(value, Mapping):
        for key in value:
            yield from _non_finite(key, (*path, (value, None)), seen)
    for name, member in _members(value):
        yield from _non_finite(member, (*path, (value, name)), seen)


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    """List the values inside a value, each with its name, key or index."""
    if isinstance(value, Enum):
        return [("value", value.value)]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
        return zip(names, value, strict=True)
    if isinstance(value, LISTS) or hasattr(value, "appendleft"):
        return enumerate(value)
    kind: Any = type(value)
    own = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    return {**own, **getattr(value, "__dict__", {}), **(getattr(value, "model_extra", None) or {})}.items()


@lru_cache
def _slots(kind: type) -> list[str]:
    slots: Any = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = chain.from_iterable([each] if isinstance(each, str) else each for each in slots)
    return [name for name in names if name[:2] != "__"]


def _inner(annotation: Any, holder: Any, name: Any) -> Iterator[Any]:
    """Yield the annotations of the member `name` in a `holder` with this annotation; nothing if unknown."""
    kinds = [kind for kind, _allows in _opened([annotation])]
    if isinstance(holder, Mapping):
        typed = [_fields(kind).get(name) for kind in kinds if is_typeddict(kind)]
        yield from [*typed, *(get_args(kind)[-1] for kind in kinds if get_args(kind) and name is not None)]
    elif hasattr(holder, "_fields") or not isinstance(holder, LISTS):
        yield from [_fields(type(holder)).get(name)]
    else:
        for parts in map(get_args, kinds):
            is_fixed = isinstance(holder, tuple) and Ellipsis not in parts
            yield from parts[name : name + 1] if is_fixed else parts[:1]


def _fields(kind: Any) -> dict[str, Any]:
    try:
        return getattr(kind, "__pydantic_fields__", None) or get_type_hints(kind, include_extras=True)
    except Exception:
        return {}  # nothing is allowed there


def _opened(annotations: Iterable[Any], allows: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the types that `annotations` allow, each with a bool: True if NaN and infinity are allowed.

    Opens unions, Annotated, fields and `type` aliases, but no containers: list[float] stays one type.
    """
    for given in annotations:
        annotation = getattr(given, "__value__", given)  # a `type` alias
        if isinstance(annotation, FieldInfo):
            yield from _opened([annotation.annotation], allows or _allows(annotation.metadata))
        elif get_origin(annotation) is Annotated:
            yield from _opened(get_args(annotation)[:1], allows or _allows(get_args(annotation)[1:]))
        elif get_origin(annotation) in (Union, types.UnionType):
            yield from _opened(get_args(annotation), allows)
        else:
            yield annotation, allows


def _allows(metadata: Iterable[Any]) -> bool:
    inner = (each.metadata if isinstance(each, FieldInfo) else [each] for each in metadata)
    return any(getattr(each, "allow_inf_nan", None) is True for each in chain.from_iterable(inner))
