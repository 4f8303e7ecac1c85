"""Entering a handler: in this thread or another, within its time, and what its return comes to."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from django.db import connections

from agentruns import telemetry
from agentruns.exceptions import ToolDurabilityError
from agentruns.journal.batch import Batch, Offload
from agentruns.redaction import driven, get_logger
from agentruns.tools import NotOccurred, Occurred, Tool, ToolContext, Unknown

logger = get_logger("agentruns.executor")

MAY_HAVE_HAPPENED = " The effect may or may not have happened before the error; check before repeating."


class Interrupted(Exception):
    """A handler's outcome is not known: it timed out, or says so itself."""


@dataclass(slots=True)
class Observation:
    """What a handler's return or exception comes to, before it is a row."""

    content: Any
    is_error: bool = False
    flags: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Return it as evidence."""
        return {"content": self.content, "is_error": self.is_error, **self.flags}

    def write(self, batch: Batch, call_id: str, offload: Offload | None) -> None:
        """Add it as the call's result."""
        call = batch.state.run.calls[call_id]
        batch.result(
            call,
            self.content,
            "error" if self.is_error else "ok",
            is_error=self.is_error,
            duration_ms=round(self.seconds * 1000, 3),
            offload=offload,
            **self.flags,
        )


def call(tool: Tool, context: ToolContext, arguments: dict[str, Any]) -> Observation:
    """Enter a handler in this thread; raise Interrupted when its outcome is not known."""
    with telemetry.span("tool", lambda: _facts(tool, context)) as told:
        observation = _enter(tool, context, arguments, told)
        told["outcome"] = "error" if observation.is_error else "ok"
    return observation


def _facts(tool: Tool, context: ToolContext) -> dict[str, Any]:
    run_id, epoch = driven()
    about = {"run_id": context.run_id, "epoch": epoch if run_id == context.run_id else 0}
    call = {"call_id": context.call_id, "attempt": context.attempt, "declares": tool.recovery}
    return {**about, "tool": tool.name, **call}


def _enter(tool: Tool, context: ToolContext, arguments: dict[str, Any], told: dict[str, Any]) -> Observation:
    began = time.perf_counter()
    try:
        output = tool.invoke(context, arguments)
    except ToolDurabilityError as error:
        raise Interrupted(f"The handler says that its outcome is unknown: {error}") from error
    except KeyboardInterrupt:
        raise  # a person stops the process; what became of the call is found when the run goes on
    except BaseException as error:
        if not isinstance(error, Exception) or isinstance(error, MemoryError) or _is_time_limit(error):
            raise Interrupted(f"{type(error).__name__} inside the handler.") from error
        told["error"] = type(error).__name__
        text = described(error)
        if tool.recovery in ("nothing", "reconcile"):
            text += MAY_HAVE_HAPPENED
        logger.info("Tool failed run=%s tool=%s", context.run_id, tool.name, exc_info=True)
        return Observation(text, is_error=True, seconds=time.perf_counter() - began)
    return Observation(output.content, flags=output.flags, seconds=time.perf_counter() - began)


def described(error: BaseException) -> str:
    """Return what an exception says, also when saying it raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its text could not be made)"


def _is_time_limit(error: BaseException) -> bool:
    # A worker's time limit is not the handler's error; celery and billiard both define it, neither is here.
    return any(kind.__name__ == "SoftTimeLimitExceeded" for kind in type(error).__mro__)


def in_thread(alias: str, tool: Tool, context: ToolContext, arguments: dict[str, Any]) -> Future[Observation]:
    """Enter a handler in a thread of its own, which closes its database connections."""
    future: Future[Observation] = Future()
    carried = telemetry.carried()

    def target() -> None:
        with carried:
            try:
                observation = call(tool, context, arguments)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(observation)
            finally:
                connections.close_all()

    if connections[alias].in_atomic_block:  # a TestCase: another connection would see nothing
        try:
            future.set_result(call(tool, context, arguments))
        except Exception as error:
            future.set_exception(error)
    else:
        threading.Thread(target=target, name=f"agentruns-{tool.name}", daemon=True).start()
    return future


def reconcile(
    alias: str, tool: Tool, context: ToolContext, arguments: dict[str, Any]
) -> Occurred | NotOccurred | Unknown:
    """Ask a tool's `reconcile` within the tool's time; what it does not answer is Unknown."""
    if tool.timeout is None or connections[alias].in_atomic_block:  # as in `in_thread`
        try:
            return tool.run_reconcile(context, arguments)
        finally:
            mend_connection(alias)
    answer: Future[Occurred | NotOccurred | Unknown] = Future()
    carried = telemetry.carried()

    def target() -> None:
        with carried:
            try:
                answer.set_result(tool.run_reconcile(context, arguments))
            except BaseException as error:
                answer.set_exception(error)
            finally:
                connections.close_all()

    threading.Thread(target=target, name=f"agentruns-{tool.name}", daemon=True).start()
    try:
        return answer.result(timeout=tool.timeout)
    except TimeoutError:
        return Unknown(f"reconcile did not return within {tool.timeout} s")


def mend_connection(alias: str) -> None:
    """Undo what a handler may leave behind: an open transaction, or autocommit off.

    Under either, the journal's next row would not be committed before the next handler is entered.
    """
    connection = connections[alias]
    foreign = [block for block in connection.atomic_blocks if not getattr(block, "_from_testcase", False)]
    fine = connection.in_atomic_block or connection.connection is None or connection.autocommit
    if fine and not foreign:
        return
    logger.error("A handler left a transaction open on %r; it is rolled back.", alias)
    connection.in_atomic_block = False
    connection.atomic_blocks, connection.savepoint_ids = [], []
    connection.needs_rollback = connection.closed_in_transaction = False
    connection.run_on_commit = []
    connection.close()
