"""Refusals: exceptions of a handler that mean that nothing happened."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from agentruns import exceptions as core
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

# Services that have stored nothing when they raise one of OUR_REFUSALS. A drive, as by `run_agent`, may have.
SERVICES = {
    "start_run", "send_message", "fork_run", "run_again", "cancel_run", "pause_run", "adopt_definition",
    "resolve_orphan", "leave_out", "raise_budget", "approve", "deny", "answer", "extend",
}  # fmt: skip
OUR_REFUSALS = (
    core.SessionBusyError, core.SessionAccessDeniedError, core.NotFoundError, core.PermissionDeniedError,
    core.QuotaExceededError, core.RunStateError, core.ApprovalStateError, core.DurableConfigMismatchError,
    core.UnknownAgentError, core.NotDurableError, core.RenderingError, core.ContentError,
    core.JournalUnreadableError,
)  # fmt: skip
# Instructions that call no function, except for attributes, items, comparisons, formats and imports.
_QUIET = re.compile(
    "BINARY_SUBSCR|BUILD_|COMPARE_OP|CONTAINS_OP|CONVERT_VALUE|COPY_FREE_VARS|EXTENDED_ARG|FORMAT_|IMPORT_|"
    "IS_OP|KW_NAMES|LOAD_|MAKE_CELL|NOP|NOT_TAKEN|POP_|PRECALL|PUSH_NULL|RESUME|STORE_DEREF|STORE_FAST|"
    "TO_BOOL|UNARY_NOT"
)


def http_refusal(error: Exception) -> bool:
    """Check whether an HTTP client's exception means that the server refused the request.

    The status must be from 400 to 499, but not 408, 409, 425 or 429. Reads the status of exceptions of httpx,
    requests, aiohttp, urllib and libraries built on them. False after a redirect, because the first server
    may have acted. May be True after a redirect in urllib, because its exceptions do not show redirects.
    """
    response = getattr(error, "response", None)
    if any(getattr(each, "history", None) for each in (response, error)):
        return False
    places = ((response, "status_code"), (error, "status_code"), (error, "status"))
    kept = (getattr(holder, name, None) for holder, name in places)
    status = next((each for each in kept if isinstance(each, int)), 0)
    return 400 <= status < 500 and status not in UNDECIDED


def service_refusal(error: Exception) -> bool:
    """Check whether an exception is a refusal by a service of agentruns, such as SessionBusyError."""
    return isinstance(error, OUR_REFUSALS)


def is_first_call(error: Exception) -> bool:
    """Check whether a handler's first call was one of SERVICES, and `error` is the refusal of this call.

    Then nothing happened. Reads the handler's bytecode. False if the handler has a `try` or a `with`, is
    asynchronous or decorated, or calls the service in a loop or through another function.
    """
    steps, traceback = list[tuple[str, CodeType, int]](), error.__traceback__
    while traceback is not None and service_refusal(error):
        frame, at, traceback = traceback.tb_frame, traceback.tb_lasti, traceback.tb_next
        module = frame.f_globals.get("__name__", "")
        if steps or not module.startswith("agentruns."):  # the first ones call the handler
            steps.append((module, frame.f_code, at))
    doors = [step for step in steps[1:] if step[0] != "agentruns.agents.agent"]
    if not doors or not doors[0][0].startswith("agentruns.services.") or doors[0][1].co_name not in SERVICES:
        return False
    code, at, called = steps[0][1], steps[0][2], steps[1][1].co_name
    instructions = list(dis.get_instructions(code))
    *before, call = (each for each in instructions if each.offset <= at)
    loops = any("BACKWARD" in each.opname and each.argval <= at for each in instructions)
    begins = call.positions and call.positions[::2]  # line and column; Python may run without columns
    is_call = call.opname.startswith("CALL") and begins and begins[1] is not None
    if loops or code.co_exceptiontable or not is_call:
        return False
    # The function's name stands where the call begins. Another one, such as `map`, may call several times.
    names = [
        each.argval
        for each in before
        if each.positions and each.positions[::2] == begins and re.match("LOAD_[^C]", each.opname)
    ]
    return all(_QUIET.match(each.opname) for each in before) and names[-1:] == [called]


def is_refusal(error: Exception, named: Iterable[Refusal]) -> bool:
    """Check whether a handler's exception is a refusal by `named` or AGENTRUNS_REFUSALS, or a ToolRefused.

    So is the refusal of a service that the handler calls first (`is_first_call`). False if a function in
    `named` or the setting raises an error, or if the setting cannot be read.
    """
    if isinstance(error, ToolRefused) or is_first_call(error):
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
