"""A caller's request for a task, and the instructions, tools, rows, run and session that it leads to.

Functions of an agent may make a run's instructions and choice of tools (`rendered`) before the run starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Unpack
from uuid import UUID

from django.conf import settings as django_settings
from django.db import connections
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _

from agentruns import content
from agentruns.agents.agent import Agent, CommonOptions, get_agent
from agentruns.conf import settings
from agentruns.engine.rendering import begun, render
from agentruns.exceptions import SessionAccessDeniedError, SessionBusyError
from agentruns.journal import events, payloads
from agentruns.journal.batch import Batch, SessionState
from agentruns.journal.copies import title_of
from agentruns.journal.deciders import requester_ids
from agentruns.models import Control, Run, Session, SessionBearer
from agentruns.models.statuses import Priority
from agentruns.models.tombstone import keyed
from agentruns.providers import attachments
from agentruns.services.runs.sessions import Owner, checked_context, place
from agentruns.utils import json as canonical
from agentruns.utils.ids import uuid7


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The request for a task, by a caller of any service."""

    agent: Agent
    text: str
    session: str
    scope: str = ""
    names_session: bool = True  # else the session's name was generated, and the run may be in another session
    actor: Any = None
    owner: Owner = field(default_factory=Owner)
    context: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    not_before: datetime | None = None  # no part of the task, and neither is the priority
    priority: int | None = None  # a rank; None: the agent's
    again: Run | None = None  # the ended run that this repeats, in its session and for its owner
    session_id: UUID | None = None  # for a session that the request may create
    # Members of the `user` row if the text is stored in a file or the input is blocks.
    stored: dict[str, Any] | None = None
    run_id: UUID = field(default_factory=uuid7)  # for a run that the request may create
    rendered: dict[str, Any] = field(default_factory=dict)  # members of its first row
    # For a message: finds, in the locked session, the run that has the message already or accepts it.
    join: Callable[[Session, RunRequest], Run | None] | None = None
    about: events.About | None = None  # of a message: the deferred call whose outcome it tells

    def __post_init__(self) -> None:
        events.is_program(self.actor)  # raises for what is no actor

    @property
    def rank(self) -> int:
        """The rank of the run's priority."""
        return Priority(self.agent.priority).rank if self.priority is None else self.priority

    def is_for(self, run: Run) -> bool:
        """Check whether `run` has this agent, input and context, and repeats `again` if that is given."""
        if self.again is not None and (run.origin_id, run.origin_seq) != (self.again.pk, None):
            return False
        same = run.agent == self.agent.name and run.input == self.text
        if not same and run.agent == self.agent.name and self.stored and payloads.has_blocks(self.stored):
            # The text describes blocks, perhaps under a key that the project has given up.
            blocks, keys = self.stored["content"], django_settings.SECRET_KEY_FALLBACKS
            same = any(content.described(blocks, key) == run.input for key in keys)
        return same and canonical.dumps(run.context) == canonical.dumps(self.context)

    def require_home(self, state: SessionState) -> None:
        """Raise SessionAccessDeniedError if the session's first row has another key, scope or owner.

        The session was found by its columns, but the journal decides whose conversation it is.
        """
        owner = self.owner.ref()
        if state.home not in (None, (self.session, self.scope, owner and owner["id"])):
            text = _(
                "Session %(session)r has another key, scope or owner in its journal: a column was altered. "
                "Run manage.py verify_journal --repair, then try again."
            )
            raise SessionAccessDeniedError(text % {"session": self.session})


def request_for(
    agent: Agent | str, given: content.Input, session: Session | str, **options: Unpack[CommonOptions]
) -> RunRequest:
    """Build the request from a caller's arguments; raises as `place` and `checked_context`.

    Raises ContentError for invalid blocks, and for a file that a model of the agent would refuse.
    """
    actor, owner = options.get("actor"), options.get("owner")
    whose = actor if owner is None else owner
    name, scope = place(session, options.get("scope"), whose)
    agent, stored = get_agent(agent), None
    if isinstance(given, str):
        text = given
    else:
        stored = content.packed(content.checked(given))
        files = [block for block in stored["content"] if block["type"] != "text"]
        attachments.require_taken(files, agent.file_limits)
        text = content.described(stored["content"])
    priority = options.get("priority")
    return RunRequest(
        agent=agent,
        priority=None if priority is None else Priority(priority).rank,
        text=text,
        stored=stored,
        session=name,
        scope=scope,
        actor=actor,
        owner=Owner.of_row(session) if isinstance(actor, SessionBearer) else Owner.of(whose),
        context=checked_context(options.get("context")),
        key=options.get("idempotency_key") or "",
    )


def request_again(run: Run, agent: Agent, actor: Any, **changes: Any) -> RunRequest:
    """Build a request that repeats a run's task in its session, for its owner; `changes` replace members."""
    of_run = {"text": run.input, "session": run.session.key, "scope": run.scope, "context": run.context}
    of_run["priority"] = run.priority
    return RunRequest(agent=agent, actor=actor, owner=Owner.of_row(run), **of_run | changes)


def checked_time(moment: datetime | None) -> datetime | None:
    """Convert a start time to UTC; None stays None.

    Raises TypeError if it is no datetime. Raises ValueError if it is naive, or out of range in UTC.
    """
    if moment is None:
        return None
    if not isinstance(moment, datetime):
        raise TypeError(f"not_before must be a datetime, not {moment!r}.")
    if moment.utcoffset() is None:
        raise ValueError(f"not_before must be aware: {moment!r} does not say of which time zone it is.")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"not_before must be a time in UTC as well, not {moment!r}.") from None


def write_start(batch: Batch, request: RunRequest) -> None:
    """Add the first two rows of a run, its start and its task; raises as `require_home`."""
    request.require_home(batch.state)
    unread = chain.from_iterable(batch.state.asking.values())  # the run answers these as well
    row = first_row(request, request.again, filter(None, unread))
    if request.not_before:
        row["not_before"] = events.timestamp(request.not_before)
    if request.again:
        row["origin"] = {"run": str(request.again.pk)}
    batch.add(events.RUN_STARTED, row)
    batch.add(events.USER, user_row(request))


def first_row(request: RunRequest, origin: Run | None, asked: Iterable[str] = ()) -> events.RunStarted:
    """Build the payload of a run's `run_started` row.

    The requesters are the owner and the actor of the request, the people in `asked`, and those of `origin`.
    """
    mine = request.owner.id, getattr(request.actor, "pk", None), events.person_id(request.actor)
    facts: dict[str, Any] = {"actor": events.actor_ref(request.actor), "owner": request.owner.ref()}
    facts |= {"session": request.session, "scope": request.scope}
    facts["requesters"] = requester_ids(*mine, *asked, origin=origin)
    if request.key:  # equal if a restore loses the run and its task comes again; differs between databases
        place = [Control.objects.using(settings.DATABASE).identity(), request.scope, str(request.owner.id)]
        facts["task"] = canonical.digest([*place, request.session, request.key])
        facts["idempotency_key"], facts["key_hash"] = request.key, keyed(request.key)
    return begun(request.agent, request.rendered, request.context, request.rank, facts)


def user_row(request: RunRequest) -> events.User:
    """Build the payload of the request's `user` row."""
    stored = request.stored or {}
    given = stored.get("content", request.text)
    row = events.User(content=given if payloads.has_blocks(stored) else [{"type": "text", "text": given}])
    if "stored" in stored:
        row["stored"] = stored["stored"]
    if request.join is not None:  # a message, also if the run begins with it
        row["actor"] = events.actor_ref(request.actor)
    if request.about is not None:
        row["about"] = request.about
    return row


def taken(request: RunRequest) -> SessionBusyError:
    """Build the error for a request that lost a race against another request."""
    text = _("Session %(session)r was taken by another run; try again.")
    return SessionBusyError(text % {"session": request.session})


def derived(request: RunRequest, what: str) -> str:
    """Derive 32 bytes, in hex, for a purpose `what` from a caller's idempotency key and the SECRET_KEY."""
    session = request.session if what == "secret" else ""
    text = canonical.dumps([request.scope, str(request.owner.id), session, request.key])
    return salted_hmac(f"agentruns.{what}", text, algorithm="sha256").hexdigest()


def new_session(request: RunRequest) -> Session:
    """Build the session of a request, unsaved."""
    columns = {"scope": request.scope, "key": request.session}
    columns |= {"owner_id": request.owner.id, "owner_name": request.owner.name}
    # If a restore loses the task and the caller repeats it, its calls have the same digests and keys.
    columns |= {"secret": derived(request, "secret")} if request.key else {}
    return Session(id=request.session_id or uuid7(), title=title_of(request.text), **columns)


def rendered(request: RunRequest, *, has: Collection[str] = (), origin: Run | None = None) -> RunRequest:
    """Add the instructions and tools that the agent's functions make to a copy of the request.

    Keeps members that the request or `has` has already. `origin` is the run of a fork. Raises RenderingError
    as `render`. Stores nothing, and rolls back open transactions.
    """
    about: dict[str, Any] = {"run_id": str(request.run_id), "session_key": request.session or None}
    about |= {"scope": request.scope, "context": request.context, "text": request.text}
    about["actor"] = events.actor_ref(request.actor)
    has = {*has, *request.rendered}
    made = render(request.agent, about, request.owner.ref(), has=has, origin=origin)
    return replace(request, rendered={**request.rendered, **made})


def put_away(request: RunRequest, session_id: UUID, *, has_text: bool = True) -> RunRequest:
    """Store the files and long texts of a request in the session's folder; return the changed request.

    Inside a caller's transaction, instructions and a task without files stay in their rows. `has_text` is
    False if the request's text is no part of its rows, or stored already.
    """
    made, stored, name = request.rendered, request.stored, f"{session_id}/input"
    may_move = not connections[settings.DATABASE].in_atomic_block
    if has_text and payloads.has_blocks(stored):
        stored = payloads.put_blocks(name, stored or {})
    elif has_text and may_move and payloads.may_be_large(request.text):
        stored = payloads.put(name, request.text) or None
    if may_move and payloads.may_be_large(text := made.get("instructions", "")):
        kept = payloads.put(f"{session_id}/instructions", text)
        made = {**made, "instructions": kept["content"], "stored": kept["stored"]} if kept else made
    return replace(request, session_id=session_id, stored=stored, rendered=made)
