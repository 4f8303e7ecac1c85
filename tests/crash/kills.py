"""Processes that SIGKILL ends at a crash point."""

from __future__ import annotations

import os
import signal

from django.db import connection

from tests.crash.child import Orders, perform
from tests.crash.processes import Forked
from tests.effects import VARIABLE


def child(*action: str, point: str = "", **environment: str) -> int | None:
    """Do it in another process; return how that ended. Nobody competes with it, so its lease is short."""
    orders = Orders(
        actions=[action],
        point=point,
        dies=True,
        lease=0.3,
        database={"NAME": str(connection.settings_dict["NAME"])},
        environment={VARIABLE: os.environ[VARIABLE], **environment},
    )
    process = Forked(perform, orders)
    try:
        code = process.ended()
        assert code != 0 or process.hear() == []
        return code
    finally:
        process.close()


def run_and_die(*action: str, point: str = "", **environment: str) -> None:
    """Do it in another process, which is killed at the point."""
    assert child(*action, point=point, **environment) == -signal.SIGKILL


def finish(*action: str, **environment: str) -> None:
    """Do it in another process, which ends well."""
    assert child(*action, **environment) == 0
