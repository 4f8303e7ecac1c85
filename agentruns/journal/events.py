"""Rows of the journal as they are read, with their hashes and actors; also the names of `models.kinds`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib.auth import get_user_model
from django.db.models import Model

from agentruns.models import kinds
from agentruns.models.kinds import *  # noqa: F403
from agentruns.models.statuses import Outcome
from agentruns.models.token import SessionBearer
from agentruns.utils import json as canonical

# (kind, v) -> payload of the next version. Old rows are upcast when read and never rewritten.
UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}


class Row(NamedTuple):
    """One row of the journal."""

    seq: int
    run_id: UUID
    kind: str
    call_id: str
    tool_name: str
    attempt: int
    epoch: int
    payload: Any  # both parts, in the form of its kind; newer code may have added keys
    created_at: datetime
    prev_hash: str
    hash: str
    consumes: UUID | None
    facts_salt: str = ""
    content_salt: str | None = None  # None: the content was erased
    content_hash: str = ""

    def shown(self) -> dict[str, Any]:
        """Build a dict of the columns without the salts, because salts would let people guess masked text."""
        return {name: value for name, value in self._asdict().items() if not name.endswith("_salt")}

    @property
    def is_erased(self) -> bool:
        """Check whether the row's content was erased, so that its payload has neutral values instead."""
        return bool(self.content_hash) and self.content_salt is None


def upcast(kind: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Convert an old payload to the current form; leave a payload of a newer version as it is."""
    while step := UPCASTERS.get((kind, payload.get("v", kinds.VERSION))):
        payload = step(payload)
    return payload


def leaves_doubt(payload: kinds.ToolResult) -> bool:
    """Check whether a result leaves open whether its call had an effect."""
    return payload["outcome"] == Outcome.UNKNOWN or payload.get("in_doubt", False)


class Program(NamedTuple):
    """An actor that is a part of the program and acts by itself, such as `resume_runs`."""

    name: str


def is_program(actor: Any) -> bool:
    """Check whether an actor is the program: True for None or a Program, False for a user or visitor.

    Raises TypeError for anything else, and for a user with an empty id.
    """
    if actor is None or isinstance(actor, Program):
        return True
    if isinstance(actor, Model):  # the key of another model's row may be that of a user
        is_user = isinstance(actor, get_user_model())
    else:
        is_user = hasattr(actor, "is_active") and hasattr(actor, "is_authenticated")
        is_user = is_user and not isinstance(actor, type)
    if not is_user:
        raise TypeError(
            f"An actor or owner must be a user object, such as request.user, or None for the program itself, "
            f"not {'a class' if isinstance(actor, type) else type(actor).__name__}."
        )
    if getattr(actor, "pk", None) == "":  # the journal's id for parts of the program
        raise TypeError(f"An actor or owner must have an id: the {type(actor).__name__} has an empty one.")
    return False


def actor_ref(actor: Any) -> kinds.Actor | None:
    """Build the record of an actor, with name and id ("" for a Program); None for the program itself."""
    if is_program(actor):
        return None if actor is None else {"id": "", "name": actor.name}
    if isinstance(actor, SessionBearer):
        return {"id": actor.actor_id, "name": actor.get_username()}
    name, person = actor.get_username(), getattr(actor, "agentruns_person", None)
    if person is None:
        return {"id": str(actor.pk), "name": name}
    return {"id": str(actor.pk), "name": f"{person.get_username()} as {name}", "by": str(person.pk)}


def people(actor: kinds.Actor | None) -> list[str]:
    """List the ids of a recorded actor: the user's, and that of the person who acts in the user's name."""
    return [] if actor is None else [each for each in (actor["id"], actor.get("by", "")) if each]


def askers(said: kinds.User) -> list[str]:
    """List the ids of those whose words a `user` row has, or who asked for the call that it is about."""
    return said["about"]["requesters"] if "about" in said else people(said.get("actor"))


def person_id(actor: Any) -> Any:
    """Find the id of the person who acts in a user's name; None if that is the user or the program."""
    return getattr(getattr(actor, "agentruns_person", None), "pk", None)


def logged(actor: Any) -> str:
    """Name an actor in a log by the user's id, and that of the person who acts in the user's name."""
    by = person_id(actor)
    return f"{getattr(actor, 'pk', actor)}" + ("" if by is None else f" acted-by={by}")


def timestamp(moment: datetime) -> str:
    """Format a time in UTC, with six digits of a second, as the hash chain requires."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def moment(text: str | None) -> datetime | None:
    """Parse a time that `timestamp` formatted; return None for None or ""."""
    return datetime.fromisoformat(text) if text else None


def row_hash(session_id: UUID, row: Row, facts_hash: str) -> str:
    """Compute a row's hash from its columns, the commitments to its parts, its session and `prev_hash`."""
    quoted, consumes = canonical.quoted, f'"{row.consumes}"' if row.consumes else "null"
    # The text is canonical JSON, with sorted keys.
    return canonical.sha256(
        f'{row.prev_hash}{{"attempt":{row.attempt},"call_id":{quoted(row.call_id)},"consumes":{consumes},'
        f'"content_hash":{quoted(row.content_hash)},"created_at":"{timestamp(row.created_at)}",'
        f'"epoch":{row.epoch},"facts_hash":"{facts_hash}","kind":{quoted(row.kind)},"run":"{row.run_id}",'
        f'"seq":{row.seq},"session":"{session_id}","tool_name":{quoted(row.tool_name)}}}'
    )
