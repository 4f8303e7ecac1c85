from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.admin.rules import page
else:
    __getattr__ = modules_of(__name__)
