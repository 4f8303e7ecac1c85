"""Sessions by their callers' keys: the scope of a key, finding a session, and its owner."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db.models import QuerySet
from django.utils.translation import gettext as _

from agentruns.conf import settings
from agentruns.exceptions import AmbiguousSessionError, PermissionDeniedError, SessionAccessDeniedError
from agentruns.journal import events
from agentruns.journal.policy import current
from agentruns.models import Run, Session
from agentruns.tools import finite
from agentruns.utils import json as canonical
from agentruns.utils.bounds import MAX_DEPTH, NAME_LENGTH, check_name, is_deeper, is_name

CONTEXT_LENGTH = 8 * 1024  # bytes of canonical JSON


class Owner(NamedTuple):
    """The owner of a session and its runs, as stored. The program is an owner without an id."""

    id: Any = None
    name: str = ""

    @classmethod
    def of(cls, user: Any) -> Owner:
        """Build the owner for a user; build an owner without an id for the program.

        Raises PermissionDeniedError for a visitor who is not signed in, TypeError for other objects.
        """
        if events.is_program(user):
            return cls()
        if user.pk is None:  # AnonymousUser would pass for the owner of the program's runs
            raise PermissionDeniedError(_("A run cannot belong to a visitor who is not signed in."))
        return cls(user.pk, user.get_username())

    @classmethod
    def of_user(cls, user: Any) -> Owner:
        """Build the owner for a user as `of` does; raises TypeError if `user` stands for the program."""
        if events.is_program(user):
            raise TypeError("A user object is needed here, not the program.")
        return cls.of(user)

    @classmethod
    def of_row(cls, row: Session | Run | str) -> Owner:
        """Build the owner of a session or run. Build an owner without an id if `row` is a session key."""
        return cls() if isinstance(row, str) else cls(row.owner_id, row.owner_name)

    def ref(self) -> events.Actor | None:
        """Build the journal's record of the owner; None for the program."""
        return None if self.id is None else {"id": str(self.id), "name": self.name}


def place(session: Session | str, scope: str | None, user: Any) -> tuple[str, str]:
    """Find the key and the scope of a session; a session with this key need not exist.

    For a key without `scope`, the policy selects the scope for `user` (None: the program). Raises TypeError
    or ValueError for a bad key or scope, ValueError if `scope` is not the scope of a given Session.
    """
    if isinstance(session, Session):
        if scope not in (None, session.scope):
            raise ValueError(f"Session {session.key!r} is in scope {session.scope!r}, not in {scope!r}.")
        return session.key, session.scope
    if scope is None:
        scope = current().scope(None if events.is_program(user) else user)
    for what, name in (("session", session), ("scope", scope)):
        check_name(what, name)
    return session, scope


def find_session(key: str, scope: str | None = None, among: QuerySet[Session] | None = None) -> Session:
    """Find the session with a key in `scope`, or in the only scope with that key if `scope` is None.

    `among` are the sessions that the caller may see (None: all). Raises SessionAccessDeniedError if there is
    no such session, AmbiguousSessionError if several scopes have the key.
    """
    sessions_of_key: list[Session] = []
    # Databases disagree about texts that are no names, so do not query for them.
    if all(map(is_name, (key, scope or ""))):
        sessions = Session.objects.using(settings.DATABASE) if among is None else among
        sessions = sessions.filter(key=key) if scope is None else sessions.filter(key=key, scope=scope)
        sessions_of_key = list(sessions.order_by("scope"))
    if not sessions_of_key:
        raise no_session(key)
    require_one_scope(key, [session.scope for session in sessions_of_key])
    return sessions_of_key[0]


def require_one_scope(key: str, scopes: list[str]) -> None:
    """Raise AmbiguousSessionError if several scopes have the key."""
    if len(scopes) > 1:
        named = ", ".join(map(repr, scopes))
        text = _("Session %(session)r exists in the scopes %(scopes)s. Give the scope as well.")
        raise AmbiguousSessionError(text % {"session": key, "scopes": named}, tuple(scopes))


def require_known_scope(key: str, scope: str) -> None:
    """Raise AmbiguousSessionError if only other scopes than `scope`, which no caller named, have the key."""
    scopes = sorted(Session.objects.using(settings.DATABASE).filter(key=key).values_list("scope", flat=True))
    if scopes and scope not in scopes:
        text = _("Session %(session)r exists in scope %(scopes)s, not in %(scope)r: name it with scope=.")
        facts = {"session": key, "scopes": ", ".join(map(repr, scopes)), "scope": scope}
        raise AmbiguousSessionError(text % facts, tuple(scopes))


def require_writable(session: Session, owner: Owner, actor: Any, *, begins: bool = False) -> None:
    """Raise SessionAccessDeniedError unless the session belongs to `owner`.

    A user gets the same error as for a missing session, with `begins` as in `no_session`. The error for the
    program names the owners: its run would otherwise belong to the user who was first to use the key.
    """
    if session.owner_id == owner.id:
        return
    if not events.is_program(actor):
        raise no_session(session.key, begins)
    facts = {"session": session.key, "scope": session.scope, "owner": session.owner_name, "name": owner.name}
    if session.owner_id is None:
        text = _("Session %(session)r is the program's own, not %(name)s's. Use another key or scope.")
    elif owner.id is None:
        text = _(
            "Session %(session)r of scope %(scope)r belongs to %(owner)s. Pass owner= that user to write "
            "into it for them, or give the program's own sessions a scope."
        )
    else:
        text = _("Session %(session)r of scope %(scope)r belongs to %(owner)s, not to %(name)s.")
    raise SessionAccessDeniedError(text % facts)


def no_session(key: str, begins: bool = False) -> SessionAccessDeniedError:
    """Build the error for a missing or hidden session; `begins` if an agent would begin it."""
    begin = _(" To begin it with this message, name the agent that serves it: agent=.") * begins
    return SessionAccessDeniedError(f"There is no session {key[:NAME_LENGTH]!r}.{begin}")


def checked_context(context: dict[str, Any] | None) -> dict[str, Any]:
    """Check and copy a run's context; TypeError if no dict of finite JSON values, ValueError if too large."""
    if context is None:
        return {}
    if not isinstance(context, dict):
        raise TypeError(f"The context must be a dict of JSON values, not {type(context).__name__}.")
    if is_deeper(context, MAX_DEPTH):
        raise ValueError(f"The context is nested too deeply; it may have {MAX_DEPTH} levels.")
    try:
        text = canonical.dumps(context)
    except (TypeError, ValueError) as error:
        raise TypeError(f"The context must be a dict of JSON values: {error}") from error
    if infinite := next(finite.places(context), None):  # a gate may compare with it
        raise TypeError(f"The context must be a dict of JSON values: {'.'.join(infinite[0])} is not finite.")
    if (size := len(text.encode())) > CONTEXT_LENGTH:
        raise ValueError(f"The context is {size} bytes of JSON; it may have {CONTEXT_LENGTH}.")
    return dict(canonical.loads(text))
