from typing import TYPE_CHECKING

from agentruns.utils.late import modules_of

if TYPE_CHECKING:
    from agentruns.services import api_tokens, permissions, rules, runs, sweep
else:
    __getattr__ = modules_of(__name__)
