"""Parameters, bodies and answers. Names are those of the model fields, ids are strings, times are UTC.

Text by a model, a tool or a person goes through `legal`; ids, digests, hashes, statuses and kinds do not.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from ninja import Header, Path, Query
from ninja.params import models as parameters
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema

from agentruns.agents.agent import Agent
from agentruns.journal.events import Row
from agentruns.journal.masking import Sensitive, masked
from agentruns.models import Approval, Run, Session
from agentruns.tools import Tool
from agentruns.utils import json as canonical
from agentruns.utils.bounds import MAX_DEPTH, NAME_LENGTH, is_deeper
from agentruns.utils.redaction import redacted


def utc(moment: datetime) -> str:
    """Return a time as ISO 8601 in UTC with six digits, as the journal hashes it."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def _printable(text: str) -> str:
    # As the services require: databases disagree about NUL and lone surrogates.
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


def _plain(value: Any) -> Any:
    if is_deeper(value, MAX_DEPTH - 1):  # below the body itself
        raise ValueError(f"nested too deeply: a body may have {MAX_DEPTH} levels")
    json.dumps(value, allow_nan=False)  # Python's parser lets NaN and Infinity through
    return value


def legal(value: Any) -> Any:
    """Return a value redacted, and changed to what JSON and UTF-8 can represent."""
    return canonical.legal(redacted(value))


Moment = Annotated[
    datetime,
    PlainSerializer(utc, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
AgentName = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_printable)]
Key = Annotated[str, Field(min_length=1, max_length=NAME_LENGTH), AfterValidator(_printable)]
Text = Annotated[str, AfterValidator(_not_blank), WithJsonSchema({"type": "string", "minLength": 1})]
Plain = Annotated[Any, AfterValidator(_plain)]
Arguments = Annotated[dict[str, Any], AfterValidator(_plain)]
Digest = Annotated[str, Field(max_length=64, description="the digest that was shown with the arguments")]
Seq = Annotated[int, Field(ge=0, lt=2**63)]
# Both classes are named Status, and components of an OpenAPI document are identified by name.
RunStatus = Annotated[Run.Status, WithJsonSchema({"type": "string", "enum": Run.Status.values})]
ApprovalStatus = Annotated[
    Approval.Status, WithJsonSchema({"type": "string", "enum": Approval.Status.values})
]
# In answers: a status of newer code, which shares the database during a deploy, is not an error.
ShownRunStatus = Annotated[str, WithJsonSchema({"type": "string", "enum": Run.Status.values})]
ShownApprovalStatus = Annotated[str, WithJsonSchema({"type": "string", "enum": Approval.Status.values})]

# Any text is accepted: a malformed id is a 404, like an unknown one.
_Id = Annotated[str, WithJsonSchema({"type": "string", "format": "uuid"})]

RunId = Annotated[_Id, Path(description="`id` of a run")]
ApprovalId = Annotated[_Id, Path(description="`id` of an approval")]
CallId = Annotated[str, Path(description="`call_id` of a row or an approval")]
SessionKey = Annotated[str, Path(description="the caller's own key, percent-encoded; it may hold slashes")]
RowSeq = Annotated[Seq, Path(description="`seq` of the row")]

Cursor = Annotated[str | None, Query(description="`next` of the page before; without it the first page")]
At = Annotated[Seq | None, Query(description="`seq` of the row; without it the current state")]
OfRunStatus = Annotated[RunStatus | None, Query(description="only runs of this status")]
OfApprovalStatus = Annotated[ApprovalStatus | None, Query(description="only approvals of this status")]
OfAgent = Annotated[AgentName | None, Query(description="only runs of this agent")]
OfSession = Annotated[Key | None, Query(description="only runs of the session of this key")]
LastEventId = Annotated[
    Seq | None,
    Header(
        alias="Last-Event-ID",
        description="`id` of the last event that you have; overrides `after`",
    ),
]
AFTER: Any = parameters.Query(0, description="only rows with a greater `seq`")


class Request(BaseModel):
    """A body. An unknown member is refused: a mistyped `arguments` would approve the unedited ones."""

    model_config = ConfigDict(extra="forbid")


class Keyed(Request):
    idempotency_key: Key | None = Field(
        None, description="the same key gets the same answer, and nothing is done again"
    )


class StartRun(Keyed):
    agent: AgentName
    input: Text
    session: Key | None = Field(None, description="the caller's own key; without it one is generated")
    idempotency_key: Key | None = Field(None, description="the same key is the same run, also after it ended")


class ForkRun(Keyed):
    at: Seq = Field(description="`seq` of the last row to copy")
    text: Text | None = Field(
        None, description="next message to the agent; required if nothing is left to do"
    )
    agent: AgentName | None = Field(None, description="go on with another agent")
    session: Key | None = Field(None, description="key of the new session; without it one is generated")
    idempotency_key: Key | None = Field(
        None, description="the same key is the same fork, also after it ended"
    )


class ResumeRun(Keyed):
    pass


class CancelRun(Keyed):
    reason: str = ""


class PauseRun(Keyed):
    reason: str = ""


class Resolve(Keyed):
    verdict: Literal["occurred", "not_occurred", "unknown"]
    result: Plain = Field(None, description="result of the call, if it occurred")
    evidence: str = Field("", description="how you know")


class Approve(Keyed):
    digest: Digest
    arguments: Arguments | None = Field(None, description="other arguments to run the call with")
    reason: str = ""


class Deny(Keyed):
    digest: Digest
    reason: Text = Field(description="reason for the model, so that it does not repeat the call")


class Answer(Keyed):
    digest: Digest
    text: Text = Field(description="result of the call for the model")


class Problem(BaseModel):
    """An error (RFC 9457), with more members by type, such as `run_id`, `decided_by` or `errors`."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str


class Health(BaseModel):
    """The state of the service; only `status` for callers who may not see all runs."""

    status: str
    database: str | None = Field(default=None, description="its vendor, as Django calls it")
    sweeper: Literal["ok", "never", "late"] | None = Field(
        default=None, description="whether a worker swept within ten minutes, never, or longer ago"
    )
    sweeper_seen_at: Moment | None = Field(default=None, description="when a worker last swept; null: never")
    oldest_queued_at: Moment | None = Field(
        default=None,
        description="since when the oldest queued run waits for a worker; null: none does",
    )


class RunOut(BaseModel):
    id: str
    session: str = Field(description="the session's key")
    owner: str | None
    owner_name: str
    agent: str
    version: str
    definition: str
    idempotency_key: str
    status: ShownRunStatus
    input: str
    origin: str | None = Field(description="run that this one repeats or was forked from")
    origin_seq: int | None = Field(description="`seq` of the row that it was forked at")
    step: int
    usage: dict[str, Any]
    output: str | None
    error: str
    lease_expires_at: Moment | None
    not_before: Moment | None
    attempts: int
    blocked_reason: str
    imported_at: Moment | None = Field(description="then it is a record, whose decisions were made elsewhere")
    created_at: Moment
    updated_at: Moment

    @classmethod
    def of(cls, run: Run) -> RunOut:
        """Return a run, read together with its session, as it is shown."""
        return cls(
            id=str(run.pk),
            session=legal(run.session.key),
            owner=_id(run.owner_id),
            owner_name=legal(run.owner_name),
            agent=run.agent,
            version=run.version,
            definition=run.definition_id,
            idempotency_key=legal(run.idempotency_key),
            status=run.status,
            input=legal(run.input),
            origin=_id(run.origin_id),
            origin_seq=run.origin_seq,
            step=run.step,
            usage=canonical.legal(run.usage),
            output=legal(run.output),
            error=legal(run.error),
            lease_expires_at=run.lease_expires_at,
            not_before=run.not_before,
            attempts=run.attempts,
            blocked_reason=legal(run.blocked_reason),
            imported_at=run.session.imported_at,
            created_at=run.created_at,
            updated_at=run.updated_at,
        )


class RunPage(BaseModel):
    items: list[RunOut]
    next: str | None = Field(description="`cursor` of the next page")


class SessionOut(BaseModel):
    key: str
    owner: str | None
    owner_name: str
    created_at: Moment
    runs: RunPage

    @classmethod
    def of(cls, session: Session, runs: RunPage) -> SessionOut:
        """Return a session as it is shown, with some of its runs."""
        return cls(
            key=legal(session.key),
            owner=_id(session.owner_id),
            owner_name=legal(session.owner_name),
            created_at=session.created_at,
            runs=runs,
        )


class MessageOut(BaseModel):
    session: str = Field(description="the session's key")
    run: str
    seq: int
    kind: str
    call_id: str
    tool_name: str
    attempt: int
    epoch: int
    payload: dict[str, Any] = Field(description="redacted and masked; `hash` is that of the stored payload")
    prev_hash: str
    hash: str
    created_at: Moment

    @classmethod
    def of(cls, row: Row, session: str, sensitive: Sensitive) -> MessageOut:
        """Return a journal row as it is shown: outside an approval, without sensitive arguments."""
        row = masked(row, sensitive)
        return cls(
            session=legal(session),
            run=str(row.run_id),
            seq=row.seq,
            kind=row.kind,
            call_id=row.call_id,
            tool_name=legal(row.tool_name),
            attempt=row.attempt,
            epoch=row.epoch,
            payload=legal(row.payload),
            prev_hash=row.prev_hash,
            hash=row.hash,
            created_at=row.created_at,
        )


class MessagePage(BaseModel):
    items: list[MessageOut]
    next: str | None = Field(description="`after` of the next page")


class ApprovalOut(BaseModel):
    id: str
    run: str
    call_id: str
    tool_name: str
    arguments: dict[str, Any] = Field(description="the effective arguments: what runs if it is approved")
    digest: str = Field(description="binds a decision to these arguments")
    title: str
    why: str
    risk: str
    status: ShownApprovalStatus
    approvers: str
    required: int
    approved_count: int
    requested_at: Moment
    expires_at: Moment | None
    decided_at: Moment | None
    decided_by: str | None
    decided_by_name: str
    reason: str

    @classmethod
    def of(cls, approval: Approval) -> ApprovalOut:
        """Return an approval as it is shown."""
        return cls(
            id=str(approval.pk),
            run=str(approval.run_id),
            call_id=approval.call_id,
            tool_name=legal(approval.tool_name),
            arguments=legal(approval.arguments),
            digest=approval.digest,
            title=legal(approval.title),
            why=legal(approval.why),
            risk=approval.risk,
            status=approval.status,
            approvers=approval.approvers,
            required=approval.required,
            approved_count=approval.approved_count,
            requested_at=approval.requested_at,
            expires_at=approval.expires_at,
            decided_at=approval.decided_at,
            decided_by=_id(approval.decided_by_id),
            decided_by_name=legal(approval.decided_by_name),
            reason=legal(approval.reason),
        )


class ApprovalPage(BaseModel):
    items: list[ApprovalOut]
    next: str | None = Field(description="`cursor` of the next page")


class ToolOut(BaseModel):
    name: str
    description: str
    input_schema: dict[str, Any] = Field(description="JSON Schema of the arguments")
    requires_approval: bool | Literal["predicate"] = Field(
        description="whether its calls need an approval; a predicate decides by their arguments"
    )

    @classmethod
    def of(cls, tool: Tool) -> ToolOut:
        """Return a tool as it is shown."""
        asks = tool.requires_approval
        return cls(
            name=tool.name,
            description=legal(tool.description),
            input_schema=legal(tool.input_schema),
            requires_approval=asks if isinstance(asks, bool) else "predicate",
        )


class AgentOut(BaseModel):
    name: str
    version: str
    tools: list[ToolOut]

    @classmethod
    def of(cls, agent: Agent) -> AgentOut:
        """Return an agent as it is shown: without its instructions."""
        tools = [ToolOut.of(tool) for tool in agent.tools.values()]
        return cls(name=agent.name, version=agent.version, tools=tools)


class AgentPage(BaseModel):
    items: list[AgentOut]
    next: str | None = Field(description="always null: all of them are here")


def _id(value: int | str | UUID | None) -> str | None:
    return None if value is None else str(value)
