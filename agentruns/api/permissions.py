"""What a user may see. "Not yours" and "not there" are the same answer; what they may do is the services'."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from agentruns.conf import settings
from agentruns.exceptions import DurableRunNotFoundError, SessionAccessDeniedError
from agentruns.models import Approval, Message, Run, Session
from agentruns.models.querysets import ApprovalQuerySet
from agentruns.services.runs import NAME_LENGTH

SHOWN = 50  # characters of an id that is none


def visible_runs(user: Any) -> QuerySet[Run]:
    """Return the user's own runs; all of them, unowned ones too, with the view permission."""
    return Run.objects.using(settings.DATABASE).for_user(user).select_related("session")


def visible_approvals(user: Any) -> ApprovalQuerySet:
    """Return the approvals of visible runs; all of them for those who decide."""
    return Approval.objects.using(settings.DATABASE).for_user(user)


def find_run(user: Any, run_id: str, *related: str) -> Run:
    """Return a run the user may see, read together with `related`, or raise DurableRunNotFoundError."""
    try:
        return visible_runs(user).select_related("session", *related).get(pk=UUID(run_id))
    except (Run.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(f"There is no run {run_id[:SHOWN]}.") from None


def run_of_key(user: Any, key: str | None) -> Run | None:
    """Return the user's own run of an idempotency key, if there is one."""
    return visible_runs(user).filter(owner_id=user.pk, idempotency_key=key).first() if key else None


def find_approval(user: Any, approval_id: str) -> Approval:
    """Return an approval the user may see, or raise DurableRunNotFoundError."""
    try:
        return visible_approvals(user).get(pk=UUID(approval_id))
    except (Approval.DoesNotExist, ValueError):
        raise DurableRunNotFoundError(f"There is no approval {approval_id[:SHOWN]}.") from None


def find_session(user: Any, key: str) -> Session:
    """Return a session the user may see, or raise SessionAccessDeniedError."""
    # What no key can be is not asked for: databases disagree about such texts.
    if len(key) <= NAME_LENGTH and key.isprintable():
        sessions = Session.objects.using(settings.DATABASE).filter(key=key)
        if not user.has_perm("agentruns.view_run"):
            sessions = sessions.filter(owner_id=user.pk)
        if session := sessions.first():
            return session
    raise SessionAccessDeniedError(f"There is no session {key[:NAME_LENGTH]!r}.")


def require_call(run: Run, call_id: str) -> None:
    """Raise DurableRunNotFoundError unless the run has such a call."""
    rows = Message.objects.using(settings.DATABASE).filter(run_id=run.pk, call_id=call_id)
    if not call_id.isprintable() or not rows.exclude(call_id="").exists():
        raise DurableRunNotFoundError(f"Run {run.pk} has no call {call_id[:SHOWN]}.")
