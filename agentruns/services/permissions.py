"""Permissions. Every service asks here, so admin, API and commands cannot differ.

`None` is the program itself, which may do everything; admin and API never pass it. The rule "may decide"
stands here in two forms: `why_not_decide` for one approval, `decidable_by` as a query for very many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from uuid import UUID

from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import events
from agentruns.models import Approval, Message, Run
from agentruns.utils import clock
from agentruns.utils.redaction import get_logger

logger = get_logger("agentruns.permissions")

DECIDES = "agentruns.decide_approval"
HEAVY = ("arguments", "why", "run__input", "run__output", "run__error", "run__usage")
GIVEN = ("pk", "run_id", "call_id", "approved_count")
MOST = 1000  # approvals that the query form looks at one by one


def require(actor: Any, permission: str, run: Run, *, owner_may: bool = False) -> None:
    """Raise PermissionDeniedError unless the actor has `permission`, or owns the run where that is enough."""
    if may(actor, permission) or (owner_may and actor.is_active and owns(actor, run)):
        return
    raise PermissionDeniedError(
        _("%(name)s may not do this to run %(run)s: permission %(permission)s is missing.")
        % {"name": actor.get_username(), "run": run.pk, "permission": permission}
    )


def may(actor: Any, permission: str) -> bool:
    """Tell whether the actor has a permission; a text names a part of the program itself."""
    return actor is None or isinstance(actor, str) or bool(actor.is_active and actor.has_perm(permission))


def require_somebody(actor: Any) -> None:
    """Raise PermissionDeniedError for a visitor who is not signed in, or a user who is not active.

    A visitor has no id, and without this would pass for the owner of what belongs to nobody.
    """
    if actor is not None and (actor.pk is None or not actor.is_active):
        raise PermissionDeniedError(_("Nobody is signed in, or the user is not active. Sign in first."))


def owns(actor: Any, run: Run) -> bool:
    """Tell whether the run was started by, or for, this user."""
    return run.owner_id is not None and run.owner_id == actor.pk


def why_not_decide(actor: Any, approval: Approval, groups: Collection[str] | None = None) -> str:
    """Return the reason why this user cannot decide this approval, or "" if they can.

    `groups` are the names of the user's groups where the caller has them; a project's rule that fails lets
    nobody decide.
    """
    if actor is None:
        return ""
    name = actor.get_username()
    if not actor.is_active:
        return _("%(name)s is not active.") % {"name": name}
    if not actor.has_perm(DECIDES):
        return _("%(name)s lacks the permission agentruns.decide_approval.") % {"name": name}
    if approval.approvers and not _is_among(actor, approval.approvers, groups):
        facts = {"tool": approval.tool_name, "approvers": approval.approvers, "name": name}
        return _("%(tool)s is decided by %(approvers)s; %(name)s is not among them.") % facts
    if not settings.REQUESTER_MAY_APPROVE and owns(actor, approval.run):
        return _("%(name)s requested this run, and requesters may not decide about their own.") % {
            "name": name
        }
    return _why_the_project_does_not(actor, approval)


def _why_the_project_does_not(actor: Any, approval: Approval) -> str:
    rule = settings.can_decide
    if rule is None:
        return ""
    try:
        if rule(actor, approval):
            return ""
    except Exception:
        logger.warning("AGENTRUNS_CAN_DECIDE failed approval=%s", approval.pk, exc_info=True)
        return _("The project's own rule failed, so nobody is let through. The log says why.")
    return _("The project's own rule does not let %(name)s decide this.") % {"name": actor.get_username()}


def decidable(actor: Any, approvals: Iterable[Approval]) -> list[Approval]:
    """Return those of the approvals that this user can decide now."""
    now, given, groups = clock.now(settings.DATABASE), already_given(actor, approvals), groups_of(actor)
    return [
        one
        for one in approvals
        if one.pk not in given
        and (one.expires_at is None or one.expires_at > now)
        and not why_not_decide(actor, one, groups)
    ]


def decidable_by(user: Any, pending: QuerySet[Any]) -> QuerySet[Any]:
    """Narrow pending approvals to those that a user can decide now, as `decidable` does, by a query.

    A project's own rule is asked approval by approval, about the first MOST.
    """
    found = open_to(user, pending)
    if settings.can_decide is not None:
        candidates = list(found.select_related("run").defer(*HEAVY)[:MOST])
        return found.filter(pk__in=[approval.pk for approval in decidable(user, candidates)])
    partly: Any = found.filter(approved_count__gt=0).values_list(*GIVEN, named=True)
    return found.exclude(pk__in=already_given(user, list(partly[:MOST])))


def open_to(user: Any, pending: QuerySet[Any]) -> QuerySet[Any]:
    """Narrow pending approvals to those in time that this user could decide by what their columns say."""
    if not may(user, DECIDES):
        return pending.none()
    found = Q(expires_at__isnull=True) | Q(expires_at__gt=clock.now(settings.DATABASE))
    if not getattr(user, "is_superuser", False):
        held: set[str] = getattr(user, "get_all_permissions", set)()
        names = {"", *held, *(name.rpartition(".")[2] for name in held)}
        found &= Q(approvers__in=names | groups_of(user))
    return pending.filter(found if settings.REQUESTER_MAY_APPROVE else found & ~Q(run__owner_id=user.pk))


def already_given(actor: Any, approvals: Iterable[Approval]) -> set[UUID]:
    """Return the approvals that this user has given already and that wait for others."""
    partly = {(one.run_id, one.call_id): one for one in approvals if one.approved_count}
    if not partly or actor is None:
        return set()
    rows = Message.objects.using(settings.DATABASE).filter(
        run_id__in=[run_id for run_id, _ in partly], kind=events.APPROVAL_DECIDED
    )
    given = set()
    for run_id, call_id, payload in rows.order_by("seq").values_list("run_id", "call_id", "payload"):
        approval = partly.get((run_id, call_id))
        if approval is None or payload.get("verb") != "approve":
            continue
        if "arguments" in payload:  # an edit voids what was given before it
            given.discard(approval.pk)
        if str((payload.get("actor") or {}).get("id")) == str(actor.pk):
            given.add(approval.pk)
    return given


def _is_among(actor: Any, approvers: str, groups: Collection[str] | None) -> bool:
    if getattr(actor, "is_superuser", False):
        return True
    if "." in approvers:
        named = actor.has_perm(approvers)
    else:
        permissions: set[str] = getattr(actor, "get_all_permissions", set)()
        named = any(permission.endswith(f".{approvers}") for permission in permissions)
    return named or approvers in (groups_of(actor) if groups is None else groups)


def groups_of(actor: Any) -> set[str]:
    """Return the names of a user's groups; a custom user model may have none."""
    groups = getattr(actor, "groups", None)
    return set() if groups is None else set(groups.values_list("name", flat=True))
