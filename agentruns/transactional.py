"""Transactional tools: the handler's ORM writes and its result are one commit, or neither is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import InterfaceError, OperationalError, connections, transaction

from agentruns import handlers
from agentruns.clocks import uptime
from agentruns.crashpoints import reached
from agentruns.driver import Driver
from agentruns.exceptions import LeaseLostError
from agentruns.handlers import Interrupted, Observation
from agentruns.journal.calls import Call
from agentruns.redaction import get_logger
from agentruns.retries import read_committed
from agentruns.tools import Tool, ToolContext

logger = get_logger("agentruns.executor")

ROLLED_BACK = " Everything the tool wrote was rolled back: nothing happened."


class _RollBack(Exception):
    """Leaves the block without its writes."""

    def __init__(self, observation: Observation) -> None:
        super().__init__()
        self.observation = observation


def run(
    driver: Driver, tool: Tool, context: ToolContext, call: Call, record: Callable[[Observation], None]
) -> Observation | None:
    """Run the handler and `record` its result in one transaction; None when that was committed.

    Returns the error to store when the handler failed and everything was rolled back.
    """
    committed: list[bool] = []
    try:
        try:
            _run(driver, tool, context, call, record, committed)
        finally:
            handlers.mend_connection(driver.alias)
    except _RollBack as rolled_back:
        return rolled_back.observation
    except LeaseLostError:
        raise
    except Exception as error:
        # A lost acknowledgement, an on_commit hook of the handler's, a broken block: which of them is known.
        if committed or _is_stored(driver, call):
            logger.exception("After the commit of run=%s call=%s", context.run_id, call.id)
            return None
        stateless_commit_failed = driver.lease is None and not call.is_open
        if stateless_commit_failed or isinstance(error, OperationalError | InterfaceError | MemoryError):
            raise
        return Observation(handlers.described(error) + ROLLED_BACK, is_error=True)
    return None


def _run(
    driver: Driver,
    tool: Tool,
    context: ToolContext,
    call: Call,
    record: Callable[[Observation], None],
    committed: list[bool],
) -> None:
    alias = driver.alias
    with transaction.atomic(using=alias, durable=True):
        # First, so that it runs before any hook of the handler's can raise.
        transaction.on_commit(lambda: committed.append(True), using=alias)
        connection = connections[alias]
        read_committed(alias)
        blocks = list(connection.atomic_blocks)
        with refuse_other_writes(alias):
            try:
                observation = handlers.call(tool, context, call.arguments)
            except Interrupted as interruption:
                observation = Observation(f"{interruption}{ROLLED_BACK}", is_error=True)
        if observation.is_error:
            raise _RollBack(observation)
        if connection.atomic_blocks != blocks:  # then leaving ours would commit nothing
            raise RuntimeError("The handler left a transaction block open.")
        reached("before_result_commit")
        record(observation)


def _is_stored(driver: Driver, call: Call) -> bool:
    if driver.lease is None:
        return False
    driver.reread([], patient=True, give_up=uptime())
    return not driver.run.calls[call.id].is_open


class refuse_other_writes:
    """While a transactional handler runs, a write elsewhere would outlive its rollback: refuse it."""

    def __init__(self, alias: str) -> None:
        self.others = [connections[other] for other in connections if other != alias]

    def __enter__(self) -> None:
        for connection in self.others:
            connection.execute_wrappers.append(self._check)

    def __exit__(self, *exc_info: object) -> None:
        for connection in self.others:
            connection.execute_wrappers.remove(self._check)

    def _check(self, execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        if sql.lstrip("( \n").upper().startswith(("SELECT", "EXPLAIN", "SHOW", "PRAGMA")):
            return execute(sql, params, many, context)
        raise RuntimeError(
            f"A transactional tool may write only to the journal's database, not to "
            f"{context['connection'].alias!r}: that write would outlive a rollback."
        )
