"""The policy: who may see, decide, start and reveal. Services, engine, admin, API and commands ask only here.

`None` is the program itself and a `Program` a part of it, such as a command: both may do everything, and no
door passes either for a person. A project changes the answers with a subclass named by AGENTRUNS_POLICY.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import InterfaceError, InternalError, OperationalError
from django.db.models import QuerySet
from django.utils.translation import gettext as _

from agentruns.agents.agent import Agent
from agentruns.conf import settings
from agentruns.exceptions import PermissionDeniedError
from agentruns.journal import masking
from agentruns.journal.events import is_program
from agentruns.models import Approval, Run, Session, SessionBearer
from agentruns.tools.options import REQUESTER
from agentruns.utils.arity import arity_mistake
from agentruns.utils.redaction import get_logger

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
    "resolve": ("agentruns.resolve_orphan", False),
    "export": ("agentruns.view_run", True),
    "review": ("agentruns.review_run", False),
    "erase": ("agentruns.erase_payload", False),
    "act_for": ("agentruns.act_for", False),
    "decide": ("agentruns.decide_approval", False),
    "revoke": ("agentruns.revoke_api_token", False),
    "monitor": ("agentruns.view_run", False),
    "switch": ("agentruns.switch", False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one user, or of one session's visitors; None is no limit."""

    runs: int | None = None  # started in an hour; a message counts as one
    streams: int | None = 4  # open at once in one server process


class Policy:
    """The rules of a project; every method may be overridden.

    A user is active and signed in, or sees nothing and may do nothing: the callers see to that before they
    ask. A method that raises lets nobody through, and the log says why.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError for a method that does not take what it will be asked with."""
        super().__init_subclass__(**kwargs)
        for name, rule in vars(Policy).items():
            if name.startswith("_"):
                continue
            parameters = list(inspect.signature(rule).parameters)
            is_bound = isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod)
            if wrong := arity_mistake(getattr(cls, name), *parameters[is_bound:]):
                raise TypeError(f"{cls.__qualname__}.{name} {wrong}.")

    def visible(self, user: Any, runs: QuerySet[Run]) -> QuerySet[Run]:
        """Narrow the runs to what a user may see: all with the permission to view runs, else their own."""
        if user.has_perm("agentruns.view_run"):
            return runs
        return runs.none() if user.pk is None else runs.filter(owner_id=user.pk)  # nobody's are not theirs

    def visible_approvals(self, user: Any, approvals: QuerySet[Approval]) -> QuerySet[Approval]:
        """Narrow the approvals to those that a user may see: all for deciders, else those of visible runs.

        A project that narrows `visible` narrows this as well, unless it overrides both.
        """
        decides = any(user.has_perm(f"agentruns.{name}") for name in ("view_approval", "decide_approval"))
        if decides and type(self).visible is Policy.visible:
            return approvals
        runs = self.visible(user, Run.objects.using(approvals.db).all())
        return approvals.filter(run__in=runs) if is_narrowed(runs) else approvals

    def decidable(self, user: Any, approvals: QuerySet[Approval]) -> QuerySet[Approval]:
        """Narrow approvals for queues and counts; never narrower than `can_decide`, which decides.

        Of what is given only those are left that permission, approvers and AGENTRUNS_REQUESTER_MAY_APPROVE
        let the user decide.
        """
        return approvals

    def can_decide(self, user: Any, approval: Approval, arguments: dict[str, Any]) -> bool:
        """Tell whether a user whom permissions and approvers let decide may let a call run with `arguments`.

        Asked when a person decides, with the arguments as edited, and again before the call runs.
        """
        return True

    def can_start(self, user: Any, agent: Agent) -> bool:
        """Tell whether a user may start an agent through the API or the console."""
        return self.starts(user, agent.starters)

    def can_reveal(self, user: Any, shown: Approval | Run) -> bool:
        """Tell whether a user may see what is sensitive of an approval, or of a run's other rows."""
        return bool(user.has_perm("agentruns.reveal_arguments"))

    def can(self, user: Any, action: str, obj: Any) -> bool:
        """Tell whether a user may do one of ACTIONS to an object: most often a run; None for any at all."""
        permission, owner_may = ACTIONS[action]
        owns = owner_may and isinstance(obj, Run) and obj.owner_id is not None and obj.owner_id == user.pk
        return owns or bool(user.has_perm(permission))

    def scope(self, user: Any) -> str:
        """Return the scope of the sessions that a user starts; user is None for the program's own."""
        return ""

    def context(self, user: Any, agent: Agent, requested: dict[str, Any]) -> dict[str, Any]:
        """Return the context of a run that a user starts through the API or the console.

        Refuses a requested one, so that nobody forges it; raises PermissionDeniedError.
        """
        if requested:
            raise PermissionDeniedError(
                _("A context is set by the program. AGENTRUNS_POLICY has to allow it to be sent.")
            )
        return {}

    def quota(self, user: Any, agent: Agent | None) -> Quota:
        """Return the limits of a user; `agent` is None where event streams are counted."""
        return Quota()

    def visitor_quota(self, session: Session) -> Quota:
        """Return the limits of all who hold tokens of one session, who are no users."""
        return Quota(runs=VISITORS_RUNS)

    def has_second_factor(self, request: Any) -> bool:
        """Tell whether a person has proved who they are for risky calls, as AGENTRUNS_REAUTH_SECONDS asks."""
        return False

    def starts(self, user: Any, starters: str | None) -> bool:
        """Tell whether a user is among an agent's `starters`."""
        if starters == ANYONE:
            return True
        if not user.has_perm("agentruns.start_run"):
            return False
        return starters is None or is_among(user, starters)


def is_among(user: Any, named: str, groups: Collection[str] | None = None) -> bool:
    """Tell whether a user has a permission, with or without its app, or is in a group of that name."""
    if getattr(user, "is_superuser", False):
        return True
    if "." in named and user.has_perm(named):
        return True
    held: set[str] = getattr(user, "get_all_permissions", set)()
    if any(permission.endswith(f".{named}") for permission in held):
        return True
    return named in (groups_of(user) if groups is None else groups)


def groups_of(user: Any) -> set[str]:
    """Return the names of a user's groups; a custom user model may have none."""
    groups = getattr(user, "groups", None)
    return set() if groups is None else set(groups.values_list("name", flat=True))


def current() -> Policy:
    """Return the project's policy."""
    made: Policy = settings.policy()
    return made


def ask(question: str, refusal: Answer, *about: Any) -> Answer:
    """Return the policy's answer; where it raises, `refusal`, so that it lets nobody through.

    Raises PermissionDeniedError, which is an answer, and errors of the database that pass.
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
    """Return the limits of a user, or of the visitors of a session; nothing at all where the rule fails."""
    nothing = Quota(runs=0, streams=0)
    if isinstance(user, SessionBearer):
        session = Session.objects.using(settings.DATABASE).get(pk=user.session_id)
        return ask("visitor_quota", nothing, session)
    return ask("quota", nothing, user, agent)


def is_somebody(user: Any) -> bool:
    """Tell whether a user is signed in and active; no policy is asked about others."""
    is_user = not is_program(user) and not isinstance(user, SessionBearer)
    return bool(is_user and user.is_authenticated and user.is_active)


def user_of_key(key: Any, users: QuerySet[Any] | None = None) -> Any:
    """Return the user of a key, of the default manager's or of `users`; None if it is nobody's."""
    users = get_user_model()._default_manager.all() if users is None else users
    try:
        return users.filter(pk=key).first()
    except (ValueError, TypeError, OverflowError, ValidationError):  # or of another user model
        return None


def visible_runs(user: Any) -> QuerySet[Run]:
    """Return the runs that a user may see: narrow these, and look nowhere else."""
    runs = Run.objects.using(settings.DATABASE)
    if isinstance(user, SessionBearer):
        return runs.filter(session_id=user.session_id)
    return ask("visible", runs.none(), user, runs.all()) if is_somebody(user) else runs.none()


def visible_approvals(user: Any) -> QuerySet[Approval]:
    """Return the approvals that a user may see."""
    approvals = Approval.objects.using(settings.DATABASE)
    if isinstance(user, SessionBearer):
        return approvals.filter(run__session_id=user.session_id, approvers=REQUESTER)
    if not is_somebody(user):
        return approvals.none()
    return ask("visible_approvals", approvals.none(), user, approvals.all())


def is_narrowed(found: QuerySet[Any]) -> bool:
    """Tell whether what a user may see is less than everything."""
    return bool(found.query.where) or bool(found.query.combinator)
