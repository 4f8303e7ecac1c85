"""System checks: an Error only where the promise is false, each with the fix as its hint.

Checks that query a database are run by `check --database ALIAS` and by `migrate` only, as Django does it, and
are quick. Importing this package registers them.
"""

from agentruns.checks.agents import check_agents, check_approvers
from agentruns.checks.database import check_database
from agentruns.checks.deployment import (
    check_deployment,
    check_dispatcher,
    check_sweeper,
    check_telemetry,
)
from agentruns.checks.settings import (
    check_notifiers,
    check_payload_storage,
    check_payloads,
    check_refusals,
    check_settings,
    check_throttle,
)

__all__ = [
    "check_agents",
    "check_approvers",
    "check_database",
    "check_deployment",
    "check_dispatcher",
    "check_notifiers",
    "check_payload_storage",
    "check_payloads",
    "check_refusals",
    "check_settings",
    "check_sweeper",
    "check_telemetry",
    "check_throttle",
]
