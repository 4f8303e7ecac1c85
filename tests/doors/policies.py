"""Policies of hosts: who sees what, without a `scope` of the policy."""

from __future__ import annotations

from typing import Any

from agentruns import Policy


class ByName(Policy):
    """A user sees the runs of owners of the same tenant, which is what follows the @ in their names."""

    def visible(self, user: Any, runs: Any) -> Any:
        return runs.filter(owner_name__endswith=user.get_username().partition("@")[2])
