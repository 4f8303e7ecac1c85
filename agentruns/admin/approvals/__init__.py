from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.admin.approvals import around as around
    from agentruns.admin.approvals import card as card
    from agentruns.admin.approvals import decide as decide
else:
    __getattr__ = modules_of(__name__)
