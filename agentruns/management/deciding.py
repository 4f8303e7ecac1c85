"""What the commands that decide an approval share: whose decision it is, and on what."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from agentruns.management.base import AgentRunsCommand
from agentruns.management.people import user_named
from agentruns.models import Approval

CHANNEL = "terminal"


class DecidingCommand(AgentRunsCommand):
    """Decides one approval by the same service as the console, in the name of a user who may."""

    reason_required = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("approval_id", metavar="ID", help="The approval's id, not that of its call.")
        parser.add_argument(
            "--user", required=True, metavar="NAME", help="Who decides, and must be allowed to."
        )
        parser.add_argument(
            "--reason", default="", required=self.reason_required, metavar="TEXT", help="Kept in the journal."
        )
        parser.add_argument(
            "--digest", metavar="D", help="Of the card that was looked at: refused if it was edited since."
        )

    def act(
        self, *, approval_id: str, user: str, reason: str, digest: str | None, json: bool, **options: Any
    ) -> None:
        approval = self.decide(approval_id, user_named(user), reason, digest)
        if json:
            facts = {"id": approval.pk, "run": approval.run_id, "status": approval.status}
            self.say_json({**facts, "approvals": approval.approved_count, "required": approval.required})
            return
        given = f" ({approval.approved_count} of {approval.required} approvals)"
        so_far = given if approval.required > 1 else ""
        self.say(f"Approval {approval.pk} of {approval.tool_name} is {approval.status}{so_far}.")

    def decide(self, approval_id: str, user: Any, reason: str, digest: str | None) -> Approval:
        """Decide."""
        raise NotImplementedError
