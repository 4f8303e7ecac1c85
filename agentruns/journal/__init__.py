from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.journal import events, masking, outbox, payloads, policy, rules
else:
    __getattr__ = modules_of(__name__)
