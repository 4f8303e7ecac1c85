from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.journal import events as events
    from agentruns.journal import masking as masking
    from agentruns.journal import outbox as outbox
    from agentruns.journal import payloads as payloads
    from agentruns.journal import policy as policy
else:
    __getattr__ = modules_of(__name__)
