"""Parameters, bodies and answers. Members have the names of model fields; ids are strings, times are UTC.

`legal` redacts texts by a model, a tool or a person, but no ids, digests, hashes, statuses and kinds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self
from uuid import UUID

import pydantic
from django.utils.translation import gettext as _
from ninja import Header, Path, Query
from ninja.params import models as parameters
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema

from agentruns.agents.agent import Agent, PriorityName
from agentruns.agents.prices import amount
from agentruns.conf import settings
from agentruns.content import AS_BLOCKS, AS_TEXT
from agentruns.journal import copies, events, masking
from agentruns.models import Approval, Run, Session, kinds, parts, statuses, tombstone
from agentruns.services.runs import requests, sessions, waiting
from agentruns.tools import Tool, options
from agentruns.tools.card import members_text
from agentruns.utils import json as canonical, redaction
from agentruns.utils.bounds import MAX_DEPTH, NAME_LENGTH, REASON_LENGTH, TEXT_LENGTH, is_deeper
from agentruns.utils.characters import escaped
from agentruns.utils.clock import utc


def _dated(text: Any) -> Any:
    if not (isinstance(text, str) and text[4:5] == "-"):  # pydantic would take a number for seconds
        raise ValueError("must be a date and a time, such as 2026-12-01T09:00:00+01:00")
    return text


def must(holds: Callable[[str], object], text: str) -> AfterValidator:
    """Build a validator that refuses a string with the error `text` unless `holds(string)` is true.

    `text` may contain `{length}`, the length of the string.
    """

    def check(value: str) -> str:
        if not holds(value):
            raise ValueError(text.format(length=len(value)))
        return value

    return AfterValidator(check)


def _at_most(length: int) -> AfterValidator:
    # Not pydantic's own length check, which also refuses lone surrogates.
    return must(lambda text: len(text) <= length, f"must be at most {length} characters, not {{length}}")


def as_string(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", **schema})


def _plain(value: Any) -> Any:
    if is_deeper(value, MAX_DEPTH - 1):  # below the body itself
        raise ValueError(f"nested too deeply: a body may have {MAX_DEPTH} levels")
    json.dumps(value, allow_nan=False)  # Python's parser lets NaN and Infinity through
    return value


def legal(value: Any) -> Any:
    """Redact a value, and replace the parts of it that JSON or UTF-8 cannot represent."""
    return canonical.legal(redaction.redacted(value))


# The services require this too, because databases disagree about NUL and lone surrogates.
PRINTABLE = must(str.isprintable, "must be printable")
FILLED = must(str.strip, "must not be blank")
Legal = BeforeValidator(legal)
LegalText = Annotated[str, Legal]
LegalDict = Annotated[dict[str, Any], Legal]
LegalValue = Annotated[Any, Legal]
Id = Annotated[str, BeforeValidator(str)]
Moment = Annotated[datetime, pydantic.PlainSerializer(utc, return_type=str), as_string(format="date-time")]
Time = Annotated[pydantic.AwareDatetime, BeforeValidator(_dated), AfterValidator(requests.checked_time)]
AgentName = Annotated[str, Field(min_length=1, max_length=100), PRINTABLE]
Key = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH), PRINTABLE]
Task = Annotated[str, FILLED, as_string(minLength=1)]
Text = Annotated[str, _at_most(TEXT_LENGTH), FILLED, as_string(minLength=1, maxLength=TEXT_LENGTH)]
Reason = Annotated[str, _at_most(REASON_LENGTH), as_string(maxLength=REASON_LENGTH)]
GivenReason = Annotated[str, _at_most(REASON_LENGTH), FILLED, as_string(minLength=1, maxLength=REASON_LENGTH)]
Plain = Annotated[Any, AfterValidator(_plain)]
Context = Annotated[dict[str, Any], AfterValidator(_plain), AfterValidator(sessions.checked_context)]
Name = Annotated[str, Field(max_length=NAME_LENGTH), PRINTABLE]
Scope = Name  # "" is a scope
Arguments = Annotated[dict[str, Any], AfterValidator(_plain)]
Digest = Annotated[str, Field(max_length=64, description="the digest that was shown with the arguments")]
Seq = Annotated[int, Field(ge=0, lt=2**63)]
# Plain strings in the schema, because two components with the name Status would collide.
RunStatus = Annotated[Run.Status, as_string(enum=Run.Status.values)]
ApprovalStatus = Annotated[Approval.Status, as_string(enum=Approval.Status.values)]
# For answers, which may hold a status of newer code that shares the database during a deploy.
ShownRunStatus = Annotated[str, as_string(enum=Run.Status.values)]
ShownApprovalStatus = Annotated[str, as_string(enum=Approval.Status.values)]
# An enum with one member, because client generators would take a const for the type of the whole union.
ByArguments = Annotated[Literal["predicate"], as_string(enum=["predicate"])]

# Any text is accepted, so that a malformed id is a 404, like an unknown id.
AnyId = Annotated[str, as_string(format="uuid")]

RunId = Annotated[AnyId, Path(description="`id` of a run")]
ApprovalId = Annotated[AnyId, Path(description="`id` of an approval")]
CallId = Annotated[str, Path(description="`call_id` of a row or an approval")]
SessionKey = Annotated[str, Path(description="the caller's own key, percent-encoded; it may hold slashes")]
Sha256 = Annotated[str, Path(description="`sha256` of a block")]
RowSeq = Annotated[Seq, Path(description="`seq` of the row")]

Cursor = Annotated[str | None, Query(description="`next` of the previous page; first page if omitted")]
At = Annotated[Seq | None, Query(description="`seq` of the row; current state if omitted")]
OfRunStatus = Annotated[RunStatus | None, Query(description="only runs with this status")]
OfApprovalStatus = Annotated[ApprovalStatus | None, Query(description="only approvals with this status")]
Reveal = Annotated[bool, Query(description="show the values of sensitive arguments; the access is logged")]
OfAgent = Annotated[AgentName | None, Query(description="only runs of this agent")]
OfScope = Annotated[Scope | None, Query(description="only sessions and runs in this scope")]
OfParent = Annotated[UUID | None, Query(description="only child runs of this run")]
OfSession = Annotated[Key | None, Query(description="only runs of sessions with this key")]
_Pair = Annotated[str, Field(pattern="^[^:]+:", max_length=2 * NAME_LENGTH + 1), PRINTABLE]
OfContext = Annotated[
    _Pair | None, Query(description="only runs with this name and value in their context, as `tenant:7`")
]
LastEventId = Annotated[
    Seq | None,
    Header(alias="Last-Event-ID", description="`id` of the last event that you received; overrides `after`"),
]
FOR_OTHERS = "for a reader without agentruns.view_run"
FOR_SOME = f"{FOR_OTHERS}, and except in the answer of `GET /runs/{{run_id}}`"
AFTER: Any = parameters.Query(0, description="only rows whose `seq` is greater than this")


class Request(BaseModel, extra="forbid"):
    """A body that refuses unknown members: a mistyped `arguments` would approve the unedited arguments."""


class Keyed(Request):
    idempotency_key: Key | None = Field(None, description="a request with the same key is not executed again")

    @property
    def given(self) -> dict[str, Any]:
        """The members that a service gets: all but the key."""
        return self.model_dump(exclude={"idempotency_key"})


class Behalf(Keyed):
    owner: Name | None = Field(None, description="id of the user for whom you act; requires `act_for`")
    scope: Scope | None = Field(None, description="scope of the session if not your own; requires `act_for`")
    context: Context | None = Field(
        None, description="facts about the task for its tools; the project decides who may send which"
    )


class TextBlock(Request):
    type: Literal["text"]
    text: Task


class FileBlock(Request):
    type: Literal["image", "document"]
    media_type: Annotated[str, Field(max_length=100)] = Field(
        description="of an image JPEG, PNG, GIF or WebP; of a document PDF, or text/plain in UTF-8"
    )
    data: str = Field(description="the file in base64")
    name: Annotated[str, _at_most(NAME_LENGTH)] = ""


Blocks = list[Annotated[TextBlock | FileBlock, Field(discriminator="type")]]
Input = Annotated[
    Annotated[Task, pydantic.Tag(AS_TEXT)] | Annotated[Blocks, pydantic.Tag(AS_BLOCKS)],
    pydantic.Discriminator(lambda given: AS_TEXT if isinstance(given, str) else AS_BLOCKS),
]


class StartRun(Behalf):
    agent: AgentName
    input: Input = Field(description="a text, or blocks of text, pictures and documents")
    session: Key | None = Field(None, description="the caller's own key; generated if omitted")
    idempotency_key: Key | None = Field(None, description="the same key is the same run, even after it ended")
    not_before: Time | None = Field(None, description="earliest start of the run; a time with time zone")
    priority: PriorityName | None = Field(None, description="the agent's if omitted")


class SendMessage(Keyed):
    content: Input = Field(description="the message, in the form of a run's `input`")
    agent: AgentName | None = Field(None, description="agent of a new run; that of the last run if omitted")
    scope: Scope | None = Field(None, description="the session's; needed if several scopes have its key")
    idempotency_key: Key | None = Field(None, description="the same key is the same message")


class ForkRun(Behalf):
    at: Seq = Field(description="`seq` of the last row to copy")
    text: Task | None = Field(
        None, description="next message to the agent; required if nothing is left to do"
    )
    agent: AgentName | None = Field(None, description="another agent to continue with")
    session: Key | None = Field(None, description="key of the new session; generated if omitted")
    idempotency_key: Key | None = Field(
        None, description="the same key is the same fork, even after it ended"
    )


class ResumeRun(Keyed):
    pass


class CancelRun(Keyed):
    reason: Reason = ""


class EraseRow(Keyed):
    reason: Text = Field(description="stored in the journal with the person who erased the row")


class LeaveOut(Keyed):
    block: int | None = Field(None, ge=0, description="the only place in the row's content to leave out")
    reason: Reason = ""


class PauseRun(Keyed):
    reason: Reason = ""


class Resolve(Keyed):
    verdict: Literal["occurred", "not_occurred", "unknown"]
    result: Plain = Field(None, description="result of the call, if it occurred")
    evidence: Reason = Field("", description="how you know the outcome")


class Approve(Keyed):
    digest: Digest
    arguments: Arguments | None = Field(None, description="other arguments to run the call with")
    reason: Reason = ""


class Deny(Keyed):
    digest: Digest
    reason: GivenReason = Field(description="reason for the model, so that it does not repeat the call")


class Answer(Keyed):
    digest: Digest
    text: Text = Field(description="result of the call for the model")


class Problem(BaseModel, extra="allow"):
    """An error (RFC 9457). Some types have more members, such as `run_id`, `decided_by` or `errors`."""

    type: str
    title: str
    status: int
    detail: str


class Health(BaseModel):
    """The state of the service. Callers who may not see all runs get `status` only."""

    status: str
    database: str | None = Field(default=None, description="the database's vendor, as Django names it")
    sweeper: Literal["ok", "never", "late"] | None = Field(
        default=None, description="`ok`: a worker swept in the last ten minutes; `late`: earlier; `never`"
    )
    sweeper_seen_at: Moment | None = Field(default=None, description="time of the last sweep; null if never")
    oldest_queued_at: Moment | None = Field(
        default=None, description="since when the oldest queued run waits for a worker; null if none does"
    )
    blocked_runs: int | None = Field(
        default=None, description="number of runs that the deployed code cannot continue, at most 1000"
    )


class Out(BaseModel):
    """An answer whose members are attributes of an object, or values given to `made`."""

    @classmethod
    def made(cls, source: Any, /, **given: Any) -> Self:
        """Build the answer from the attributes of `source`; `given` replaces some of the members.

        A member with the name of a relation, such as `run`, is the id of the related object.
        """
        names = cls.model_fields.keys() - given.keys()
        read = {name: f"{name}_id" if hasattr(source, f"{name}_id") else name for name in names}
        return cls(**{name: getattr(source, each) for name, each in read.items()}, **given)

    def limited(self, names: Collection[str]) -> Self:
        """Copy the answer with "", {} or None in place of the members that are not in `names`."""
        hidden: dict[str, Any] = {name: type(value) for name, value in self if name not in names}
        empty = {name: kind() if kind in (str, dict) else None for name, kind in hidden.items()}
        return self.model_copy(update=empty)


class EventWait(Out):
    """An event that a run waits for."""

    call_id: str
    tool: LegalText
    name: LegalText
    key: LegalText = Field(description=f"empty {FOR_OTHERS}")
    since: Moment
    until: Moment | None = Field(description="null if the wait has no time limit")


class RunOut(Out):
    PUBLIC: ClassVar = {
        "id", "session", "scope", "owner", "owner_name", "agent", "version", "definition", "idempotency_key",
        "status", "title", "input", "context", "origin", "origin_seq", "parent", "step", "output",
        "lease_expires_at", "not_before", "priority", "attempts", "imported_at", "created_at", "updated_at",
        "waits_for",
    }  # fmt: skip

    id: Id
    session: LegalText = Field(description="the session's key")
    scope: LegalText = Field(description="the session's scope")
    owner: Id | None
    owner_name: LegalText
    agent: str
    version: str
    definition: str
    idempotency_key: LegalText
    status: ShownRunStatus
    title: LegalText = Field(description="first line of `input`")
    input: LegalText
    context: LegalDict
    origin: Id | None = Field(description="run that this run repeats or was forked from")
    origin_seq: int | None = Field(description="`seq` of the last row copied by the fork")
    parent: Id | None = Field(description="run whose call started this child run")
    step: int
    usage: dict[str, Any] = Field(description=f"tokens by kind; {{}} {FOR_OTHERS}")
    tokens: int | None = Field(description=f"sum of all input and output tokens; null {FOR_OTHERS}")
    cost: str | None = Field(description=f"null if no price of the model is known, and {FOR_OTHERS}")
    output: LegalText | None
    error: LegalText = Field(description=f"empty {FOR_OTHERS}")
    lease_expires_at: Moment | None
    not_before: Moment | None
    priority: PriorityName
    attempts: int
    blocked_reason: LegalText = Field(description=f"empty {FOR_OTHERS}")
    waits_for: list[EventWait] = Field(description="events for which an unfinished run waits")
    untrusted: list[str] | None = Field(description=f"tools that read text of outsiders; null {FOR_SOME}")
    imported_at: Moment | None = Field(description="time of an import: a record, decided elsewhere")
    created_at: Moment
    updated_at: Moment = Field(description="exact only to the minute while a worker drives the run")

    @classmethod
    def of(cls, run: Run) -> RunOut:
        """Build the answer for a run that was read with its session."""
        return cls.all([run], {run.session_id: masking.mask_of(run)})[0]

    @classmethod
    def all(cls, runs: Iterable[Run], masks: Mapping[UUID, masking.Mask] | None = None) -> list[RunOut]:
        """Build the answers for several runs that were read with their sessions, masked by their `masks`."""
        runs = list(runs)
        masks = masks or masking.masks_of(runs, size=masking.MOST_READ)
        waits, answers = waiting.events_of(settings.DATABASE, runs, masks), []
        for run in (masks[run.session_id].run(run) for run in runs):
            key: dict[str, Any] = {} if run.shows_all else {"key": ""}
            is_erased = run.idempotency_key.startswith(tombstone.KEYED)
            answer = cls.made(
                run,
                session=run.session.key,
                idempotency_key=parts.ERASED if is_erased else run.idempotency_key,
                usage=canonical.legal(run.usage),
                cost=None if run.cost is None else amount(run.cost),
                imported_at=run.session.imported_at,
                priority=statuses.Priority.of(run.priority).value,
                untrusted=None,
                waits_for=[EventWait(**{**wait.record(), **key}) for wait in waits[run.pk]],
            )
            answers.append(answer if run.shows_all else answer.limited(cls.PUBLIC))
        return answers


class RunPage(BaseModel):
    items: list[RunOut]
    next: str | None = Field(description="`cursor` of the next page")


class _OfSession(Out):
    key: LegalText
    scope: LegalText
    title: LegalText = Field(description="first line of the session's first task, if you may see that run")
    owner: Id | None
    owner_name: LegalText


class SessionOut(_OfSession):
    created_at: Moment
    runs: RunPage

    @classmethod
    def of(cls, session: Session, mask: masking.Mask, runs: RunPage) -> SessionOut:
        """Build the answer for a session with a page of its runs; `mask` hides sensitive values."""
        return cls.made(session, title=mask.json(session.title), runs=runs)


class ListedSession(_OfSession):
    run: Id = Field(description="last run of the session that you may see")
    agent: str = Field(description="agent of that run; `status` is that run's too")
    status: ShownRunStatus
    created_at: Moment
    updated_at: Moment = Field(description="last change of that run")

    @classmethod
    def all(cls, runs: list[Run], titled: Collection[UUID]) -> list[ListedSession]:
        """Build masked answers for sessions from their last runs; only sessions in `titled` show a title."""
        for run in runs:
            run.session.title = run.session.title if run.session_id in titled else ""
        masks = masking.masks_of(runs, size=masking.MOST_READ)
        return [
            cls.made(
                run.session, title=masks[run.session_id].json(run.session.title),
                run=run.pk, agent=run.agent, status=run.status, updated_at=run.updated_at,
            )
            for run in runs
        ]  # fmt: skip


class SessionPage(BaseModel):
    items: list[ListedSession]
    next: str | None = Field(description="`cursor` of the next page")


class SaidOut(Out):
    seq: int
    run: Id
    kind: str = Field(description="kind of the row: user, assistant, run_failed or run_cancelled")
    role: Literal["user", "assistant", "program"]
    text: LegalText = Field(description="only the beginning of a text that is stored in a file")
    created_at: Moment = Field(description="for a row that a fork copied, the original's time")

    @classmethod
    def of(cls, row: events.Row, mask: masking.Mask, shows_all: bool) -> SaidOut | None:
        """Build the masked entry of a conversation for a row; None if the row has no text for people.

        Unless `shows_all`, a fixed text replaces the reason why a run failed or was cancelled.
        """
        row = mask.row(row)
        ended = {kinds.RUN_FAILED: _("The run failed."), kinds.RUN_CANCELLED: _("The run was cancelled.")}
        text = copies.said_in(row) if shows_all or row.kind not in ended else ended[row.kind]
        if not text:
            return None
        role = row.kind if row.kind in (kinds.USER, kinds.ASSISTANT) else "program"
        created_at = copies.happened_at(row.payload, row.created_at)
        return cls.made(row, role=role, text=text, created_at=created_at)


class Conversation(BaseModel):
    items: list[SaidOut]
    next: str | None = Field(description="`after` of the next page")


class MessageOut(Out):
    session: LegalText = Field(description="the session's key")
    run: Id
    seq: int
    kind: str
    call_id: str
    tool_name: LegalText
    attempt: int
    epoch: int
    payload: LegalDict = Field(description=f"redacted, masked, in parts {FOR_OTHERS}; `hash` is of it all")
    prev_hash: str
    hash: str
    created_at: Moment

    @classmethod
    def of(cls, row: events.Row, run: Run, mask: masking.Mask) -> MessageOut:
        """Build the answer for a journal row of a run, with sensitive values masked."""
        masked = mask.row(row)  # the mask learns from members that the reader may not see
        payload = masked.payload if run.shows_all else kinds.public(row.kind, masked.payload, row.tool_name)
        return cls.made(masked, session=run.session.key, payload=payload)


class MessagePage(BaseModel):
    items: list[MessageOut]
    next: str | None = Field(description="`after` of the next page")


class ShownArgument(BaseModel):
    name: str
    text: str


class Shown(BaseModel):
    """An approval as text for people, with all digits of numbers, and hidden characters as escapes."""

    tool_name: str
    title: str
    why: str
    holds: str
    arguments: list[ShownArgument]

    @classmethod
    def of(cls, approval: Approval) -> Shown:
        """Format an approval as text, because a browser would round a number beyond 2**53."""
        arguments = []
        for name, value in legal(approval.arguments).items():
            text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
            arguments.append(ShownArgument(name=escaped(name), text=escaped(text)))
        texts = {name: escaped(legal(getattr(approval, name))) for name in ("tool_name", "title", "why")}
        held = escaped(members_text(legal(approval.holds)))
        return cls(**texts, holds=held, arguments=arguments)


class ApprovalOut(Out):
    PUBLIC: ClassVar = {
        "id", "run", "call_id", "tool_name", "arguments", "shown", "digest", "title", "risk", "status",
        "required", "approved_count", "requested_at", "expires_at", "decided_at", "unread",
    }  # fmt: skip

    id: Id
    run: Id
    call_id: str
    tool_name: LegalText
    arguments: LegalDict = Field(
        description="the arguments with which an approved call runs; sensitive values are masked"
    )
    shown: Shown = Field(description="the approval as text for people")
    digest: str = Field(description="digest of `arguments` and `holds`, which a decision has to repeat")
    title: LegalText
    why: LegalText
    holds: LegalValue = Field(description="what its approval relies on: a change voids it; null if nothing")
    risk: str
    status: ShownApprovalStatus
    approvers: str
    required: int
    approved_count: int
    requested_at: Moment
    expires_at: Moment | None
    decided_at: Moment | None
    decided_by: Id | None
    decided_by_name: LegalText
    reason: LegalText
    unread: list[Moment] = Field(description="times of messages since the request; empty unless pending")

    @classmethod
    def of(cls, approval: Approval, *, reveals: bool = False) -> ApprovalOut:
        """Build the answer for an approval that was read with its run; masked unless `reveals` is True."""
        return cls.all([approval], reveals=reveals)[0]

    @classmethod
    def all(cls, approvals: Iterable[Approval], *, reveals: bool = False) -> list[ApprovalOut]:
        """Build the answers for several approvals; sensitive values are masked unless `reveals` is True."""
        approvals = [*approvals] if reveals else masking.masked_approvals(approvals)
        pending = {each.pk: each.run_id for each in approvals if each.status == Approval.Status.PENDING}
        unread = waiting.unread(settings.DATABASE, {*pending.values()})
        answers = []
        for approval in approvals:
            is_theirs = approval.shows_all or approval.approvers == options.REQUESTER
            approval.why = approval.why if is_theirs else ""
            approval.holds = approval.holds if is_theirs else None
            since = [at for _seq, at in unread.get(pending.get(approval.pk), [])]
            answer = cls.made(approval, shown=Shown.of(approval), unread=since)
            names = cls.PUBLIC | ({"why", "holds", "approvers"} if is_theirs else set())
            answers.append(answer if approval.shows_all else answer.limited(names))
        return answers


class ApprovalPage(BaseModel):
    items: list[ApprovalOut]
    next: str | None = Field(description="`cursor` of the next page")


class ToolOut(Out):
    name: str
    description: LegalText
    input_schema: LegalDict = Field(description="JSON Schema of the arguments")
    requires_approval: bool | ByArguments = Field(
        description="whether calls need an approval; `predicate` if that depends on the arguments"
    )

    @classmethod
    def of(cls, tool: Tool) -> ToolOut:
        """Build the answer for a tool."""
        asks = tool.requires_approval
        return cls.made(tool, requires_approval=asks if isinstance(asks, bool) else "predicate")


class AgentOut(Out):
    name: str
    version: str
    tools: list[ToolOut]

    @classmethod
    def of(cls, agent: Agent) -> AgentOut:
        """Build the answer for an agent, without its instructions."""
        return cls.made(agent, tools=[ToolOut.of(tool) for tool in agent.tools.values()])


class AgentPage(BaseModel):
    items: list[AgentOut]
    next: str | None = Field(description="always null, because all agents are on this page")
