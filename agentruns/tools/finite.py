"""Arguments hold finite numbers: a gate such as `amount > 50` lets NaN pass, and minus infinity.

A parameter or field allows others in pydantic's words, `Annotated[float, Field(allow_inf_nan=True)]`. The
walk reads validated values: a text such as "NaN" is a text there, and a number only where pydantic made one.
"""

from __future__ import annotations

import cmath
import types
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from decimal import Decimal
from enum import Enum
from numbers import Number, Rational
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, RootModel
from pydantic.fields import FieldInfo
from typing_extensions import is_typeddict

MESSAGE = "Input should be a finite number; NaN and infinity are not accepted"

Step = tuple[Any, Any]  # a holder of values, and the name, key or index of one of them; None: a key itself
Path = tuple[Step, ...]


def places(value: Any, annotation: Any = Any) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield the place of each NaN and infinity in a value, and whether its annotation allows it."""
    for path in _non_finite(value, (), {}):
        place, guides = list[str](), [annotation]
        for holder, name in path:
            guides = [each for guide in guides for each in _inner(guide, holder, name)]
            field = type(holder).model_fields.get(name) if isinstance(holder, BaseModel) else None
            if not isinstance(holder, RootModel):  # for which JSON has no level
                place.append(str((field and field.alias) or ("[key]" if name is None else name)))
        kinds = [each for guide in guides for each in _opened(guide)]
        is_refused = any(kind in (Any, float, complex, Decimal) for kind, allows in kinds if not allows)
        yield tuple(place), not is_refused and any(allows for _kind, allows in kinds)


def _non_finite(value: Any, path: Path, seen: dict[int, Any]) -> Iterator[Path]:
    if value is None or id(value) in seen or isinstance(value, str | bytes | type | types.ModuleType):
        return
    if isinstance(value, Number):
        if isinstance(value, Decimal):
            is_finite = value.is_finite()
        else:  # a large integer has no float
            is_finite = isinstance(value, Rational) or cmath.isfinite(value)  # type: ignore[arg-type]
        if not is_finite:
            yield path
        return
    seen[id(value)] = value  # kept, so that its id stays its own
    if isinstance(value, Mapping):
        for key in value:
            yield from _non_finite(key, (*path, (value, None)), seen)
    for name, member in _members(value):
        yield from _non_finite(member, (*path, (value, name)), seen)


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    """Find the values that a value holds, with the name, key or index of each."""
    if isinstance(value, Enum):
        return [("value", value.value)]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple) and (names := getattr(value, "_fields", ())):
        return zip(names, value, strict=True)
    if isinstance(value, list | tuple | AbstractSet) or hasattr(value, "appendleft"):
        return enumerate(value)
    slots: list[str] = []
    for kind in type(value).__mro__:
        own: Any = vars(kind).get("__slots__", ())
        slots += [own] if isinstance(own, str) else [name for name in own if not name.startswith("__")]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {}), **(getattr(value, "model_extra", None) or {})}.items()


def _inner(annotation: Any, holder: Any, name: Any) -> Iterator[Any]:
    """Yield the annotations of one member of a holder; none where the annotation does not say."""
    kinds = [kind for kind, _allows in _opened(annotation)]
    if isinstance(holder, Mapping):
        typed = [_fields(kind).get(name) for kind in kinds if is_typeddict(kind)]
        yield from [*typed, *(get_args(kind)[-1] for kind in kinds if get_args(kind) and name is not None)]
    elif hasattr(holder, "_fields") or not isinstance(holder, list | tuple | AbstractSet):
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


def _opened(given: Any, allows: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the types that an annotation stands for, and whether each allows every number."""
    given = getattr(given, "__value__", given)  # a `type` alias
    field = given if isinstance(given, FieldInfo) else FieldInfo.from_annotation(given)
    allows |= any(getattr(each, "allow_inf_nan", None) is True for each in field.metadata)
    if get_origin(field.annotation) in (Union, types.UnionType):
        for part in get_args(field.annotation):
            yield from _opened(part, allows)
    elif field.annotation is given:
        yield given, allows
    else:
        yield from _opened(field.annotation, allows)
