from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.admin.runs import actions, audit, history, limits, list, page, steps
else:
    __getattr__ = modules_of(__name__)
