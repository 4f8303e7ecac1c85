from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.admin.runs import actions as actions
    from agentruns.admin.runs import audit as audit
    from agentruns.admin.runs import history as history
    from agentruns.admin.runs import limits as limits
    from agentruns.admin.runs import list as list
    from agentruns.admin.runs import page as page
    from agentruns.admin.runs import review as review
    from agentruns.admin.runs import steps as steps
else:
    __getattr__ = modules_of(__name__)
