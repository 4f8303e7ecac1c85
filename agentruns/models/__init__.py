from agentruns.models.approval import Approval
from agentruns.models.context import ContextValue
from agentruns.models.control import Control
from agentruns.models.definition import Definition
from agentruns.models.draft import Draft
from agentruns.models.fence import CommitFence
from agentruns.models.idempotency import IdempotencyRecord
from agentruns.models.message import Message
from agentruns.models.notification import Notification
from agentruns.models.quota import StartCount
from agentruns.models.review import Review
from agentruns.models.run import Run
from agentruns.models.session import Session
from agentruns.models.token import ApiToken, SessionBearer
from agentruns.models.tombstone import PrunedKey, Tombstone

__all__ = [
    "ApiToken",
    "Approval",
    "CommitFence",
    "ContextValue",
    "Control",
    "Definition",
    "Draft",
    "IdempotencyRecord",
    "Message",
    "Notification",
    "PrunedKey",
    "Review",
    "Run",
    "Session",
    "SessionBearer",
    "StartCount",
    "Tombstone",
]
