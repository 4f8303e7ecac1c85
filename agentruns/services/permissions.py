"""Permissions: every service asks this module, which asks the policy; so admin, API and commands agree.

`None` is the program itself, and a `Program` is a part of it. Both may do everything; admin and API pass
neither. The rule "may decide" has two forms: `why_not_decide` for one approval, the query `decidable_by`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID

from django.contrib.auth import authenticate, get_user_model
from django.contrib.auth.signals import user_login_failed
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils.translation import gettext as _, gettext_lazy

from agentruns import exceptions
from agentruns.agents.agent import Agent
from agentruns.conf import settings
from agentruns.exceptions import PermissionDeniedError, RunStateError, SessionBusyError
from agentruns.journal import events, masking, policy
from agentruns.journal.deciders import owner_by_rows, restore, why_not_decide
from agentruns.journal.events import is_program
from agentruns.journal.policy import ask, groups_of, is_somebody, user_of_key, visible_approvals, visible_runs
from agentruns.models import Approval, Message, Run, SessionBearer, StartCount
from agentruns.models.parts import HAS
from agentruns.models.statuses import Verb
from agentruns.tools.options import REQUESTER
from agentruns.utils import clock
from agentruns.utils.bounds import NAME_LENGTH
from agentruns.utils.db import delete_rows
from agentruns.utils.redaction import get_logger

logger, passwords = get_logger("agentruns.reveals"), get_logger("agentruns.passwords")

CONFIRMED_AT = "agentruns_password_at"  # in Django's session
WRONG_PASSWORDS, PASSWORD_WINDOW = 5, timedelta(minutes=15)
GIVEN = ("pk", "run_id", "call_id", "approved_count")
BUSY_UNSEEN = gettext_lazy("The session has an unfinished run that you may not see. Use another session.")
KEY_UNSEEN = gettext_lazy(
    "The key belongs to a task or message of a run that you may not see. Use a new key."
)
FAILED = gettext_lazy("The project's own rule failed, so nobody is let through. The log says why.")
MOST = 1000  # partly approved approvals that `decidable_by` reads


def may(actor: Any, action: str, obj: Any = None) -> bool:
    """Check whether an actor may do `action`, one of ACTIONS, to `obj`; None is any object."""
    return is_program(actor) or (is_somebody(actor) and bool(ask("can", False, actor, action, obj)))


def why_not(actor: Any, action: str) -> str:
    """Explain why a user was refused one of ACTIONS: a missing permission, or the project's policy."""
    permission = policy.ACTIONS[action][0]
    if actor.has_perm(permission):
        return _("The project's policy does not allow it.")
    return _("Permission %(permission)s is missing.") % {"permission": permission}


def require(actor: Any, action: str, run: Run) -> Run:
    """Raise PermissionDeniedError unless the actor may do `action`, one of ACTIONS, to a run; return the run.

    First sets the run's columns from its rows (`restore`). Raises DurableRunNotFoundError for a run that the
    project's own `visible` hides from the actor, JournalUnreadableError for damaged rows.
    """
    restore(run)
    if narrows("visible"):
        require_visible(actor, run)
    if not may(actor, action, run):
        text = _("%(name)s may not do this to run %(run)s: %(why)s")
        facts = {"name": actor.get_username(), "run": run.pk, "why": why_not(actor, action)}
        raise PermissionDeniedError(text % facts)
    return run


def sees(actor: Any, run_id: UUID) -> bool:
    """Check whether a user may see a run; True for the program."""
    return not hides(actor) or visible_runs(actor).filter(pk=run_id).exists()


def require_visible(actor: Any, run: Run) -> None:
    """Raise DurableRunNotFoundError for a run that a user may not see."""
    if not is_program(actor) and not visible_runs(actor).filter(pk=run.pk).exists():
        raise exceptions.DurableRunNotFoundError(_("There is no run %(run)s.") % {"run": run.pk})


@contextmanager
def discreet(actor: Any) -> Iterator[None]:
    """Replace RunStateError and SessionBusyError by errors that do not name a run the actor may not see."""
    try:
        yield
    except (RunStateError, SessionBusyError) as error:
        if error.run_id is None or is_program(actor) or visible_runs(actor).filter(pk=error.run_id).exists():
            raise
        raise type(error)(str(BUSY_UNSEEN if isinstance(error, SessionBusyError) else KEY_UNSEEN)) from None


def require_whole(actor: Any, run: Run, until: int | None = None) -> None:
    """Raise PermissionDeniedError unless a user may see all runs of the session, up to row `until`."""
    # Forks, exports and looks at the past read the whole conversation.
    if not hides(actor):  # by default all runs of a session are visible to its owner
        return
    rows = Message.objects.using(settings.DATABASE).filter(session_id=run.session_id)
    rows = rows if until is None else rows.filter(seq__lte=until)
    if rows.exclude(run__in=visible_runs(actor)).exists():
        text = _("Run %(run)s goes on from another one of its session, which you may not see.")
        raise PermissionDeniedError(text % {"run": run.pk})


def titled(actor: Any, sessions: Collection[UUID]) -> Collection[UUID]:
    """Select the sessions whose title (the first task) a user may see."""
    if not hides(actor):
        return sessions
    first = Message.objects.using(settings.DATABASE).filter(session_id__in=sessions, seq=1)
    return {*first.filter(run__in=visible_runs(actor)).values_list("session_id", flat=True)}


def hides(actor: Any, method: str = "visible") -> bool:
    """Check whether the project's `visible` or `method` decides what an actor sees; False for the program."""
    return not is_program(actor) and (narrows("visible") or narrows(method))


def narrows(method: str) -> bool:
    """Check whether the project's policy overrides the method with this name."""
    return getattr(type(policy.current()), method) is not getattr(policy.Policy, method)


def require_somebody(actor: Any) -> None:
    """Raise PermissionDeniedError for AnonymousUser or an inactive user; accept the program and visitors."""
    # AnonymousUser has no id, and would pass for the owner of the program's runs.
    if is_program(actor) or isinstance(actor, SessionBearer):
        return
    if actor.pk is None or not actor.is_active:
        raise PermissionDeniedError(_("Nobody is signed in, or the user is not active. Sign in first."))


def active_user(user_id: Any) -> Any:
    """Find the active user of an id; None if there is none."""
    user = user_of_key(user_id)
    return user if user is not None and user.is_active else None


def context_of(user: Any, agent: Agent, requested: dict[str, Any]) -> dict[str, Any]:
    """Build the context of a run that a user starts, by the policy; raises PermissionDeniedError."""
    context: dict[str, Any] | None = ask("context", None, user, agent, requested)
    if context is None:
        raise PermissionDeniedError(str(FAILED))
    return context


def context_again(user: Any, agent: Agent, last: Run, owner_id: Any) -> dict[str, Any] | None:
    """Build the context of a run that continues from `last`; None if it keeps the context of `last`.

    Returns None if the project has no `context` rule of its own, and `last` has no owner, or has the owner
    `owner_id` and was not imported. Otherwise requests the context of `last` from the policy, and then {} if
    the policy refuses. Raises PermissionDeniedError if the policy refuses both.
    """
    named = owner_by_rows(last)
    is_theirs = named == str(owner_id) and last.session.imported_at is None
    if not narrows("context") and (named is None or is_theirs):
        return None
    try:
        return context_of(user, agent, last.context)
    except PermissionDeniedError:
        return context_of(user, agent, {})


def require_decide(
    actor: Any, approval: Approval, arguments: dict[str, Any] | None = None, verb: str = Verb.APPROVE
) -> Approval:
    """Raise PermissionDeniedError unless the actor may decide an approval; return the approval.

    `arguments` are the edited ones, if the actor edits them. `verb` is the intended decision. It matters for
    a call that the requester confirms: other users may only deny it, and no user may edit or extend it.
    Raises NotFoundError for an approval that the project's policy hides from the actor.
    """
    if hides(actor, "visible_approvals") and not visible_approvals(actor).filter(pk=approval.pk).exists():
        raise exceptions.NotFoundError(_("There is no approval %(id)s.") % {"id": approval.pk})
    restore(approval.run)
    if why := why_not_decide(actor, approval, arguments, verb=verb):
        raise PermissionDeniedError(why)
    return approval


def decidable(actor: Any, approvals: Iterable[Approval]) -> Iterator[Approval]:
    """Yield the unexpired `approvals` that a user may decide and has not approved; all must be pending."""
    approvals = list(approvals)
    now, given, groups = clock.now(settings.DATABASE), already_given(actor, approvals), groups_of(actor)
    for approval in approvals:
        in_time = approval.expires_at is None or approval.expires_at > now
        if in_time and approval.pk not in given and not why_not_decide(actor, approval, groups=groups):
            yield approval


def decidable_by(user: Any, pending: QuerySet[Any]) -> QuerySet[Any]:
    """Select those `pending` approvals that a user can decide now, like `decidable`, but by a query.

    Calls only the policy's `decidable`, so the result may have approvals that `can_decide` refuses. Leaves
    out approvals that the user gave already, but checks only MOST partly approved ones.
    """
    approvals = open_to(user, pending)
    partly: Any = approvals.filter(approved_count__gt=0).values_list(*GIVEN, named=True)
    return approvals.exclude(pk__in=already_given(user, list(partly[:MOST])))


def open_to(user: Any, pending: QuerySet[Any]) -> QuerySet[Any]:
    """Select those `pending` approvals that have not expired and that a user may decide.

    Does not leave out approvals that the user has approved already.
    """
    if not is_somebody(user) or user.pk is None:
        return pending.none()
    in_time = Q(expires_at__isnull=True) | Q(expires_at__gt=clock.now(settings.DATABASE))
    # Not a join, which would read all runs to count the pending approvals.
    run = Run.objects.using(settings.DATABASE).filter(pk=OuterRef("run_id"), owner_id=user.pk)
    own = Q(Exists(run), approvers=REQUESTER)
    if not may(user, "decide"):
        return pending.filter(in_time, own)
    allowed = ~Q(approvers=REQUESTER)
    if not getattr(user, "is_superuser", False):
        held: set[str] = getattr(user, "get_all_permissions", set)()
        allowed &= Q(approvers__in={"", *held, *(name.rpartition(".")[2] for name in held)} | groups_of(user))
    if not settings.REQUESTER_MAY_APPROVE:
        for person in events.people(events.actor_ref(user)):
            allowed &= ~Q(run__requesters__contains=f" {quote(person)} ")
    return ask("decidable", pending.none(), user, pending.filter(in_time, own | allowed))


def already_given(actor: Any, approvals: Iterable[Approval]) -> set[UUID]:
    """Find the ids of `approvals` that the actor approved, except voided ones; none if `actor` is None."""
    if actor is None:
        return set()
    who = {*events.people(events.actor_ref(actor))}
    return {key for key, given in givers(approvals).items() if who & {*given, *given.values()}}


def givers(approvals: Iterable[Approval]) -> dict[UUID, dict[str, str]]:
    """Map the id of each partly approved approval to the ids of the users whose approval still counts.

    Each user's id is mapped to the id of the person who acted in the user's name, "" if nobody did.
    """
    partly = {(each.run_id, each.call_id): each for each in approvals if each.approved_count}
    if not partly:
        return {}
    rows = Message.objects.using(settings.DATABASE).filter(run_id__in=[run_id for run_id, _ in partly])
    rows = rows.filter(kind__in=(events.APPROVAL_DECIDED, events.APPROVAL_VOIDED))
    people: dict[UUID, dict[str, str]] = {approval.pk: {} for approval in partly.values()}
    for run_id, call_id, facts in rows.order_by("seq").values_list("run_id", "call_id", "facts"):
        approval = partly.get((run_id, call_id))
        if approval is None:
            continue
        given = people[approval.pk]
        if "arguments" in facts.get(HAS, ()):  # an edit voids earlier approvals
            given.clear()
        if facts.get("verb") == Verb.APPROVE:
            actor = facts.get("actor") or events.PROGRAM
            given[str(actor["id"])] = actor.get("by", "")
        for key in facts.get("voided", ()):
            given.pop(key, None)
    return people


def may_reveal(user: Any, shown: Approval | Run) -> bool:
    """Check whether a user may see an approval's or a run's sensitive values; False if the policy fails."""
    if is_program(user):
        return True
    if not is_somebody(user):  # visitors included: a project's rule might take a visitor for the owner
        return False
    try:
        if narrows("can_reveal"):
            restore(shown.run if isinstance(shown, Approval) else shown)
        return bool(policy.current().can_reveal(user, shown))
    except Exception:
        with masking.veiling(shown) as is_known:
            logger.error("The policy failed: nothing is revealed to user=%s", user.pk, exc_info=is_known)
        return False


def reads_all(user: Any, shown: Approval | Run) -> bool:
    """Check whether a user may read all of a run or an approval, such as names of staff, reasons and costs.

    Visitors, and users without the permission to view runs, read only what their answers list (`public` of a
    row). An approval is read whole by its decider, too, and by users who may view or decide approvals.
    """
    if is_program(user) or may(user, "monitor", shown if isinstance(shown, Run) else shown.run):
        return True
    if isinstance(shown, Run):
        return False
    if isinstance(user, SessionBearer):
        return shown.decided_by_id is None and shown.decided_by_name == user.get_username()
    is_own = user.pk is not None and shown.decided_by_id == user.pk
    return is_own or user.has_perm("agentruns.view_approval") or may(user, "decide", shown)


def reveal(user: Any, shown: Approval | Run, *, door: str, what: str = "") -> None:
    """Log that a user sees sensitive values through the channel `door`; PermissionDeniedError if refused."""
    name, pk = shown._meta.model_name, shown.pk
    if not may_reveal(user, shown):
        text = _(
            "What is sensitive of %(name)s %(id)s is not shown to you: the permission "
            "agentruns.reveal_arguments is missing, or the project's policy refuses it."
        )
        raise PermissionDeniedError(text % {"name": name, "id": pk})
    run_id: UUID = shown.run_id if isinstance(shown, Approval) else shown.pk
    who = events.logged(user)
    logger.info("Revealed %s=%s run=%s %s to user=%s door=%s", name, pk, run_id, what, who, door)


def needs_password(request: Any, risk: str, *, has_session: bool = True) -> bool:
    """Check whether a person must give their password again to approve, or let a rule approve, a high risk.

    Not needed if AGENTRUNS_REAUTH_SECONDS is None, if the password was given in that time, or if the policy's
    `has_second_factor` is true. `has_session` is False with a token: the cookie may be another user's.
    """
    seconds = settings.REAUTH_SECONDS
    if seconds is None or risk != Approval.Risk.HIGH or ask("has_second_factor", False, request):
        return False
    given_at = request.session.get(CONFIRMED_AT) if has_session else None
    return given_at is None or clock.now(settings.DATABASE).timestamp() - given_at > seconds


def confirm_password(request: Any, password: str) -> str:
    """Check the password of the request's user, and store the time in the session; else explain the refusal.

    The user has WRONG_PASSWORDS tries in PASSWORD_WINDOW, in all processes together. After them no password
    is checked until the window ends. Django sends `user_login_failed` for each wrong password.
    """
    user, who = request.user, f"password:{request.user.pk}"
    alias, address, whose = settings.DATABASE, request.META.get("REMOTE_ADDR"), events.logged(user)
    # Counted before the check, or many at once would all be checked.
    if seconds := StartCount.count_one(alias, who, WRONG_PASSWORDS, PASSWORD_WINDOW):
        passwords.warning("No password is checked user=%s address=%s for %s s", whose, address, seconds)
        text = _(
            "There were %(count)s wrong passwords. No password is taken for %(minutes)s min, then try again."
        )
        return text % {"count": WRONG_PASSWORDS, "minutes": math.ceil(seconds / 60)}
    given = {get_user_model().USERNAME_FIELD: user.get_username()}
    found = authenticate(request, password=password, **given)
    if found is None or found.pk != user.pk:
        if found is not None:  # somebody else's
            user_login_failed.send(__name__, credentials=given, request=request)
        passwords.warning("Wrong password for a decision user=%s address=%s", whose, address)
        return _("That is not your password.")
    delete_rows(StartCount.objects.using(alias).filter(user_id=who[:NAME_LENGTH]))
    request.session[CONFIRMED_AT] = clock.now(alias).timestamp()
    return ""
