"""The task that a caller asks for, and the first rows of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any
from uuid import UUID

from django.conf import settings as django_settings

from agentruns.agents import content
from agentruns.agents.agent import Agent, get_agent
from agentruns.journal import events, payloads
from agentruns.journal.deciders import requester_ids
from agentruns.journal.store import Batch
from agentruns.models import Run, Session, SessionBearer
from agentruns.providers import attachments
from agentruns.services.sessions import NOBODY, Owner, checked_context, place
from agentruns.utils import json as canonical
from agentruns.utils.ids import uuid7


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The task that a caller asks for."""

    agent: Agent
    text: str
    session: str
    scope: str = ""
    names_session: bool = True  # else its name was made up for a run that may be there already
    actor: Any = None
    owner: Owner = NOBODY
    context: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    not_before: datetime | None = None  # no part of the task
    again: Run | None = None  # the ended run that this repeats, in its session and for its owner
    session_id: UUID | None = None  # of a session that this may have to make
    # What the `user` row holds in place of the text: of one that was put away, or of blocks.
    stored: dict[str, Any] | None = None
    run_id: UUID = field(default_factory=uuid7)  # of the run that this may make
    rendered: dict[str, Any] = field(default_factory=dict)  # members of its first row
    # Of a message: asked with its session locked, returns the run that has it already or takes it.
    join: Callable[[Session, RunRequest], Run | None] | None = None

    def is_for(self, run: Run) -> bool:
        """Tell whether `run` has the same agent, input and context, and repeats the same run, if any."""
        if self.again is not None and (run.origin_id, run.origin_seq) != (self.again.pk, None):
            return False
        same = run.agent == self.agent.name and (run.input == self.text or self._was(run.input))
        return same and canonical.dumps(run.context) == canonical.dumps(self.context)

    def _was(self, text: str) -> bool:
        """Tell whether a text describes the same blocks under a key that the project has given up."""
        if self.stored is None or not payloads.has_blocks(self.stored):
            return False
        blocks, keys = self.stored["content"], django_settings.SECRET_KEY_FALLBACKS
        return any(content.described(blocks, key) == text for key in keys)


def request_for(
    agent: Agent | str,
    given: content.Input,
    session: Session | str,
    *,
    actor: Any = None,
    owner: Any = None,
    scope: str | None = None,
    context: dict[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> RunRequest:
    """Return the request of what a caller gives; raises what `place`, `read_input`, `checked_context` do."""
    whose = actor if owner is None else owner
    name, scope = place(session, scope, whose)
    text, stored = read_input(given)
    return RunRequest(
        agent=get_agent(agent),
        text=text,
        stored=stored,
        session=name,
        scope=scope,
        actor=actor,
        owner=Owner.of_session(session) if isinstance(actor, SessionBearer) else Owner.of(whose),
        context=checked_context(context),
        key=idempotency_key or "",
    )


def read_input(given: content.Input) -> tuple[str, dict[str, Any] | None]:
    """Return an input as text, and the members of its row if it is blocks; raises ContentError."""
    if isinstance(given, str):
        return given, None
    made = content.packed(content.checked(given))
    attachments.require_taken([block for block in made["content"] if block["type"] != "text"])
    return content.described(made["content"]), made


def checked_time(moment: datetime | None) -> datetime | None:
    """Return the time at which a run may start, in UTC; TypeError and ValueError for what is none."""
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
    """Add the first two rows of a run."""
    begun = first_row(request)
    unread = chain.from_iterable(batch.state.asking.values())  # the run answers these as well
    asked = (request.owner.id, getattr(request.actor, "pk", None), *filter(None, unread))
    begun["requesters"] = requester_ids(*asked, origin=request.again)
    if request.not_before:
        begun["not_before"] = events.timestamp(request.not_before)
    if request.again:
        begun["origin"] = {"run": str(request.again.pk)}
    batch.add(events.RUN_STARTED, begun)
    batch.add(events.USER, user_row(request.text, request.stored or {}))


def first_row(request: RunRequest) -> events.RunStarted:
    """Return the payload of a run's first row."""
    begun: events.RunStarted = {
        "agent": request.agent.name,
        "version": request.agent.version,
        "definition": request.agent.definition_hash,
        "actor": events.actor_ref(request.actor),
        "idempotency_key": request.key,
        "session": request.session,
        "scope": request.scope,
        "owner": request.owner.ref(),
        **request.rendered,  # type: ignore[typeddict-item]
    }
    if request.context:
        begun["context"] = request.context
    return begun


def user_row(text: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the payload of the `user` row; `stored` stands for a long text, or is of blocks."""
    if payloads.has_blocks(stored):
        return stored
    return {**stored, "content": [{"type": "text", "text": stored.get("content", text)}]}
