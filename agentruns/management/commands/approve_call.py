"""`manage.py approve_call ID --user NAME [--reason TEXT]`."""

from __future__ import annotations

from typing import Any

from agentruns.management.base import CHANNEL, DecidingCommand
from agentruns.models import Approval
from agentruns.services.approvals import approve


class Command(DecidingCommand):
    help = "Approve a gated call: a worker executes it."

    def decide(self, approval_id: str, user: Any, reason: str, digest: str | None) -> Approval:
        return approve(approval_id, user, digest=digest, reason=reason, channel=CHANNEL)
