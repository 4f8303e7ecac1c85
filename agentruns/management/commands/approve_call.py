from agentruns.management.base import DecidingCommand
from agentruns.services.approvals.decisions import approve


class Command(DecidingCommand):
    help = "Approve a gated call: a worker executes it."
    decide = staticmethod(approve)
