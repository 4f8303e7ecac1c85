from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.services.runs import blocked as blocked
    from agentruns.services.runs import starting as starting
    from agentruns.services.runs import waiting as waiting
else:
    __getattr__ = modules_of(__name__)
