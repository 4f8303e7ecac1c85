"""Act as people do on runs while workers die."""

from __future__ import annotations

import random

from agentruns import approve, deny, resume_run
from agentruns.exceptions import AgentRunsError
from agentruns.models import Approval, Run


def decide(dice: random.Random) -> None:
    """Play the people: approve or deny what waits, and resume what is in doubt or paused."""
    for card in Approval.objects.pending():
        try:
            approve(card.pk, None) if dice.random() < 0.8 else deny(card.pk, None, "not today")
        except AgentRunsError:
            continue
    for run in Run.objects.filter(status__in=["orphaned", "paused"]):
        try:
            resume_run(run.pk, drive=False)
        except AgentRunsError:
            continue
