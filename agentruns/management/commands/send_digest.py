from __future__ import annotations

from typing import Any

from agentruns.management.base import AgentRunsCommand
from agentruns.services.digests import send_digests


class Command(AgentRunsCommand):
    help = (
        "Mail the staff who may decide how many approvals wait for each of them. A second call on one day "
        "sends nothing again. Exit 1 if a mail could not be sent."
    )

    def act(self, **options: Any) -> bool:
        sent, failed = send_digests()
        self.tell({"sent": sent, "failed": failed}, f"Sent {sent}, failed {failed}.")
        return failed > 0
