from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.admin.approvals import absences, around, card, decide
else:
    __getattr__ = modules_of(__name__)
