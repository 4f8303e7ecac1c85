from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.services import api_tokens as api_tokens
    from agentruns.services import permissions as permissions
    from agentruns.services import runs as runs
    from agentruns.services import sweep as sweep
else:
    __getattr__ = modules_of(__name__)
