"""Showing what is sensitive: to who may see it, and never without a log record."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.utils.translation import gettext as _

from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import masking, policy
from agentruns.models import Approval, Run
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.reveals")


def may_reveal(user: Any, shown: Approval | Run) -> bool:
    """Tell whether a user may see what is sensitive of an approval, or of a run's part that no card shows."""
    if user is None or isinstance(user, str):  # the program, or a part of it
        return True
    if not policy.is_somebody(user):  # nor a visitor, whom a rule of a project may not tell from the owner
        return False
    try:
        return bool(policy.current().can_reveal(user, shown))
    except Exception:
        with masking.veiling(shown) as is_known:
            logger.error("The policy failed: nothing is revealed to user=%s", user.pk, exc_info=is_known)
        return False


def reveal(user: Any, shown: Approval | Run, *, door: str, what: str = "") -> None:
    """Log that a user is shown what is sensitive; raises PermissionDeniedError for who may not see it.

    `what` names the part that is shown: a call or a row.
    """
    name, pk = shown._meta.model_name, shown.pk
    if not may_reveal(user, shown):
        text = _(
            "What is sensitive of %(name)s %(id)s is not shown to you: the permission "
            "agentruns.reveal_arguments is missing, or the project's policy refuses it."
        )
        raise PermissionDeniedError(text % {"name": name, "id": pk})
    run_id: UUID = shown.run_id if isinstance(shown, Approval) else shown.pk
    who = getattr(user, "pk", user)
    logger.info("Revealed %s=%s run=%s %s to user=%s door=%s", name, pk, run_id, what, who, door)
