"""Refusals: exceptions of a handler that mean that nothing happened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from agentruns.conf import settings
from agentruns.exceptions import ToolRefused
from agentruns.utils.calls import arity_mistake
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.tools")

Refusal = type[Exception] | Callable[[Any], bool]

# Added to the text of an error in the result of a call.
MAY_HAVE_HAPPENED = " The effect may or may not have happened before the error; check before repeating."
NOTHING_HAPPENED = " Nothing happened."
ROLLED_BACK = " Everything the tool wrote was rolled back: nothing happened."
EFFECTS = (MAY_HAVE_HAPPENED, NOTHING_HAPPENED, ROLLED_BACK)

# The server may be at work on an earlier copy of the request, or may not have read this one to its end.
UNDECIDED = (408, 409, 425, 429)


def http_refusal(error: Exception) -> bool:
    """Check whether an HTTP client's exception means that the server refused the request.

    The status must be from 400 to 499, but not 408, 409, 425 or 429. Reads the status of exceptions of httpx,
    requests, aiohttp, urllib and libraries built on them. False after a redirect, because the first server
    may have acted. May be True after a redirect in urllib, because its exceptions do not show redirects.
    """
    response = getattr(error, "response", None)
    if any(getattr(each, "history", None) for each in (response, error)):
        return False
    kept = (
        getattr(response, "status_code", None),
        getattr(error, "status_code", None),
        getattr(error, "status", None),
    )
    status = next((each for each in kept if isinstance(each, int)), 0)
    return 400 <= status < 500 and status not in UNDECIDED


def is_refusal(error: Exception, named: Iterable[Refusal]) -> bool:
    """Check whether a handler's exception is a refusal by `named` or AGENTRUNS_REFUSALS, or a ToolRefused.

    False if a function in them raises an error, or if the setting cannot be read.
    """
    if isinstance(error, ToolRefused):
        return True

    def matches(refusal: Refusal) -> bool:
        return isinstance(error, refusal) if isinstance(refusal, type) else refusal(error) is True

    try:
        return any(map(matches, named)) or any(map(matches, settings.refusals))
    except Exception:
        logger.warning("Whether %s is a refusal cannot be told", type(error).__name__, exc_info=True)
        return False


def mistake(refusal: object) -> str:
    """Explain why an object cannot be a member of `refuses`; "" if it can."""
    if inspect.iscoroutinefunction(refusal):
        return f"{refusal!r} is a coroutine function"
    if not isinstance(refusal, type):
        if not callable(refusal):
            return f"{refusal!r} is neither an exception nor a function"
        wrong = arity_mistake(refusal, "error")
        return f"{refusal!r} {wrong}" if wrong else ""
    if not issubclass(refusal, Exception):
        return f"{refusal.__name__} is no Exception"
    if refusal is Exception:
        return "Exception is every error, also one after the effect; name those that come before it"
    return ""
