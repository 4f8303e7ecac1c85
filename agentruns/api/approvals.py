"""Endpoints of approvals. Deciding records; a worker executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest

from agentruns.api.auth import (
    channel_of,
    find_approval,
    require_password,
    require_token_scope,
    user_of,
)
from agentruns.api.errors import Problem, approval_facts, documented
from agentruns.api.idempotency import KEY, once
from agentruns.api.pagination import page
from agentruns.api.routing import router
from agentruns.api.schemas import (
    Answer,
    ApprovalId,
    ApprovalOut,
    ApprovalPage,
    Approve,
    Cursor,
    Deny,
    Key,
    Keyed,
    OfApprovalStatus,
    Reveal,
)
from agentruns.exceptions import ApprovalStateError
from agentruns.journal.deciders import is_requester
from agentruns.journal.policy import visible_approvals
from agentruns.models import ApiToken, Approval, SessionBearer
from agentruns.models.querysets import PENDING
from agentruns.services import approvals as services
from agentruns.services import permissions, reveals
from agentruns.tools.options import REQUESTER

DECISION = documented(400, 401, 403, 404, 409, 413, 422)


@router.get("/approvals", response=ApprovalPage, openapi_extra=documented(400, 401, 422))
def list_approvals(
    request: HttpRequest, status: OfApprovalStatus = None, cursor: Cursor = None
) -> ApprovalPage:
    """List the approvals you may see or decide, the one requested last first."""
    approvals = visible_approvals(user_of(request)).select_related("run")
    if status is not None:
        approvals = approvals.filter(status=PENDING if status == PENDING.value else status)
    found, following = page(approvals, "requested_at", cursor)
    return ApprovalPage(items=ApprovalOut.all(found), next=following)


@router.get("/approvals/{approval_id}", response=ApprovalOut, openapi_extra=documented(401, 403, 404, 422))
def get_approval(request: HttpRequest, approval_id: ApprovalId, reveal: Reveal = False) -> ApprovalOut:
    """Return one approval with its effective arguments and their digest, which a decision needs.

    Sensitive arguments, and texts that repeat them, are masked. `reveal=true` shows them, which is logged;
    403 for who may not see them.
    """
    user = user_of(request)
    approval = find_approval(user, approval_id)
    if not reveal:
        return ApprovalOut.of(approval)
    reveals.reveal(user, approval, door=channel_of(request))
    return ApprovalOut.revealed(approval)


@router.post("/approvals/{approval_id}/approve", response=ApprovalOut, openapi_extra=DECISION)
def approve(request: HttpRequest, approval_id: ApprovalId, body: Approve, key: Key | None = KEY) -> Any:
    """Approve the call, with other `arguments` if given.

    409, with who and when, if it was decided already or `digest` is not what it shows now; 422 if the
    arguments do not fit the tool.
    """

    def act(approval: Approval, **who: Any) -> Approval:
        require_password(request, approval)
        return services.approve(
            approval.pk, digest=body.digest, arguments=body.arguments, reason=body.reason, **who
        )

    return _decide(request, approval_id, act, key, body)


@router.post("/approvals/{approval_id}/deny", response=ApprovalOut, openapi_extra=DECISION)
def deny(request: HttpRequest, approval_id: ApprovalId, body: Deny, key: Key | None = KEY) -> Any:
    """Deny the call; the model gets the reason instead of a result. 409 as for approve."""

    def act(approval: Approval, **who: Any) -> Approval:
        return services.deny(approval.pk, reason=body.reason, digest=body.digest, **who)

    return _decide(request, approval_id, act, key, body)


@router.post("/approvals/{approval_id}/answer", response=ApprovalOut, openapi_extra=DECISION)
def answer(request: HttpRequest, approval_id: ApprovalId, body: Answer, key: Key | None = KEY) -> Any:
    """Give the model `text` as the result of the call, which is not executed. 409 as for approve."""

    def act(approval: Approval, **who: Any) -> Approval:
        return services.answer(approval.pk, text=body.text, digest=body.digest, **who)

    return _decide(request, approval_id, act, key, body)


def _decide(
    request: HttpRequest,
    approval_id: str,
    act: Callable[..., Approval],
    key: Key | None,
    body: Keyed,
) -> Any:
    user = user_of(request)

    def find() -> Approval:
        approval = find_approval(user, approval_id)
        if not isinstance(user, SessionBearer):
            is_own = approval.approvers == REQUESTER and is_requester(user, approval.run)
            scope = ApiToken.Scope.APPROVALS_OWN if is_own else ApiToken.Scope.APPROVALS_DECIDE
            require_token_scope(request, scope.value)
        return approval

    def decide() -> ApprovalOut:
        approval = find()
        try:
            return ApprovalOut.of(act(approval, actor=user, channel=channel_of(request)))
        except ApprovalStateError as error:
            raise Problem.of(error, **approval_facts(services.find_approval(approval.pk))) from error

    def again() -> ApprovalOut:
        approval = find()
        permissions.require_decide(user, approval)
        return ApprovalOut.of(approval)

    return once(request, key, body, decide, again)
