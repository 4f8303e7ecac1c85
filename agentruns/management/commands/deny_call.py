"""`manage.py deny_call ID --user NAME --reason TEXT`."""

from __future__ import annotations

from typing import Any

from agentruns.management.base import CHANNEL, DecidingCommand
from agentruns.models import Approval
from agentruns.services.approvals import deny


class Command(DecidingCommand):
    help = "Deny a gated call: it is not executed, and the model is told the reason."
    reason_required = True

    def decide(self, approval_id: str, user: Any, reason: str, digest: str | None) -> Approval:
        return deny(approval_id, user, reason, digest=digest, channel=CHANNEL)
