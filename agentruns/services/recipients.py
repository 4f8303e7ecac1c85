"""The people who are told of a notice: those who may act on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import Exists

from agentruns.conf import settings
from agentruns.journal.deciders import restore, why_not_decide, why_own
from agentruns.journal.outbox import Notice
from agentruns.journal.policy import (
    action_of,
    ask,
    current,
    is_somebody,
    staff,
    visible_approvals,
    visible_runs,
)
from agentruns.models import Approval, Run
from agentruns.services.approvals.decisions import find_approval
from agentruns.services.permissions import may, narrows
from agentruns.services.runs.write import find_run
from agentruns.tools.options import REQUESTER

AT_ONCE = 100  # users of one query
SEEING = ("agentruns.view_approval", "agentruns.decide_approval")  # by default either lets see approvals


def recipients(notice: Notice) -> list[Any]:
    """List the users whom the policy chooses for a notice, if they may act on it and see what it is about.

    Adds the staff in the group of an escalation who may see the approval, except excluded requesters. Needs
    the same few queries for any number of users, unless the project's policy has its own rules. Raises the
    errors of the policy, NotFoundError and DurableRunNotFoundError.
    """
    about = find_approval(notice.approval_id) if notice.approval_id else find_run(notice.run_id)
    run = restore(about.run if isinstance(about, Approval) else about)
    # The default query has found out who has the permission; asking each user would take three queries.
    is_own = narrows("recipients") or narrows("can") or getattr(about, "approvers", "") == REQUESTER
    people = [
        user
        for user in filter(is_somebody, current().recipients(notice))
        if (may_act(user, notice, about) if is_own else not excluded(user, about))
    ]
    for permission in SEEING if notice.group else ():
        people += [user for user in staff(notice.group, permission) if not why_own(user, run)]
    return [*seeing({user.pk: user for user in people}, about)]


def address_field() -> str:
    """Name the column with the e-mail addresses of users; "" if users have none."""
    return str(getattr(get_user_model(), "get_email_field_name", str)())


def address_of(user: Any) -> str:
    """Find a user's e-mail address; "" without one."""
    return str(getattr(user, address_field(), "") or "") if address_field() else ""


def users_with(address: str) -> list[Any]:
    """List the users who have an e-mail address."""
    name = address_field()
    return [*get_user_model()._default_manager.filter(**{f"{name}__iexact": address})] if name else []


def may_act(user: Any, notice: Notice, about: Approval | Run) -> bool:
    """Check whether a user may do what a notice calls for."""
    if isinstance(about, Approval):
        return not why_not_decide(user, about)
    return may(user, action_of(notice), about)


def excluded(user: Any, about: Approval | Run) -> bool:
    """Check whether a user with the permission is a requester, or refused by the policy's `can_decide`."""
    if not isinstance(about, Approval):
        return False
    return bool(why_own(user, about.run)) or not ask("can_decide", False, user, about, about.arguments)


def seeing(people: dict[Any, Any], about: Approval | Run) -> Iterator[Any]:
    """Yield those of the users, by key, who may see an approval or a run."""
    visible: Any = visible_approvals if isinstance(about, Approval) else visible_runs
    if not any(map(narrows, ("recipients", "visible", "visible_approvals"))):
        yield from people.values()
        return
    users = [*people.values()]
    for start in range(0, len(users), AT_ONCE):
        part = users[start : start + AT_ONCE]
        rows = type(about)._default_manager.using(settings.DATABASE).filter(pk=about.pk)
        for seen in rows.values_list(*(Exists(visible(user).filter(pk=about.pk)) for user in part)):
            yield from (user for user, may_see in zip(part, seen, strict=True) if may_see)
