"""The decorator `@tool`, which declares a function as a tool."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Unpack, overload

from agentruns.tools import signature
from agentruns.tools.base import P, R, Tool
from agentruns.tools.options import Gate, Options, Risk, ToolKeywords, as_names, as_refusals, as_seconds
from agentruns.tools.refusals import Refusal

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@overload
def tool(fn: Callable[P, R], **options: Unpack[ToolKeywords]) -> Tool[P, R]: ...


@overload
def tool(fn: None = None, **options: Unpack[ToolKeywords]) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    fn: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    requires_approval: Gate = False,
    approvers: str | None = None,
    approvals: int = 1,
    expires_in: timedelta | None = None,
    risk: Risk = "normal",
    describe: Callable[[dict[str, Any]], str] | None = None,
    preview: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    safe_to_retry: bool = False,
    transactional: bool = False,
    reconcile: Callable[[Any, dict[str, Any]], Any] | None = None,
    parallel: bool = False,
    timeout: float | timedelta | None = None,
    sensitive: Iterable[str] = (),
    sensitive_results: Iterable[str] = (),
    refuses: Refusal | Iterable[Refusal] = (),
    sent_max: int | None = None,
) -> Any:
    """Declare a function as a tool, as `@tool` or as `@tool(...)`.

    The model sees the signature as a JSON Schema, and the docstring as descriptions. A parameter annotated
    ToolContext receives the context of the call. `refuses` names the exceptions that mean that nothing
    happened, or functions that check an exception for that, such as `http_refusal`. Of a result that is
    longer than `sent_max` characters, a request sends an excerpt. Raises TypeError for options that
    contradict each other, and for a parameter whose values could not be shown, stored and read back
    unchanged.
    """
    options = Options(
        requires_approval=requires_approval,
        approvers=approvers,
        approvals=approvals,
        expires_in=expires_in,
        risk=risk,
        describe=describe,
        preview=preview,
        safe_to_retry=safe_to_retry,
        transactional=transactional,
        reconcile=reconcile,
        parallel=parallel,
        timeout=as_seconds(timeout),
        sensitive=as_names(sensitive),
        sensitive_results=as_names(sensitive_results, "sensitive_results", "members of the result"),
        refuses=as_refusals(refuses),
        sent_max=sent_max,
    )
    # The caller's local names, for types that are defined beside the tool inside a function.
    given: Any = {"name": name, "description": description, "options": options}
    declare: Any = partial(declared, **given, local_names=sys._getframe(1).f_locals)
    return declare if fn is None else declare(fn)


def declared(
    fn: Callable[..., Any],
    name: str | None,
    description: str | None,
    options: Options,
    local_names: Mapping[str, Any],
) -> Tool[..., Any]:
    """Build a tool from a function and its options; raises TypeError as `tool` does."""
    if isinstance(fn, Tool):
        raise TypeError(f"{fn!r} is a tool already.")
    if not inspect.isroutine(fn):
        raise TypeError(f"@tool declares a function, not {fn!r}.")
    name = fn.__name__ if name is None else name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TypeError(
            f"A tool cannot be named {name!r}: providers accept at most 64 letters, digits, _ and -. "
            "Pass name=."
        )
    inner = inspect.unwrap(fn)
    if inspect.isasyncgenfunction(inner):
        raise TypeError(f"Tool {name!r} is an async generator: return a list.")
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(inner)
    read = signature.read(fn, name, local_names)
    options.check(name, is_async=is_async, parameters=read.parameters)
    text = read.description if description is None else description
    return Tool(fn, name, text, read, options)
