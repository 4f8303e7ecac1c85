from agentruns.models.approval import Approval
from agentruns.models.control import Control
from agentruns.models.definition import Definition
from agentruns.models.fence import CommitFence
from agentruns.models.idempotency import IdempotencyRecord
from agentruns.models.message import Message
from agentruns.models.notification import Notification
from agentruns.models.run import Run
from agentruns.models.session import Session
from agentruns.models.token import ApiToken
from agentruns.models.tombstone import PrunedKey, Tombstone

__all__ = [
    "ApiToken",
    "Approval",
    "CommitFence",
    "Control",
    "Definition",
    "IdempotencyRecord",
    "Message",
    "Notification",
    "PrunedKey",
    "Run",
    "Session",
    "Tombstone",
]
