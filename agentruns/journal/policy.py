"""The policy: who may see, decide, start and reveal. All other code calls this module to find out.

As a user, None is the program itself, and a `Program` is a part of it, such as a command. Both may do
everything, and neither is ever taken for a person. A project changes the rules with a subclass of Policy,
which AGENTRUNS_POLICY names.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission, PermissionsMixin
from django.core.exceptions import ValidationError
from django.db import InterfaceError, InternalError, OperationalError
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent
from agentruns.agents.prices import is_amount
from agentruns.conf import settings
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import masking
from agentruns.journal.events import is_program
from agentruns.models import ApiToken, Approval, ApprovalRule, Run, Session, SessionBearer
from agentruns.tools.base import Tool
from agentruns.tools.options import REQUESTER
from agentruns.utils.calls import arity_mistake
from agentruns.utils.redaction import get_logger

if TYPE_CHECKING:
    from agentruns.journal.outbox import Notice

logger = get_logger("agentruns.policy")

Answer = TypeVar("Answer")

VISITORS_RUNS = 120  # an hour: two messages a minute
ANYONE = "anyone"  # `starters` of an agent that every signed-in user may start

# action -> permission, and whether the run's owner needs none
ACTIONS = {
    "message": ("agentruns.start_run", True),
    "resume": ("agentruns.resume_run", False),
    "cancel": ("agentruns.cancel_run", True),
    "pause": ("agentruns.pause_run", True),
    "unpause": ("agentruns.pause_run", False),
    "fork": ("agentruns.fork_run", True),
    "replay": ("agentruns.replay_run", False),
    "adopt": ("agentruns.adopt_definition", False),
    "raise_budget": ("agentruns.raise_budget", False),
    "resolve": ("agentruns.resolve_orphan", False),
    "export": ("agentruns.view_run", True),
    "review": ("agentruns.review_run", False),
    "erase": ("agentruns.erase_payload", False),
    "act_for": ("agentruns.act_for", False),
    "decide": ("agentruns.decide_approval", False),
    "revoke": ("agentruns.revoke_api_token", False),
    "monitor": ("agentruns.view_run", False),
    "switch": ("agentruns.switch", False),
    "deliver": ("agentruns.deliver_event", False),
    "write_rule": ("agentruns.write_rule", False),
    "activate_rule": ("agentruns.activate_rule", False),
    "plan_absence": ("agentruns.plan_absence", False),
}


# event of a run -> the action of those who are told; of an approval it is "decide", else "monitor"
CALLS_FOR = {
    "run.orphaned": "resolve",
    "run.paused": "unpause",
    "run.blocked": "adopt",
    "budget.low": "raise_budget",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one user, or of one session's visitors; None is no limit."""

    runs: int | None = None  # started in an hour; a message counts as one
    streams: int | None = 4  # open at once in one server process


class Switch(NamedTuple):
    """An "agent" or a "tool" (`kind`), as the object of the action "switch"."""

    kind: str
    name: str


class Reminders(NamedTuple):
    """When people are reminded of an approval, and when it is told to which group or permission as well."""

    remind_after: timedelta | None = None
    escalate_after: timedelta | None = None
    escalate_to: str | None = None


class Occurrence(NamedTuple):
    """The scope, name and key of an event, as the object of the action "deliver"."""

    scope: str
    name: str
    key: str


class Policy:
    """The rules of a project about permissions; a subclass may override every method.

    The methods are called only for users who are active and signed in; other users see nothing and may do
    nothing. If a method raises an error, the error is logged and the user is refused. A
    PermissionDeniedError, an error of the database that a retry may clear, and an error of `scope` may reach
    the caller instead.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError if an overridden method does not accept the arguments it will be called with."""
        super().__init_subclass__(**kwargs)
        for name, rule in vars(Policy).items():
            if name.startswith("_"):
                continue
            parameters = list(inspect.signature(rule).parameters)
            is_bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
            if wrong := arity_mistake(getattr(cls, name), *parameters[is_bound:]):
                raise TypeError(f"{cls.__qualname__}.{name} {wrong}.")

    def visible(self, user: Any, runs: QuerySet[Run]) -> QuerySet[Run]:
        """Narrow the runs to those a user may see: all with permission to view runs, else the user's own."""
        if user.has_perm("agentruns.view_run"):
            return runs
        return runs.none() if user.pk is None else runs.filter(owner_id=user.pk)  # None: not the program's

    def visible_approvals(self, user: Any, approvals: QuerySet[Approval]) -> QuerySet[Approval]:
        """Narrow the approvals to those a user may see: all with permission to view or to decide approvals.

        Other users see the approvals of the runs that they may see. If a subclass overrides `visible`, this
        holds for all users.
        """
        names = ("view_approval", "decide_approval")
        if type(self).visible is Policy.visible and any(user.has_perm(f"agentruns.{name}") for name in names):
            return approvals
        runs = self.visible(user, Run.objects.using(approvals.db).all())
        return approvals.filter(run__in=runs) if is_narrowed(runs) else approvals

    def visible_rules(self, user: Any, rules: QuerySet[ApprovalRule]) -> QuerySet[ApprovalRule]:
        """Narrow the standing rules to those a user may see: all with a permission to view or change rules.

        If a subclass overrides `visible`, users see the rules of their own scope.
        """
        names = ("view_approvalrule", "write_rule", "activate_rule")
        if not any(user.has_perm(f"agentruns.{name}") for name in names):
            return rules.none()
        is_all = self._is_of_scope(user, None)
        return rules if is_all else rules.filter(scope=self.scope(user))

    def _is_of_scope(self, user: Any, scope: str | None) -> bool:
        if type(self).visible is Policy.visible or getattr(user, "is_superuser", False):
            return True
        return scope is not None and self.scope(user) == scope

    def visible_tokens(self, user: Any, tokens: QuerySet[ApiToken]) -> QuerySet[ApiToken]:
        """Narrow the API tokens to those a user may see beside their own: none without permission, else all.

        Leaves out tokens of sessions whose runs the user may not see. If a subclass overrides `visible`, and
        `visible` narrows the user's runs, keeps only the tokens of active owners in the user's scope, and
        those of the scope's sessions without runs. Without a `scope` of the subclass, keeps the tokens of
        owners with a run that the user may see.
        """
        if not (self.can(user, "revoke", None) or user.has_perm("agentruns.view_apitoken")):
            return tokens.none()
        runs = Run.objects.using(tokens.db).all()
        seen, of_session = self.visible(user, runs), runs.filter(session=OuterRef("session"))
        unused = Q(~Exists(of_session), session__isnull=False)
        others = Q(session__isnull=True)
        if type(self).visible is not Policy.visible and is_narrowed(seen):
            unused &= Q(session__scope=self.scope(user))
            if type(self).scope is Policy.scope:
                unused, others = Q(pk=None), Q(owner_id__in=seen.exclude(owner_id=None).values("owner_id"))
            else:
                ids = {*tokens.exclude(owner_id=None).values_list("owner_id", flat=True).distinct()}
                people = get_user_model()._default_manager.in_bulk(ids).values()
                mine = self.scope(user)
                near = [one.pk for one in people if is_somebody(one) and ask("scope", None, one) == mine]
                others = Q(owner_id__in=near)
        return tokens.filter(unused | others | Exists(self.visible(user, of_session)))

    def decidable(self, user: Any, approvals: QuerySet[Approval]) -> QuerySet[Approval]:
        """Narrow the approvals in queues and counts, but keep every approval that `can_decide` allows.

        `approvals` are already limited by permission, `approvers` and AGENTRUNS_REQUESTER_MAY_APPROVE. By
        default keeps all of them.
        """
        return approvals

    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        """Check whether a user with the permission to decide may let this call run with `arguments`.

        By default True. Called when a person decides, with the edited arguments, and again before the call
        runs.
        """
        return True

    def without_console(self, approval: Approval, channel: str) -> bool:
        """Check whether an approval may be decided by a mail's link ("mail") or in Slack ("slack").

        By default False for a high risk, and if several people must approve. The service still checks who
        decides.
        """
        return approval.risk != Approval.Risk.HIGH and approval.required == 1

    def recipients(self, notice: Notice) -> Iterable[Any]:
        """Choose the users who are told of a notice: by default the active staff who may act on it.

        For an approval these users are among the `approvers` of the tool. Users are left out afterwards if
        they may not see the approval or run, or may not act on it.
        """
        permission, _owner_may = ACTIONS[action_of(notice)]
        if notice.approval_id is None:
            return staff(permission, "agentruns.view_run")
        columns = Approval.objects.using(settings.DATABASE).values_list("approvers", "run__owner_id")
        approvers, owner_id = columns.get(pk=notice.approval_id)
        if approvers == REQUESTER:
            return filter(is_staff, [user_of_key(owner_id)])
        return staff(permission, *filter(None, [approvers]))

    def reminders(self, tool: Tool[..., Any]) -> Reminders:
        """Choose when people are reminded of a call of the tool: by default as the tool declares."""
        return Reminders(tool.remind_after, tool.escalate_after, tool.escalate_to)

    def can_start(self, user: Any, agent: Agent) -> bool:
        """Check whether a user may start an agent through the API or the console."""
        return self.starts(user, agent.starters)

    def can_reveal(self, user: Any, shown: Approval | Run) -> bool:
        """Check whether a user may see the sensitive values of an approval or a run."""
        return bool(user.has_perm("agentruns.reveal_arguments"))

    def can(self, user: Any, action: str, obj: Any) -> bool:
        """Check whether a user may do an action of ACTIONS to `obj`, most often a run; None is any object.

        A switch stops the runs of everybody. If a subclass overrides `visible`, and `visible` narrows the
        user's runs, only a superuser may switch. Then a user changes rules, and plans absences of users, of
        the user's own scope only.
        """
        permission, owner_may = ACTIONS[action]
        if isinstance(obj, Switch) and type(self).visible is not Policy.visible:
            runs = Run.objects.using(settings.DATABASE).all()
            if not getattr(user, "is_superuser", False) and is_narrowed(self.visible(user, runs)):
                return False
        if action == "plan_absence" and obj is not None and not self._is_of_scope(user, self.scope(obj)):
            return False
        if isinstance(obj, ApprovalRule) and not self._is_of_scope(user, obj.scope):
            return False
        owns = owner_may and isinstance(obj, Run) and obj.owner_id is not None and obj.owner_id == user.pk
        return owns or bool(user.has_perm(permission))

    def scope(self, user: Any) -> str:
        """Choose the scope of the sessions that a user starts; `user` is None for the program itself."""
        return ""

    def context(self, user: Any, agent: Agent, requested: dict[str, Any]) -> dict[str, Any]:
        """Build the context of a run that a user starts through the API or the console.

        Refuses a requested context, so that nobody forges it; raises PermissionDeniedError.
        """
        if requested:
            raise PermissionDeniedError(
                _("A context is set by the program. AGENTRUNS_POLICY has to allow it to be sent.")
            )
        return {}

    def quota(self, user: Any, agent: Agent | None) -> Quota:
        """Choose the limits of a user; `agent` is None where event streams are counted."""
        return Quota()

    def visitor_quota(self, session: Session) -> Quota:
        """Choose the limits that all holders of one session's tokens share."""
        return Quota(runs=VISITORS_RUNS)

    def budget(self, run: Run) -> dict[str, Any]:
        """Choose the cost that a day allows for the "session", the "user" and the "scope" of a run.

        Called before each request to a model. A missing name, or None, is no limit.
        """
        return {}

    def has_second_factor(self, request: Any) -> bool:
        """Check whether a request's user has proved their identity, as AGENTRUNS_REAUTH_SECONDS requires."""
        return False

    def impersonator(self, request: Any) -> Any:
        """Find the person who acts in the name of the request's user; None if that is the user.

        Knows django-hijack, by the session, and django-impersonate, by the request.
        """
        history = getattr(request, "session", {}).get("hijack_history")
        if history:
            return get_user_model()._default_manager.get(pk=history[0])
        return getattr(request, "impersonator", None)

    def starts(self, user: Any, starters: str | None) -> bool:
        """Check whether a user may start an agent with these `starters`; everybody may if they are ANYONE.

        Otherwise the user needs the permission `agentruns.start_run`. If `starters` names a permission or a
        group, the user needs that permission or must be in that group, too.
        """
        if starters == ANYONE:
            return True
        if not user.has_perm("agentruns.start_run"):
            return False
        return starters is None or is_among(user, starters)


def action_of(notice: Notice) -> str:
    """Name the action, one of ACTIONS, that a notice calls for."""
    return "decide" if notice.approval_id else CALLS_FOR.get(notice.type, "monitor")


def is_staff(user: Any) -> bool:
    """Check whether a user is active and a member of the staff."""
    return user is not None and is_somebody(user) and bool(getattr(user, "is_staff", False))


def staff(*names: str) -> list[Any]:
    """List the active staff who have each of these permissions, or are in the group of this name.

    Superusers are always listed. Empty for a custom user model without Django's permissions.
    """
    users: Any = get_user_model()
    if not issubclass(users, PermissionsMixin):
        return []
    people = users._default_manager.order_by("pk")
    for name in names:
        app, _dot, codename = name.rpartition(".")
        named = Permission.objects.filter(codename=codename)
        named = named.filter(content_type__app_label=app) if app else named
        held = Q(is_superuser=True) | Q(user_permissions__in=named) | Q(groups__permissions__in=named)
        held |= Q(groups__name=name)
        people = people.filter(pk__in=users._default_manager.filter(held).values("pk"))
    return list(filter(is_staff, people))


def is_among(user: Any, named: str, groups: Collection[str] | None = None) -> bool:
    """Check if a user is a superuser, has the permission `named` (app optional), or is in a group `named`."""
    if getattr(user, "is_superuser", False) or ("." in named and user.has_perm(named)):
        return True
    held: set[str] = getattr(user, "get_all_permissions", set)()
    is_held = any(permission.endswith(f".{named}") for permission in held)
    return is_held or named in (groups_of(user) if groups is None else groups)


def groups_of(user: Any) -> set[str]:
    """List the names of a user's groups; empty for a custom user model without groups."""
    groups = getattr(user, "groups", None)
    return set() if groups is None else set(groups.values_list("name", flat=True))


def current() -> Policy:
    """Build the project's policy."""
    made: Policy = settings.policy()
    return made


def ask(question: str, refusal: Answer, *about: Any) -> Answer:
    """Call the method `question` of the policy; if it raises an error, log the error and return `refusal`.

    Raises the policy's own PermissionDeniedError, and errors of the database that a retry may clear.
    """
    try:
        answer: Answer = getattr(current(), question)(*about)
    except (PermissionDeniedError, OperationalError, InterfaceError, InternalError):
        raise
    except Exception:
        with masking.veiling(*about) as is_known:
            text = "AGENTRUNS_POLICY failed in %s(); nobody is let through"
            logger.warning(text, question, exc_info=is_known)
        return refusal
    return answer


def limits_of(user: Any, agent: Agent | None) -> Quota:
    """Find the quota of a user, or of a session's visitors; return a quota of zero if the policy fails."""
    nothing = Quota(runs=0, streams=0)
    if isinstance(user, SessionBearer):
        return ask("visitor_quota", nothing, Session.objects.using(settings.DATABASE).get(pk=user.session_id))
    return ask("quota", nothing, user, agent)


def costs_of_day(run: Run) -> dict[str, Decimal] | None:
    """Find the costs that a day allows, by "session", "user" or "scope"; None if the policy is wrong."""
    given = ask("budget", None, run)
    if not isinstance(given, dict) or not {*given} <= {"session", "user", "scope"}:
        return None
    limits = {name: value for name, value in given.items() if value is not None}
    is_right = all(map(is_amount, limits.values()))
    return {name: Decimal(str(each)) for name, each in limits.items()} if is_right else None


def is_somebody(user: Any) -> bool:
    """Check whether an actor is a user who is signed in and active; only such users reach the policy."""
    is_user = not is_program(user) and not isinstance(user, SessionBearer)
    return bool(is_user and user.is_authenticated and user.is_active)


def identify(request: Any) -> Any:
    """Get a request's user, and note on the user who acts in the user's name (`Policy.impersonator`).

    Raises PermissionDeniedError if the policy fails, because the journal would name the wrong person, and if
    the person who acts is not active any more.
    """
    user, failed = request.user, object()
    if is_somebody(user):
        person: Any = ask("impersonator", failed, request)
        if person is failed:
            raise PermissionDeniedError(_("The project's policy failed to say who acts for this user."))
        if person is not None and not is_somebody(person):
            text = _("%(name)s is not active, and may act for nobody.") % {"name": person.get_username()}
            raise PermissionDeniedError(text)
        user.agentruns_person = None if person is not None and person.pk == user.pk else person
    return user


def user_of_key(key: Any, users: QuerySet[Any] | None = None) -> Any:
    """Find the user with a primary key, in `users` or the default manager; None if there is no such user."""
    users = get_user_model()._default_manager.all() if users is None else users
    try:
        return users.filter(pk=key).first()
    except (ValueError, TypeError, OverflowError, ValidationError):  # or of another user model
        return None


def visible_runs(user: Any) -> QuerySet[Run]:
    """Select the runs that a user may see, none for the program; queries for a user start from these runs."""
    runs = Run.objects.using(settings.DATABASE)
    if isinstance(user, SessionBearer):
        return runs.filter(session_id=user.session_id)
    return ask("visible", runs.none(), user, runs.all()) if is_somebody(user) else runs.none()


def visible_approvals(user: Any) -> QuerySet[Approval]:
    """Select the approvals a user may see, none for the program; visitors see those that they may confirm."""
    approvals = Approval.objects.using(settings.DATABASE)
    if isinstance(user, SessionBearer):
        return approvals.filter(run__session_id=user.session_id, approvers=REQUESTER)
    if not is_somebody(user):
        return approvals.none()
    return ask("visible_approvals", approvals.none(), user, approvals.all())


def visible_rules(user: Any) -> QuerySet[ApprovalRule]:
    """Select the standing rules that a user may see; none for visitors and the program."""
    rules = ApprovalRule.objects.using(settings.DATABASE)
    if not is_somebody(user):
        return rules.none()
    return ask("visible_rules", rules.none(), user, rules.all())


def visible_tokens(user: Any) -> QuerySet[ApiToken]:
    """Select the API tokens that a user may see, always the user's own; none for visitors and the program."""
    tokens = ApiToken.objects.using(settings.DATABASE)
    if not is_somebody(user) or user.pk is None:
        return tokens.none()
    seen = ask("visible_tokens", tokens.none(), user, tokens.all())
    return tokens.filter(Q(owner_id=user.pk) | Q(pk__in=seen.values("pk"))) if is_narrowed(seen) else seen


def is_narrowed(rows: QuerySet[Any]) -> bool:
    """Check whether a queryset has any filter, so that its user may not see everything."""
    return bool(rows.query.where) or bool(rows.query.combinator)
