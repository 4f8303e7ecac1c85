from agentruns.models.approval import Approval
from agentruns.models.bookkeeping import CommitFence, Control, IdempotencyRecord, Notification, StartCount
from agentruns.models.message import Message
from agentruns.models.run import ContextValue, Definition, Draft, Review, Run
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
