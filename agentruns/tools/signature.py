"""Signatures of tools: the JSON Schema that the model receives, and the pydantic model behind it."""

from __future__ import annotations

import collections.abc
import inspect
import json
import re
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Annotated, Any, Never, NoReturn, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, Secret, SecretBytes, SecretStr, TypeAdapter, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typing_extensions import is_typeddict

from agentruns.tools import finite
from agentruns.tools.context import ToolContext
from agentruns.tools.results import result_adapter

_ARGUMENTS = ConfigDict(
    extra="forbid", validate_default=True, protected_namespaces=(), ser_json_inf_nan="constants"
)
_UNSTABLE = (set, frozenset, collections.abc.Set)
_READ_ONCE = (collections.abc.Iterable, collections.abc.Iterator, collections.abc.Generator)
_SECRET = (SecretStr, SecretBytes, Secret)
_MAPS = ("properties", "$defs", "patternProperties", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_ARGS = re.compile(r"(?:args|arguments|parameters):", re.IGNORECASE)
_SECTION = re.compile(r"(?:args|arguments|parameters|returns?|raises|yields):", re.IGNORECASE)
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


@dataclass(frozen=True, slots=True)
class Signature:
    """A tool's parameters and return type.

    `parameters` maps each parameter to a field of `model`; the names differ where pydantic reserves a name.
    `context` is the parameter annotated ToolContext, or None. `description` is the docstring's text before
    its sections. `returns` validates a list of one result; None if results are not validated.
    """

    model: type[BaseModel]
    parameters: dict[str, str]
    context: str | None
    description: str
    schema: dict[str, Any]
    returns: TypeAdapter[Any] | None
    alternatives: int = 1  # most models of a union in the definitions; validation tries all at each level


def signature_of(fn: Callable[..., Any], name: str, local_names: Mapping[str, Any]) -> Signature:
    """Read the signature of `fn`, the function of the tool `name`; raises TypeError for a mistake in it.

    Annotations may use the names of the function's module and `local_names`.
    """
    inner = inspect.unwrap(fn)
    # ToolContext is often imported under TYPE_CHECKING only.
    names = {"ToolContext": ToolContext, **getattr(inner, "__globals__", {})}
    try:
        hints = get_type_hints(fn, names, dict(local_names), include_extras=True)
    except NameError as error:
        raise TypeError(
            f"Tool {name!r}: an annotation cannot be resolved ({error}). Import that name at module level, "
            "not under TYPE_CHECKING: the schema is built from it."
        ) from error
    context: str | None = None
    definitions: dict[str, Any] = {}
    parameters: dict[str, str] = {}
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"Tool {name!r} takes {str(parameter)!r}: a model passes arguments by name, so every "
                "parameter needs a name and may not be positional-only."
            )
        if parameter.name not in hints:
            raise TypeError(
                f"Parameter {parameter.name!r} of tool {name!r} has no annotation: the schema is built from "
                "it (Any if anything goes; ToolContext for the context; a method has to be bound)."
            )
        annotation = hints[parameter.name]
        if _is_context(annotation):
            if context is not None:
                raise TypeError(f"Tool {name!r} takes two ToolContext parameters; one is enough.")
            context = parameter.name
            continue
        _refuse_unstable(annotation, f"parameter {parameter.name!r} of tool {name!r}")
        _check_default(parameter, annotation, name)
        reserved = parameter.name.startswith("_") or hasattr(BaseModel, parameter.name)
        field = f"parameter_{len(parameters)}_{parameter.name.strip('_')}" if reserved else parameter.name
        default = ... if parameter.default is parameter.empty else parameter.default
        if reserved:
            annotation = Annotated[annotation, Field(alias=parameter.name)]
        definitions[field] = (annotation, default)
        parameters[parameter.name] = field
    description, texts = _parse_docstring(fn.__doc__)
    try:
        model = create_model(name, __config__=_ARGUMENTS, **definitions)
        schema: dict[str, Any] = _untitled(model.model_json_schema())
        schema.pop("description", None)
        for named, form in schema.setdefault("properties", {}).items():
            if texts.get(named):
                form.setdefault("description", texts[named])
    except Exception as error:
        raise TypeError(f"Tool {name!r} cannot be described to a model: {error}") from error
    for named, field in parameters.items():
        info = model.model_fields[field]
        if {info.alias, info.validation_alias, info.serialization_alias} - {None, named}:
            raise TypeError(
                f"Parameter {named!r} of tool {name!r} has an alias: rename the parameter instead, so "
                "that the model, the operator and the handler all see one name."
            )
    for kind in _kinds(model, set()):
        for field, info in getattr(kind, "__pydantic_fields__", {}).items():
            if info.exclude or getattr(info, "exclude_if", None):
                raise TypeError(
                    f"Field {field!r} of {kind.__name__!r}, which tool {name!r} takes, has `exclude`: it "
                    "would be neither shown nor stored, and its default computed again each time. Remove it."
                )
    unions = re.findall(r'"anyOf": \[([^\]]*)\]', json.dumps(schema.get("$defs", {})))
    # A discriminator ("oneOf") names the one type to try.
    alternatives = max((union.count('"$ref"') for union in unions if '"oneOf"' not in union), default=1)
    return Signature(model, parameters, context, description, schema, _returns(hints), alternatives)


def _is_context(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _is_context(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_is_context(part) for part in get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, ToolContext)


def _check_default(parameter: inspect.Parameter, annotation: Any, name: str) -> None:
    default = parameter.default
    if isinstance(default, FieldInfo):
        annotation, default = Annotated[annotation, default], default.get_default()
    if default is parameter.empty or default is PydanticUndefined:
        return
    what = f"The default of parameter {parameter.name!r} of tool {name!r}, {default!r},"
    try:
        fitting = TypeAdapter(annotation).validate_python(default)
    except ValueError:
        text = "does not fit its annotation (write `| None` if None is allowed)."
        raise TypeError(f"{what} {text}") from None
    except Exception:  # not a type pydantic can validate: create_model explains why
        return
    if not all(allowed for _place, allowed in finite.places(fitting, annotation)):
        text = "is not a finite number. Use another one, or annotate it"
        raise TypeError(f"{what} {text} Annotated[float, Field(allow_inf_nan=True)].")


def _refuse_unstable(annotation: Any, where: str) -> None:
    for kind in _kinds(annotation, set()):
        if issubclass(kind, _SECRET):
            raise TypeError(
                f"{where} contains {kind.__name__}: it is masked when stored, so the handler would receive "
                "asterisks. Use str and name the parameter in `sensitive`."
            )
        if issubclass(kind, _UNSTABLE):
            raise TypeError(
                f"{where} contains {kind.__name__}: its order differs between processes, and so would the "
                "digest a person approved. Use list."
            )
        if kind in _READ_ONCE:
            raise TypeError(
                f"{where} contains {kind.__name__}: it is read once, to be stored, so the handler would "
                "receive nothing. Use list."
            )


def _kinds(annotation: Any, seen: set[int]) -> Iterator[type]:
    """Yield every class in an annotation, also inside models, dataclasses, named tuples and typed dicts."""
    if id(annotation) in seen or isinstance(annotation, str):
        return
    seen.add(id(annotation))
    annotation = getattr(annotation, "__value__", annotation)  # a `type` alias
    origin = get_origin(annotation)
    if isinstance(origin, type):
        yield origin
    for part in get_args(annotation) if origin is not typing.Literal else ():
        yield from _kinds(part, seen)
    if isinstance(annotation, type):
        yield annotation
        members: list[Any] = []
        if issubclass(annotation, BaseModel):
            members = [field.annotation for field in annotation.model_fields.values()]
        elif is_dataclass(annotation) or is_typeddict(annotation) or hasattr(annotation, "_fields"):
            try:
                members = list(get_type_hints(annotation, include_extras=True).values())
            except Exception:
                members = [field.type for field in fields(annotation)] if is_dataclass(annotation) else []
        for part in members:
            yield from _kinds(part, seen)


def _untitled(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    result = {key: value for key, value in schema.items() if key != "title"}
    if any(finite.places(result.get("default"))):
        del result["default"]  # JSON has no such number
    for key, value in result.items():
        if key in _MAPS and isinstance(value, dict):
            result[key] = {name: _untitled(part) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            result[key] = [_untitled(part) for part in value]
        elif key in _SINGLES:
            result[key] = _untitled(value)
    return result


def _returns(hints: dict[str, Any]) -> TypeAdapter[Any] | None:
    annotation = hints.get("return", Any)
    if annotation in (Any, Never, NoReturn):
        return None
    if get_origin(annotation) in (collections.abc.Iterator, collections.abc.Generator):
        annotation = list[(get_args(annotation) or (Any,))[0]]  # type: ignore[misc]  # it is exhausted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return result_adapter(annotation)
    except Exception:
        return None  # not a type pydantic knows: the result is stored as it is


def _parse_docstring(doc: str | None) -> tuple[str, dict[str, str]]:
    """Parse a Google-style docstring: the text before its first section, and the entries of `Args:`."""
    lines = inspect.cleandoc(doc or "").splitlines()
    heads = [number for number, line in enumerate(lines) if _SECTION.fullmatch(line.rstrip())]
    description = "\n".join(lines[: heads[0]] if heads else lines).strip()
    entries: dict[str, str] = {}
    for head, end in pairwise([*heads, len(lines)]):
        if not _ARGS.fullmatch(lines[head].rstrip()):
            continue
        parts: dict[str, list[str]] = {}
        current: list[str] = []
        indent: int | None = None
        for line in filter(str.strip, lines[head + 1 : end]):
            text, depth = line.strip(), len(line) - len(line.lstrip())
            if depth == 0:
                break
            indent = depth if indent is None else indent
            if match := _ENTRY.fullmatch(text) if depth <= indent else None:
                current, text = parts.setdefault(match[1], []), match[2]
            current.append(text)
        entries |= {name: " ".join(filter(None, texts)) for name, texts in parts.items()}
    return description, entries
