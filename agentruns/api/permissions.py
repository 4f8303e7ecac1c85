"""What a user may see. "Not yours" and "not there" are the same answer; what they may do is the services'."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError
from agentruns.models import Approval, Run


def visible_runs(user: Any) -> QuerySet[Run]:
    """Return the user's own runs; all of them, unowned ones too, with the view permission."""
    return Run.objects.using(settings.DATABASE).for_user(user).select_related("session")


def visible_approvals(user: Any) -> QuerySet[Approval]:
    """Return the approvals of visible runs; all of them for those who decide."""
    return Approval.objects.using(settings.DATABASE).for_user(user)


def find_run(user: Any, run_id: str, *related: str) -> Run:
    """Return a run the user may see, read together with `related`, or raise DurableRunNotFoundError."""
    try:
        return visible_runs(user).select_related("session", *related).get(pk=UUID(run_id))
    except (Run.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(f"There is no run {run_id}.") from None


def find_approval(user: Any, approval_id: str) -> Approval:
    """Return an approval the user may see, or raise DurableRunNotFoundError."""
    try:
        return visible_approvals(user).get(pk=UUID(approval_id))
    except (Approval.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(f"There is no approval {approval_id}.") from None
