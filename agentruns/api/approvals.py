"""The endpoints of approvals. They record decisions, which a worker executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest

from agentruns.api import auth, schemas
from agentruns.api.errors import Problem, approval_facts
from agentruns.api.routing import GivenKey, once, page, router
from agentruns.api.schemas import Answer, ApprovalId, ApprovalOut, ApprovalPage, Approve, Cursor, Deny, Reveal
from agentruns.exceptions import ApprovalStateError
from agentruns.journal import policy
from agentruns.journal.deciders import is_requester, restore
from agentruns.models import ApiToken, Approval, SessionBearer
from agentruns.models.statuses import PENDING
from agentruns.services import permissions
from agentruns.services.approvals import decisions as services
from agentruns.tools.options import REQUESTER


@router.get("/approvals", response=ApprovalPage)
def list_approvals(
    request: HttpRequest, status: schemas.OfApprovalStatus = None, cursor: Cursor = None
) -> ApprovalPage:
    """List the approvals that you may see or decide, the latest request first."""
    user = auth.user_of(request)
    approvals = policy.visible_approvals(user).select_related("run")
    if status is not None:
        approvals = approvals.filter(status=PENDING if status == PENDING.value else status)
    page_rows, following = page(approvals, "requested_at", cursor)
    items = ApprovalOut.all(auth.readable(user, approval) for approval in page_rows)
    return ApprovalPage(items=items, next=following)


@router.get("/approvals/{approval_id}", response=ApprovalOut)
def get_approval(request: HttpRequest, approval_id: ApprovalId, reveal: Reveal = False) -> ApprovalOut:
    """Get one approval with its effective arguments and their digest, which a decision needs.

    Sensitive arguments are masked, also in texts that repeat them. `reveal=true` shows them, and the access
    is logged; 403 if you lack the permission to see them.
    """
    user = auth.user_of(request)
    approval = auth.find_approval(user, approval_id)
    if reveal:
        permissions.reveal(user, approval, door=auth.channel_of(request))
    return ApprovalOut.of(auth.readable(user, approval), reveals=reveal)


@router.post("/approvals/{approval_id}/approve", response=ApprovalOut)
def approve(request: HttpRequest, approval_id: ApprovalId, body: Approve, key: GivenKey = None) -> Any:
    """Approve the call. With `arguments`, these replace the model's arguments.

    409, with the decider and the time, if the approval is already decided, or if `digest` is not its current
    digest; 422 if the arguments do not fit the tool.
    """
    return _decide(request, approval_id, services.approve, key, body)


@router.post("/approvals/{approval_id}/deny", response=ApprovalOut)
def deny(request: HttpRequest, approval_id: ApprovalId, body: Deny, key: GivenKey = None) -> Any:
    """Deny the call: it is not executed, and the model gets the reason. 409 as for approve."""
    return _decide(request, approval_id, services.deny, key, body)


@router.post("/approvals/{approval_id}/answer", response=ApprovalOut)
def answer(request: HttpRequest, approval_id: ApprovalId, body: Answer, key: GivenKey = None) -> Any:
    """Answer the call: it is not executed, and the model gets `text` as its result. 409 as for approve."""
    return _decide(request, approval_id, services.answer, key, body)


def _decide(
    request: HttpRequest, approval_id: str, act: Callable[..., Approval], key: GivenKey, body: schemas.Keyed
) -> Any:
    user = auth.user_of(request)

    def find() -> Approval:
        approval = auth.find_approval(user, approval_id)
        if not isinstance(user, SessionBearer):
            is_own = approval.approvers == REQUESTER and is_requester(user, restore(approval.run))
            scope = ApiToken.Scope.APPROVALS_OWN if is_own else ApiToken.Scope.APPROVALS_DECIDE
            auth.require_token_scope(request, scope.value)
        return approval

    def decide() -> ApprovalOut:
        approval = find()
        if isinstance(body, Approve):
            auth.require_password(request, approval.risk, "call", "Approve")
        try:
            decided = act(approval.pk, user, channel=auth.channel_of(request), **body.given)
            return ApprovalOut.of(auth.readable(user, decided))
        except ApprovalStateError as error:
            raise Problem.of(error, **approval_facts(user, services.find_approval(approval.pk))) from error

    def again() -> ApprovalOut:
        approval = find()
        permissions.require_decide(user, approval)
        return ApprovalOut.of(auth.readable(user, approval))

    return once(request, key, body, decide, again)
