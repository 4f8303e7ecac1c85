"""Calls of handlers, in a thread or a transaction and within a time limit, and how the handlers end."""

from __future__ import annotations

import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from django.db import DatabaseError, InterfaceError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from agentruns.conf import settings
from agentruns.engine import holds
from agentruns.engine.driver import Driver
from agentruns.exceptions import (
    DurableRunNotFoundError,
    JournalConflictError,
    LeaseLostError,
    ToolDurabilityError,
)
from agentruns.journal import events, masking, telemetry
from agentruns.journal.batch import Batch
from agentruns.journal.connection import journal_alias, mend_connection, own_alias, own_connection
from agentruns.journal.fold import Call
from agentruns.journal.payloads import Offload
from agentruns.models import CommitFence, Message, Run
from agentruns.tools import InvalidArguments, Pending, Tool, ToolContext, Unknown
from agentruns.tools.base import Answer
from agentruns.tools.context import NotEntered
from agentruns.tools.refusals import MAY_HAVE_HAPPENED, NOTHING_HAPPENED, ROLLED_BACK, is_refusal
from agentruns.utils.carry import carried, restore, state_of
from agentruns.utils.db import (
    ABORTED,
    cannot_pass,
    delete_rows,
    is_conflict,
    read_committed,
    sqlstate,
    uptime,
    working,
)
from agentruns.utils.failpoints import reached
from agentruns.utils.redaction import conceal, driven, get_logger

logger = get_logger("agentruns.executor")

ENDED_BY_HANDLER = (
    "The handler ended its transaction by itself; what it wrote may or may not have been committed."
)
LOST = (
    "The connection was lost while the handler ran: by a failure, or by PostgreSQL's limit "
    "idle_in_transaction_session_timeout."
)
LONGEST_PAUSE = 5.0  # seconds between two tries to store a late result
MARK = "agentruns_handler"  # a savepoint, which is gone if the transaction has ended
NOWHERE = -1
_ENDS_TRANSACTION = re.compile(
    r"\s*(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!\s+(\w+\s+)?TO\b))\b",
    re.IGNORECASE,
)

T = TypeVar("T")


class Interrupted(Exception):
    """Raised if a handler's outcome is unknown, for example because it timed out or was stopped."""


@dataclass(slots=True)
class Observation:
    """The return value or exception of a handler, before it is stored as a row."""

    content: Any
    is_error: bool = False
    in_doubt: bool = False  # an error that leaves open whether the effect happened
    is_refusal: bool = False  # an error of the handler's own that says that nothing happened
    pending: Pending | None = None  # the result comes with an event
    may_pass: bool = False  # rolled back because of a conflict with another transaction
    held: holds.Held | None = None  # rolled back because what its approval relied on has changed
    flags: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Build the members of a `late_result` row that the observation gives."""
        if self.pending is not None:
            return {"content": None, "is_error": False, "pending": self.pending.key or ""}
        return {"content": self.content, "is_error": self.is_error, **self.flags}


def enter(tool: Tool, context: ToolContext, arguments: dict[str, Any]) -> Observation:
    """Call a handler in this thread and observe its return value or error.

    Raises Interrupted if its outcome is unknown, and NotEntered if the lease was over before it began.
    """

    def facts() -> dict[str, Any]:
        run_id, epoch = driven()
        about = {"run_id": context.run_id, "epoch": epoch if run_id == context.run_id else 0}
        call = {"call_id": context.call_id, "attempt": context.attempt, "declares": tool.recovery}
        return {**about, "tool": tool.name, **call}

    with telemetry.span("tool", facts) as attributes:
        began = time.perf_counter()
        try:
            is_whole = arguments.keys() == tool.input_schema.get("properties", {}).keys()
            with working(False):  # a run that the handler drives must leave it its connections
                output = tool.invoke(context, arguments if is_whole else tool.revalidated(arguments))
        except (NotEntered, KeyboardInterrupt):
            raise  # if a person stops the process, the next drive of the run finds the call in doubt
        except ToolDurabilityError as error:
            raise Interrupted(f"The handler says that its outcome is unknown: {error}") from error
        except BaseException as error:
            # A worker's time limit is not the handler's error; found by name, as celery may not be installed.
            is_limit = any(kind.__name__ == "SoftTimeLimitExceeded" for kind in type(error).__mro__)
            if is_limit or not isinstance(error, Exception) or isinstance(error, MemoryError):
                raise Interrupted(f"{type(error).__name__} inside the handler.") from error
            attributes.update(error=type(error).__name__, outcome="error")
            observation = failed(tool, tool.recovery, context.run_id, error)
        else:
            conceal(masking.sensitive_parts(output.content, output.flags, tool.sensitive_results))
            attributes["outcome"] = "ok"
            observation = Observation(output.content, pending=output.pending, flags=output.flags)
        observation.seconds = time.perf_counter() - began
        return observation


def failed(tool: Tool, declared: str, run_id: str, error: Exception) -> Observation:
    """Log an error of a handler, and observe it by the declaration with which the call was started."""
    seen = Observation(described(error), is_error=True, is_refusal=is_refusal(error, tool.refuses))
    if declared in ("nothing", "reconcile"):
        seen.in_doubt = not seen.is_refusal
        if not seen.in_doubt:
            seen.content += NOTHING_HAPPENED
        elif declared == "nothing":
            seen.content += MAY_HAVE_HAPPENED
    if tool.sensitive_results:  # the error and its causes may quote the handler's data
        cause: BaseException | None = error
        texts: dict[int, str] = {}
        while cause is not None and id(cause) not in texts:
            texts[id(cause)] = words(cause)
            cause = cause.__cause__ or cause.__context__
        conceal([*texts.values()])
    level = logging.INFO if seen.is_refusal else logging.ERROR  # a refusal is expected
    logger.log(level, "Tool failed run=%s tool=%s", run_id, tool.name, exc_info=error)
    return seen


def described(error: BaseException) -> str:
    """Describe an exception by its type and text."""
    return f"{type(error).__name__}: {words(error)}"


def words(error: BaseException) -> str:
    """Convert an exception to text, even if its own conversion raises."""
    try:
        return str(error)
    except Exception:
        return "(its text could not be made)"


def in_thread(alias: str, name: str, work: Callable[[], T]) -> Future[T]:
    """Run `work` in a new thread that then closes its connections; in a TestCase run it in this thread."""
    future: Future[T] = Future()
    told, state = telemetry.carried(), state_of(alias)

    def target() -> None:
        with told, carried(alias, state):  # also while the future's callbacks run
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            finally:
                connections.close_all()

    if connections[alias].in_atomic_block:  # a TestCase: another connection would see nothing
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
    else:
        threading.Thread(target=target, name=f"agentruns-{name}", daemon=True).start()
    return future


def reconcile(alias: str, tool: Tool, context: ToolContext, arguments: dict[str, Any]) -> Answer:
    """Call a tool's `reconcile` within the tool's timeout; return Unknown if it does not return in time.

    Inside a TestCase there is no timeout. Raises NotEntered if the lease is over.
    """
    with suppress(InvalidArguments):  # by what the tool takes now, or else as they were recorded
        arguments = tool.revalidated(arguments)
    ask = partial(tool.run_reconcile, context, arguments)
    if tool.timeout is None or connections[alias].in_atomic_block:  # as in `in_thread`
        try:
            return ask()
        finally:
            mend_connection(alias)
    try:
        return in_thread(alias, tool.name, ask).result(timeout=tool.timeout)
    except TimeoutError:
        return Unknown(f"reconcile did not return within {tool.timeout} s")


class _RollBack(Exception):
    """Raised to roll back a handler's transaction; its argument is the Observation."""


def run_transactional(
    driver: Driver, tool: Tool, context: ToolContext, call: Call, record: Callable[[Observation], None]
) -> Observation | None:
    """Run a handler and `record` its result in one transaction; return None if this is committed.

    Returns the error as an Observation if the transaction is rolled back; `may_pass` says that the call can
    be entered again, `held` that it was not entered, because what its approval relied on has changed. Raises
    LeaseLostError, NotEntered, Interrupted if the handler ended its transaction by itself, and errors that
    may pass, such as a lost connection.
    """
    done, alias, broken = set[str](), driver.alias, list[Exception]()

    def attempt() -> None:
        with transaction.atomic(using=alias, durable=True):
            # First, so that it runs before any hook of the handler's can raise.
            transaction.on_commit(lambda: done.add("committed"), using=alias)
            connection = connections[alias]
            read_committed(alias)
            blocks = list(connection.atomic_blocks)
            with fenced(alias):
                with contained(alias, broken):
                    done.add("entered")
                    # On rows that the function locks: nothing can change them before the commit.
                    if (now := holds.changed(driver, call)) is not None:
                        with suppress(RuntimeError):  # a statement of the function failed
                            require_same_transaction(connection)
                        may_pass = any(map(is_conflict, broken))
                        raise _RollBack(Observation("", may_pass=may_pass, held=now))
                    try:
                        observation = enter(tool, context, call.arguments)
                    except Interrupted as interruption:
                        observation = Observation(f"{interruption}{ROLLED_BACK}", is_error=True)
                reached("after_tool")
                try:
                    require_same_transaction(connection)
                except RuntimeError:  # the handler's own error, if it raised, says more
                    if not observation.is_error:
                        raise
                if observation.is_error:
                    raise _RollBack(observation)
                restore(alias)  # the journal's rows follow
                if connection.atomic_blocks != blocks:  # the end of our block would then commit nothing
                    raise RuntimeError("The handler left a transaction block open.")
                reached("before_result_commit")
                record(observation)

    try:
        try:
            attempt()
        except (DatabaseError, InterfaceError):
            shared = connections[alias]
            if "entered" in done or shared.in_atomic_block:
                raise
            shared.close()  # an earlier handler may have left it read-only
            attempt()
        finally:
            mend_connection(alias)
    except _RollBack as rolled_back:
        observation: Observation = rolled_back.args[0]
        is_said = observation.is_refusal or observation.held is not None
        return observation if is_said else explained(observation, tool, broken)
    except (LeaseLostError, Interrupted, NotEntered):
        raise
    except Exception as error:
        # Find out if the commit succeeded: its acknowledgement may be lost, or an on_commit hook has raised.
        is_stored = "committed" in done
        if not is_stored and driver.lease is not None:
            driver.reread([], patient=True, give_up=uptime())
            is_stored = not driver.run.calls[call.id].is_open
        if is_stored:
            logger.exception("After the commit of run=%s call=%s", context.run_id, call.id)
            return None
        stateless_commit_failed = driver.lease is None and not call.is_open
        may_pass = isinstance(error, OperationalError | InterfaceError | MemoryError)
        is_read_only = sqlstate(error) == "SQLITE_READONLY"  # the connection, as user code can make it
        if stateless_commit_failed or (may_pass and not is_read_only):
            raise
        return explained(Observation(described(error) + ROLLED_BACK, is_error=True), tool, broken)
    return None


def explained(observation: Observation, tool: Tool, broken: list[Exception]) -> Observation:
    """Add the error of the statement that broke a handler's transaction, and whether that error may pass."""
    for error in broken:
        observation.may_pass = is_conflict(error)
        if words(error) not in str(observation.content):
            text = str(observation.content).removesuffix(ROLLED_BACK)
            observation.content = f"{text} The statement that failed: {described(error)}{ROLLED_BACK}"
        if tool.sensitive_results:
            conceal([words(error)])
    return observation


@contextmanager
def fenced(alias: str) -> Iterator[None]:
    """Make the database refuse to commit the open transaction before the end of the block.

    Sets the savepoint MARK. Raises RuntimeError at the end of the block if another transaction is open then.
    """
    fences = CommitFence.objects.using(alias)
    (fence,) = fences.bulk_create([CommitFence(nothing_id=NOWHERE)])
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SAVEPOINT {MARK}")
    yield
    if delete_rows(fences.filter(pk=fence.pk)) != 1:
        raise RuntimeError("The transaction is not the one in which the handler began.")


def require_same_transaction(connection: BaseDatabaseWrapper) -> None:
    """Raise an error if the transaction in which the handler began cannot be committed.

    Raises Interrupted if the handler ended the transaction by itself, OperationalError if the connection was
    lost, and RuntimeError if the handler closed the connection or broke the transaction.
    """
    # Use the driver's own cursor, because Django refuses every query in a broken block.
    raw = connection.connection
    try:
        cursor = raw.cursor()
    except Exception as error:  # closed, which rolls back
        if getattr(raw, "broken", False):
            raise OperationalError(LOST) from error
        raise RuntimeError("The handler closed the connection.") from error
    try:
        cursor.execute(f"RELEASE SAVEPOINT {MARK}")
        if connection.vendor == "postgresql":  # a limit that the handler set must not stop the journal
            cursor.execute("SET LOCAL statement_timeout TO DEFAULT")
        return
    except Exception as error:
        failed = error
    try:
        cursor.execute(f"ROLLBACK TO SAVEPOINT {MARK}")
    except Exception as error:
        if getattr(raw, "broken", False):
            raise OperationalError(LOST) from error
        raise Interrupted(ENDED_BY_HANDLER) from error
    raise RuntimeError("A statement of the handler failed and broke its transaction.") from failed


@contextmanager
def contained(alias: str, broken: list[Exception]) -> Iterator[None]:
    """Raise RuntimeError for SQL of a handler that would end its transaction or survive a rollback.

    `broken` gets the error of the last statement if that failed, without errors that only follow from it.
    """

    def check_own(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if not _ENDS_TRANSACTION.match(sql):
            try:
                result = execute(sql, params, many, context)
            except Exception as error:
                if sqlstate(error) not in ("", ABORTED):
                    broken[:] = [error]
                raise
            broken.clear()
            return result
        raise RuntimeError("A transactional tool may not begin or end a transaction by SQL: use atomic().")

    def check_other(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        reads = ("SELECT", "EXPLAIN", "SHOW", "PRAGMA", "SET SEARCH_PATH")  # the last by django-tenants
        if sql.lstrip("( \n").upper().startswith(reads):
            return execute(sql, params, many, context)
        raise RuntimeError(
            f"A transactional tool may write only to the journal's database, not to "
            f"{context['connection'].alias!r}: that write would outlive a rollback."
        )

    with ExitStack() as checks:
        for other in connections:
            wrappers = connections[other].execute_wrappers
            check = check_own if other == alias else check_other
            wrappers.append(check)
            checks.callback(wrappers.remove, check)
        yield


def store_late_result(
    driver: Driver, calls: list[Call], facts: dict[str, Any], offload: Offload | None = None, until: float = 0
) -> None:
    """Append a `late_result` row for each call, also to a run that has ended or has another worker.

    Does nothing without a lease. Tries until `until`, by default for the length of a lease; then logs the
    facts, and tries in a thread as long as this process lives. After an error that cannot pass, logs the
    facts at once and does not try again. Without the row a person might give the verdict that a call did not
    happen, although it did. `offload` is the Offload that was built for the result, if there is one.
    """
    lease, pause, tried = driver.lease, 0.02, list[str]()
    if lease is None or not calls:
        return
    offload, until = offload or driver.offload(calls[0]), until or uptime() + settings.LEASE_SECONDS
    driver.mend()
    while True:
        try:
            with own_connection(lease.alias):
                rows = Message.objects.using(journal_alias(lease.alias)).filter(session_id=lease.session_id)
                if rows.filter(hash__in=tried).exists():  # only the acknowledgement was lost
                    return
                batch = Batch(driver.store.load(lease.session_id, lease.run_id))
                if not Run.objects.using(journal_alias(lease.alias)).filter(pk=lease.run_id).exists():
                    raise DurableRunNotFoundError(f"Run {lease.run_id} is gone.")
                batch.closed = True
                for call in calls:
                    payload: events.LateResult = {**facts, "worker_epoch": lease.epoch}  # type: ignore
                    if call.id not in batch.state.run.calls and not rows.filter(call_id=call.id).exists():
                        payload["lost"] = True
                    about = {"call_id": call.id, "tool_name": call.tool, "attempt": call.attempt}
                    batch.add(events.LATE_RESULT, payload, offload=offload, **about)  # type: ignore[arg-type]
                tried.append(batch.rows[0].hash)
                driver.store.append(batch, durable=True)
            return
        except Exception as error:
            passes = isinstance(error, JournalConflictError | DatabaseError | InterfaceError)
            passes = passes and not cannot_pass(error) and not connections[lease.alias].in_atomic_block
            if not passes or uptime() >= until:
                about = {"run": str(lease.run_id), "calls": [(call.id, call.tool) for call in calls]}
                again = partial(store_late_result, driver, calls, facts, offload, math.inf)
                more = "It is tried again." if passes and in_thread(lease.alias, "late", again) else ""
                logger.critical("Late result not stored %s: %r. %s", about, facts, more, exc_info=True)
                return
            if not isinstance(error, JournalConflictError):  # broken, or on a server that is read-only now
                for alias in {lease.alias, own_alias(lease.alias)}:
                    connections[alias].close()
        time.sleep(random.uniform(0, pause))  # noqa: S311 - spreads load
        pause = min(2 * pause, LONGEST_PAUSE)
