from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.services import api_tokens as api_tokens
    from agentruns.services import permissions as permissions
    from agentruns.services import sessions as sessions
    from agentruns.services import sweep as sweep
    from agentruns.services import waiting as waiting
else:
    __getattr__ = modules_of(__name__)
