"""The people who are told of a notice: those who may act on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import Exists
from django.db.models.functions import Now

from agentruns.conf import settings
from agentruns.journal import policy
from agentruns.journal.deciders import requested, restore, why_not_decide, why_own
from agentruns.journal.outbox import Notice
from agentruns.models import Absence, Approval, Run
from agentruns.services.approvals.decisions import find_approval
from agentruns.services.permissions import may, narrows
from agentruns.services.runs.write import find_run
from agentruns.tools.options import REQUESTER

AT_ONCE = 100  # users of one query
SEEING = ("agentruns.view_approval", "agentruns.decide_approval")  # by default either lets see approvals


def recipients(notice: Notice) -> list[Any]:
    """List the users whom the policy chooses for a notice, if they may act on it and see what it is about.

    Adds the delegates of absent users, except requesters and those who may not act on it. Adds the staff in
    the group of an escalation who may see the approval, except excluded requesters. Needs the same few
    queries for any number of users, unless the project's policy has its own rules. Raises the errors of the
    policy, NotFoundError and DurableRunNotFoundError.
    """
    about = find_approval(notice.approval_id) if notice.approval_id else find_run(notice.run_id)
    run = restore(about.run if isinstance(about, Approval) else about)
    # The default query has found out who has the permission; asking each user would take three queries.
    is_own = narrows("recipients") or narrows("can") or getattr(about, "approvers", "") == REQUESTER
    chosen = filter(policy.is_somebody, policy.current().recipients(notice))
    people = {user.pk: user for user in chosen if may_act(user, notice, about, has_permission=not is_own)}
    away = Absence.objects.using(settings.DATABASE).filter(begins_at__lte=Now(), ends_at__gt=Now())
    keys = {*away.filter(person_id__in=map(str, people)).values_list("delegate_id", flat=True)}
    for user in get_user_model()._default_manager.filter(pk__in=keys - {*map(str, people)}) if keys else ():
        if may_act(user, notice, about) and not requested(user, run):
            people[user.pk] = user
    for permission in SEEING if notice.group else ():
        told = policy.staff(notice.group, permission)
        people |= {user.pk: user for user in told if not why_own(user, run)}
    return [*seeing([*people.values()], about)]


def may_act(user: Any, notice: Notice, about: Approval | Run, *, has_permission: bool = False) -> bool:
    """Check whether a user may do what a notice calls for; `has_permission` saves the queries about that."""
    if not isinstance(about, Approval):
        return has_permission or may(user, policy.action_of(notice), about)
    if not has_permission:
        return not why_not_decide(user, about)
    may_decide = policy.ask("can_decide", False, user, about, about.arguments)
    return bool(may_decide) and not why_own(user, about.run)


def seeing(people: list[Any], about: Approval | Run) -> Iterator[Any]:
    """Yield those of the users who may see an approval or a run."""
    visible: Any = policy.visible_approvals if isinstance(about, Approval) else policy.visible_runs
    if not any(map(narrows, ("recipients", "visible", "visible_approvals"))):
        yield from people
        return
    rows = type(about)._default_manager.using(settings.DATABASE).filter(pk=about.pk)
    for start in range(0, len(people), AT_ONCE):
        part = people[start : start + AT_ONCE]
        for seen in rows.values_list(*(Exists(visible(user).filter(pk=about.pk)) for user in part)):
            yield from (user for user, may_see in zip(part, seen, strict=True) if may_see)


def address_of(user: Any) -> str:
    """Find a user's e-mail address; "" without one."""
    name = getattr(type(user), "get_email_field_name", str)()  # "" if users have none
    return str(getattr(user, name, None) or "") if name else ""


def users_with(address: str) -> list[Any]:
    """List the users who have an e-mail address."""
    name = getattr(get_user_model(), "get_email_field_name", str)()
    return [*get_user_model()._default_manager.filter(**{f"{name}__iexact": address})] if name else []
