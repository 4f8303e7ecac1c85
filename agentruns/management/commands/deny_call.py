from agentruns.management.base import DecidingCommand, deciding
from agentruns.services.approvals.decisions import deny


class Command(DecidingCommand):
    help = "Deny a gated call: it is not executed, and the model is told the reason."
    decide = staticmethod(deny)
    arguments = deciding(reason_required=True)
