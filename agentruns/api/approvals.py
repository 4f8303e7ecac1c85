"""Endpoints of approvals. Deciding records; a worker executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse

from agentruns.api.auth import channel_of, find_approval, user_of, visible_approvals
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
    OfApprovalStatus,
)
from agentruns.exceptions import ApprovalStateError
from agentruns.models import Approval
from agentruns.models.querysets import PENDING
from agentruns.services import approvals as services

DECISION = documented(400, 401, 403, 404, 409, 413, 422)


@router.get("/approvals", response=ApprovalPage, openapi_extra=documented(400, 401, 422))
def list_approvals(
    request: HttpRequest, status: OfApprovalStatus = None, cursor: Cursor = None
) -> ApprovalPage:
    """List the approvals you may see or decide, the one requested last first."""
    approvals = visible_approvals(user_of(request))
    if status is not None:
        approvals = approvals.pending() if status == PENDING.value else approvals.filter(status=status)
    found, following = page(approvals, "requested_at", cursor)
    return ApprovalPage(items=[ApprovalOut.of(approval) for approval in found], next=following)


@router.get("/approvals/{approval_id}", response=ApprovalOut, openapi_extra=documented(401, 404))
def get_approval(request: HttpRequest, approval_id: ApprovalId) -> ApprovalOut:
    """Return one approval with its effective arguments and their digest."""
    return ApprovalOut.of(find_approval(user_of(request), approval_id))


@router.post("/approvals/{approval_id}/approve", response=ApprovalOut, openapi_extra=DECISION)
def approve(
    request: HttpRequest,
    response: HttpResponse,
    approval_id: ApprovalId,
    body: Approve,
    key: Key | None = KEY,
) -> Any:
    """Approve the call, with other `arguments` if given.

    409, with who and when, if it was decided already or `digest` is not what it shows now; 422 if the
    arguments do not fit the tool.
    """

    def act(approval: Approval, **who: Any) -> Approval:
        return services.approve(
            approval.pk, digest=body.digest, arguments=body.arguments, reason=body.reason, **who
        )

    return once(request, response, key, body, lambda: _decide(request, approval_id, act))


@router.post("/approvals/{approval_id}/deny", response=ApprovalOut, openapi_extra=DECISION)
def deny(
    request: HttpRequest, response: HttpResponse, approval_id: ApprovalId, body: Deny, key: Key | None = KEY
) -> Any:
    """Deny the call; the model is told that it was not executed, and why. 409 as for approve."""

    def act(approval: Approval, **who: Any) -> Approval:
        return services.deny(approval.pk, reason=body.reason, digest=body.digest, **who)

    return once(request, response, key, body, lambda: _decide(request, approval_id, act))


@router.post("/approvals/{approval_id}/answer", response=ApprovalOut, openapi_extra=DECISION)
def answer(
    request: HttpRequest, response: HttpResponse, approval_id: ApprovalId, body: Answer, key: Key | None = KEY
) -> Any:
    """Give the model `text` as the result of the call, which is not executed. 409 as for approve."""

    def act(approval: Approval, **who: Any) -> Approval:
        return services.answer(approval.pk, text=body.text, digest=body.digest, **who)

    return once(request, response, key, body, lambda: _decide(request, approval_id, act))


def _decide(request: HttpRequest, approval_id: str, act: Callable[..., Approval]) -> ApprovalOut:
    user = user_of(request)
    approval = find_approval(user, approval_id)
    try:
        return ApprovalOut.of(act(approval, actor=user, channel=channel_of(request)))
    except ApprovalStateError as error:
        raise Problem.of(error, **approval_facts(services.find_approval(approval.pk))) from error
