"""The kinds of journal rows, the payload of each kind, a row as read, and the upcasting of old rows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple, NotRequired, TypedDict
from uuid import UUID

from django.contrib.auth import get_user_model
from django.db.models import Model

from agentruns.models.token import SessionBearer
from agentruns.utils import json as canonical

VERSION = 1

RUN_STARTED = "run_started"
USER = "user"
ASSISTANT = "assistant"
APPROVAL_REQUESTED = "approval_requested"
APPROVAL_DECIDED = "approval_decided"
APPROVAL_EXTENDED = "approval_extended"
APPROVAL_VOIDED = "approval_voided"
TOOL_STARTED = "tool_started"
TOOL_RESULT = "tool_result"
MODEL_FAILED = "model_failed"
LATE_RESULT = "late_result"
ORPHAN_FOUND = "orphan_found"
ORPHAN_RESOLVED = "orphan_resolved"
RUN_RESUMED = "run_resumed"
RUN_PAUSE_REQUESTED = "run_pause_requested"
RUN_PAUSED = "run_paused"
RUN_CANCEL_REQUESTED = "run_cancel_requested"
RUN_ADOPTED = "run_adopted"
RUN_COMPLETED = "run_completed"
RUN_FAILED = "run_failed"
RUN_CANCELLED = "run_cancelled"
PAYLOAD_ERASED = "payload_erased"

CLOSING = {RUN_COMPLETED: "completed", RUN_FAILED: "failed", RUN_CANCELLED: "cancelled"}

COPIED = "copied"  # key in the payload of a row that a fork copied, which is skipped by the fork's fold

# Reasons of a `user` row that is no task
OUTPUT_INVALID = "output_invalid"  # no user wrote it
MESSAGE = "message"  # sent while the run was open

CLEARING = ("occurred", "not_occurred")  # verdicts that lift a doubt; newer code may know others


class Actor(TypedDict):
    """A user, or a named part of the program with id ""; None in a payload stands for the program itself."""

    id: str
    name: str


PROGRAM: Actor = {"id": "", "name": "the program"}


class Copied(TypedDict):
    """The origin of a row that a fork copied; without `hash` and `at` the fork itself added the row."""

    run: str
    seq: int
    hash: NotRequired[str]
    at: NotRequired[str]  # time of the original row
    erased: NotRequired[bool]  # its content was gone when it was copied


class Payload(TypedDict):
    """The members that a payload of any kind may have."""

    v: NotRequired[int]  # version of the form; `Batch.add` writes it
    copied: NotRequired[Copied]


class Error(TypedDict):
    """The type and text of an error, as the journal stores them."""

    type: str
    text: str


class StoredFile(TypedDict):
    """A stored file: with the full content of a row that has only a preview, or with the data of a block."""

    name: NotRequired[str]  # in the storage
    sha256: str
    size: int  # bytes
    form: str  # "text", "json", or "bytes" of a picture or document
    data: NotRequired[str]  # in base64, of a small picture or document, in place of a name


class Origin(TypedDict):
    """The run that a fork continues from, or that a repeated run repeats (then `run` is the only member)."""

    run: str
    seq: NotRequired[int]  # last row that was copied
    hash: NotRequired[str]  # of that row
    steps: NotRequired[int]  # replies of the origin up to there
    restored: NotRequired[bool]  # the origin was held for lost rows: no call of the fork counts as new


class AskedCall(TypedDict):
    """A call that a reply requests, with the gate's decision."""

    id: str
    provider_id: str
    tool: str
    arguments: dict[str, Any]  # effective ones, defaults filled in
    digest: str  # "" where they were never validated
    parallel: bool
    verdict: str  # run | ask | refuse
    # id, name, input as the model gave them, where they were mended; an input nested too deeply as its text
    original: NotRequired[dict[str, Any]]


class RunStarted(Payload):
    """The start of a run, with its agent, owner, requesters and origin."""

    agent: str
    version: str
    definition: str  # hash
    session: str  # key
    scope: str  # of the session
    owner: Actor | None  # of the session
    context: NotRequired[dict[str, Any]]  # what the caller says about the task
    actor: Actor | None
    idempotency_key: str
    requesters: NotRequired[list[str]]  # ids of all who asked for it: owner, actor, those of its origin
    task: NotRequired[str]  # the run's name in its calls' keys, if the caller gave an idempotency key
    origin: NotRequired[Origin]
    not_before: NotRequired[str]  # time before which it is not driven
    tools: NotRequired[list[str]]  # those that `tools_for` chose
    instructions: NotRequired[str]  # that the agent's function made
    stored: NotRequired[StoredFile]  # of which `instructions` is a preview


class User(Payload):
    """The task, a message sent while the run was open, or the program's request to correct an answer."""

    content: list[dict[str, Any]]  # blocks; those with a `sha256` name a file
    reason: NotRequired[str]  # output_invalid | message; absent from the task
    actor: NotRequired[Actor | None]  # of a message, as is the key below
    idempotency_key: NotRequired[str]
    stored: NotRequired[StoredFile | list[StoredFile]]  # a list holds the files of its blocks


class Assistant(Payload):
    """A complete reply of the model."""

    content: list[dict[str, Any]]  # blocks, verbatim but for mended calls
    stop_reason: str | None
    model: str
    request_id: str
    calls: list[AskedCall]
    left_out: NotRequired[list[dict[str, Any]]]  # calls beyond the limit, answered with one error
    read: NotRequired[int]  # last row that its request had read; absent from rows older than messages
    sent: str  # fingerprint of the conversation that it answers, keyed with the salt of this row's content
    usage: dict[str, Any]  # tokens by kind
    cost: NotRequired[str]  # exact digits; absent where no price is known
    fallback: NotRequired[str]  # the model that was asked, where it is not the agent's first


class ModelFailed(Payload):
    """A failed request to the model; the provider's members are absent if the model object raised."""

    error: Error
    attempt: int
    code: NotRequired[str]
    status: NotRequired[int | None]  # of HTTP
    request_id: NotRequired[str]
    retry_in: NotRequired[float]  # seconds
    usage: NotRequired[dict[str, Any]]
    cost: NotRequired[str]
    fallback: NotRequired[str]  # the model that is asked at once


class ApprovalRequested(Payload):
    """A request for people to approve or answer a call."""

    approval: str
    digest: str
    arguments: dict[str, Any]
    title: str
    risk: str
    why: str
    preview: Any  # None for a tool without `preview`
    approvers: str  # "" where anybody with the permission may decide
    required: int  # number of people
    expires_at: str | None
    only_answers: NotRequired[bool]  # a question
    origin: NotRequired[dict[str, Any]]  # the MCP server that the tool comes from, and its hints
    settles: NotRequired[list[str]]  # calls in doubt that its card shows and its approval settles


class ApprovalDecided(Payload):
    """A person's decision on an approval, or its expiry."""

    verb: str  # approve | deny | answer | expire
    digest: str  # the one decided on; of an edit the new one
    actor: Actor | None
    channel: str
    reason: NotRequired[str]  # absent from an expiry
    text: NotRequired[str]  # of an answer
    settles: NotRequired[list[str]]  # calls in doubt, of the approval that lets the call through
    arguments: NotRequired[dict[str, Any]]  # of an edit, as are the keys below
    edited: NotRequired[dict[str, Any]]  # as the person gave them
    title: NotRequired[str]
    preview: NotRequired[Any]


# A class body cannot hold the keyword "from".
_Extended = TypedDict("_Extended", {"from": str})


class ApprovalExtended(Payload, _Extended):
    """A later expiry of an approval."""

    expires_at: str
    actor: Actor | None
    reason: str
    channel: str


class ApprovalVoided(Payload):
    """The end of approvals whose givers may not give them any more; the call is pending again."""

    approval: str
    voided: list[str]  # ids of users
    why: str


class ToolStarted(Payload):
    """The start of a call, written before the tool's handler is entered."""

    key: str  # idempotency key
    digest: str
    declares: str  # nothing | safe_to_retry | reconcile | transactional
    timeout: float | None  # seconds
    approval: NotRequired[str]
    approved_by: NotRequired[list[str]]  # names


class _Returned(Payload):
    stored: NotRequired[StoredFile | list[StoredFile]]  # a list, even an empty one, for a content of blocks
    misfit: NotRequired[str]  # why the content does not fit the return annotation
    stringified: NotRequired[bool]  # the content had no JSON form
    reconciled: NotRequired[bool]  # the result comes from the outside system
    raised: NotRequired[str]  # error of the handler, although the call happened


class ResultFacts(_Returned):
    """The optional members of a call's result."""

    duration_ms: NotRequired[float]  # of the handler, where it was entered
    in_doubt: NotRequired[bool]  # an error of the handler that may have come after the effect
    edited: NotRequired[dict[str, Any]]  # arguments it ran with, where a person set them
    actor: NotRequired[Actor | None]  # the decider, if the result is not the handler's
    open_in: NotRequired[str]  # in a fork: the run that may execute the call after all


class ToolResult(ResultFacts):
    """The only result of a call."""

    content: Any
    is_error: bool
    outcome: str  # ok | error | denied | answered | expired | cancelled | unknown


class LateResult(_Returned):
    """A handler's return value, or news that it was never entered, after its worker had lost the run."""

    worker_epoch: int
    content: NotRequired[Any]
    is_error: NotRequired[bool]
    never_entered: NotRequired[bool]  # then there is no content
    lost: NotRequired[bool]  # the row of the reply that requested the call is lost


class OrphanFound(Payload):
    """A call in doubt: it was started and has no result, or its handler raised an ambiguous error."""

    action: str  # retry | reconcile | held | surfaced
    declares: str
    evidence: str
    started_at: str | None
    raised: NotRequired[str]  # error of the handler that leaves open whether something happened


class OrphanResolved(Payload):
    """A verdict about a call in doubt."""

    verdict: str  # occurred | not_occurred | unknown
    actor: Actor | None
    channel: str
    reason: NotRequired[str]
    evidence: NotRequired[str]
    result: NotRequired[Any]  # of a call whose result for the model was "unknown" already


class RunResumed(Payload):
    """A worker's take-over of a run, or a person's order to continue it."""

    reason: str
    actor: Actor | None
    epoch: int
    unpause: NotRequired[bool]


class _Asked(Payload):
    actor: Actor | None
    reason: str


class RunPauseRequested(_Asked):
    """A person's request to pause a run that a worker is driving."""


class RunPaused(Payload):
    """A run's pause, ordered by a person or because the run cannot continue by itself."""

    reason: str
    actor: NotRequired[Actor | None]
    restored: NotRequired[bool]  # rows of the run may be lost: no later call counts as new


class RunCancelRequested(_Asked):
    """A person's request to cancel a run."""


class RunAdopted(_Asked):
    """A person's order to continue a run under the current definition of its agent."""

    old: str  # hash
    new: str  # hash
    version: str
    tools: NotRequired[list[str]]  # as of `run_started`, where the run had none before
    instructions: NotRequired[str]
    stored: NotRequired[StoredFile]


class RunCompleted(Payload):
    """The end of a run with an answer."""

    output: str
    truncated: NotRequired[bool]  # the reply reached the limit of tokens


class RunFailed(Payload):
    """The end of a run with an error."""

    error: Error


class RunCancelled(_Asked):
    """The end of a run that was cancelled."""


class PayloadErased(Payload):
    """The erasure of another row's content; that row's facts and its place in the chain stay."""

    seq: int  # of that row
    actor: Actor | None
    reason: str
    file: NotRequired[str]  # that held the content, or several, separated by spaces


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
    payload: Any  # both parts, in the form of its kind above; newer code may have added keys
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
    while step := UPCASTERS.get((kind, payload.get("v", VERSION))):
        payload = step(payload)
    return payload


def leaves_doubt(payload: ToolResult) -> bool:
    """Check whether a result leaves open whether its call had an effect."""
    return payload["outcome"] == "unknown" or payload.get("in_doubt", False)


class Program(NamedTuple):
    """A part of the program that acts by itself, such as `resume_runs`, as an actor."""

    name: str


def is_program(actor: Any) -> bool:
    """Check whether an actor is the program: False for a user or visitor, TypeError for anything else."""
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


def actor_ref(actor: Any) -> Actor | None:
    """Build the journal's record of an actor, with id and name; None for the program itself."""
    if is_program(actor):
        return None if actor is None else {"id": "", "name": actor.name}
    if isinstance(actor, SessionBearer):
        return {"id": actor.actor_id, "name": actor.get_username()}
    return {"id": str(actor.pk), "name": actor.get_username()}


def timestamp(moment: datetime) -> str:
    """Format a time as the chain hashes it: in UTC, with six digits of a second."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def moment(text: str | None) -> datetime | None:
    """Parse a time that `timestamp` formatted; None for None or ""."""
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
