"""The kinds of journal rows, each described once: its payload, and how the program treats such a row.

The members of a payload annotated as `Fact` are never erased; all others are content. Only the fold and
the verification, which have methods by kind, and the pages that show rows treat each kind by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import Annotated, Any, Generic, NotRequired, Self, TypedDict, TypeVar

from django.dispatch import Signal

from agentruns import signals
from agentruns.models.parts import Blocks, Fact, Form, Gone, joined
from agentruns.models.statuses import Outcome, RunStatus, Verdict
from agentruns.tools import excerpts
from agentruns.utils.json import select

VERSION = 1

COPIED = "copied"  # key in the payload of a row that a fork copied, which is skipped by the fork's fold

# Reasons of a `user` row that is no task
OUTPUT_INVALID = "output_invalid"  # no user wrote it
MESSAGE = "message"  # sent while the run was open

CLEARING = (Verdict.OCCURRED, Verdict.NOT_OCCURRED)  # verdicts that lift a doubt; newer code may know others


class Actor(TypedDict):
    """A user, a visitor, or a part of the program with id ""; None in a payload is the program itself."""

    id: str
    name: str  # "X as Y" if the person X acts in the name of Y
    by: NotRequired[str]  # the id of X


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

    v: NotRequired[Fact[int]]  # version of the form; `Batch.add` writes it
    copied: NotRequired[Fact[Copied]]


class _Asked(Payload):
    actor: Fact[Actor | None]
    reason: str


PUBLIC = ("v", "copied")


class Error(TypedDict):
    """The type and text of an error, as the journal stores them."""

    type: Fact[str]
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
    untrusted: NotRequired[list[str]]  # tools whose results, but not their starts, the fork has copied


class Parent(TypedDict):
    """The run and the call that started a child run; `root` is the first run of the family."""

    run: str
    call: str
    root: str
    depth: int  # 1 for a child of the root
    deferred: NotRequired[str]  # of a deferred call: the key of the session that it was asked for in
    untrusted: NotRequired[list[str]]  # tools by which the parent has read text that outsiders wrote


class AskedCall(TypedDict):
    """A call that a reply requests, with the gate's decision."""

    id: Fact[str]
    provider_id: Fact[str]
    tool: Fact[str]
    arguments: dict[str, Any]  # effective ones, defaults filled in
    digest: Fact[str]  # "" where they were never validated
    parallel: Fact[bool]
    child: NotRequired[Fact[bool]]  # it starts a child run
    deferred: NotRequired[Fact[str]]  # its child run is the call itself: why its gate asks, "" if it does not
    verdict: Fact[str]  # run | ask | refuse
    # id, name, input as the model gave them, where they were mended; an input nested too deeply as its text
    original: NotRequired[Gone[dict[str, Any]]]


class Deferral(TypedDict):
    """The child run that makes a deferred call, and the call's digest."""

    run: str
    digest: str


class About(TypedDict):
    """The deferred call whose outcome a message tells."""

    run: Fact[str]
    call: Fact[str]
    tool: Fact[str]
    digest: Fact[str]
    outcome: Fact[str]
    in_doubt: NotRequired[Fact[bool]]  # nobody knew whether it happened
    raised: NotRequired[Fact[bool]]  # because its handler raised: an approval of the next call settles it
    untrusted: NotRequired[Fact[list[str]]]  # as in the result of a child run
    requesters: Fact[list[str]]
    reason: str  # of a denial
    detail: str  # result and edited arguments, for the model


class RunStarted(Payload):
    """The start of a run, with its agent, owner, requesters and origin."""

    agent: Fact[str]
    version: Fact[str]
    definition: Fact[str]  # hash
    session: Fact[str]  # key
    scope: Fact[str]  # of the session
    owner: Fact[Actor | None]  # of the session
    context: NotRequired[dict[str, Any]]  # what the caller says about the task
    actor: Fact[Actor | None]
    idempotency_key: NotRequired[Gone[str]]
    key_hash: NotRequired[Fact[str]]  # recognises the idempotency key once it is erased; no view shows it
    requesters: NotRequired[Fact[list[str]]]  # ids of all who asked for it: owner, actor, those of its origin
    task: NotRequired[Fact[str]]  # the run's name in its calls' keys, if the caller gave an idempotency key
    origin: NotRequired[Fact[Origin]]
    parent: NotRequired[Fact[Parent]]
    not_before: NotRequired[Fact[str]]  # time before which it is not driven
    priority: NotRequired[Fact[str]]  # high | low; absent if normal
    limits: NotRequired[Fact[dict[str, Any]]]  # of a child run: budgets in place of its agent's, by name
    tools: NotRequired[Fact[list[str]]]  # those that `tools_for` chose
    instructions: NotRequired[str]  # that the agent's function made
    stored: NotRequired[Gone[StoredFile]]  # of which `instructions` is a preview


class User(Payload):
    """The task, a message sent while the run was open, or the program's request to correct an answer."""

    content: Blocks  # those with a `sha256` name a file
    reason: NotRequired[Fact[str]]  # output_invalid | message; absent from the task
    actor: NotRequired[Fact[Actor | None]]  # of a message
    giver: NotRequired[Fact[str]]  # of a child run's task: the agent whose model wrote it; "": the program
    about: NotRequired[About]
    idempotency_key: NotRequired[Gone[str]]  # of a message to an open run, as is the hash
    key_hash: NotRequired[Fact[str]]
    stored: NotRequired[Gone[StoredFile | list[StoredFile]]]  # a list holds the files of its blocks


class Assistant(Payload):
    """A complete reply of the model."""

    content: Blocks  # verbatim but for mended calls; an erased one has the calls
    stop_reason: Fact[str | None]
    model: Fact[str]
    request_id: Fact[str]
    calls: list[AskedCall]
    left_out: NotRequired[Gone[list[dict[str, Any]]]]  # calls beyond the limit, answered with one error
    read: NotRequired[Fact[int]]  # last row that its request had read; absent from rows older than messages
    sent: Gone[str]  # fingerprint of the conversation that it answers, keyed with the row's content salt
    usage: Fact[dict[str, Any]]  # tokens by kind
    cost: NotRequired[Fact[str]]  # exact digits; absent where no price is known
    fallback: NotRequired[Fact[str]]  # the model that was asked, where it is not the agent's first
    untrusted: NotRequired[Fact[list[str]]]  # what the provider may have run for it by itself


class ModelFailed(Payload):
    """A failed request to the model; the provider's members are absent if the model object raised."""

    error: Error
    attempt: Fact[int]
    code: NotRequired[Fact[str]]
    status: NotRequired[Fact[int | None]]  # of HTTP
    request_id: NotRequired[Fact[str]]
    retry_in: NotRequired[Fact[float]]  # seconds
    usage: NotRequired[Fact[dict[str, Any]]]
    cost: NotRequired[Fact[str]]
    fallback: NotRequired[Fact[str]]  # the model that is asked at once


class ApprovalRequested(Payload):
    """A request for people to approve or answer a call."""

    approval: Fact[str]
    digest: Fact[str]
    arguments: dict[str, Any]
    title: str
    risk: Fact[str]
    why: str
    preview: Annotated[Any, None]  # None for a tool without `preview`
    approvers: Fact[str]  # "" where anybody with the permission may decide
    required: Fact[int]  # number of people
    expires_at: Fact[str | None]
    only_answers: NotRequired[Fact[bool]]  # a question
    origin: NotRequired[Fact[dict[str, Any]]]  # the MCP server that the tool comes from, and its hints
    settles: NotRequired[Fact[list[str]]]  # calls in doubt that its card shows and its approval settles
    untrusted: NotRequired[Fact[list[str]]]  # of an outward call: tools that have read outsiders' text
    holds: NotRequired[Annotated[Any, None]]  # what the tool's `holds` returned; None if it failed
    held: NotRequired[Fact[str]]  # keyed digest of that; "" if it failed
    remind_at: NotRequired[Fact[str]]
    escalate_at: NotRequired[Fact[str]]
    escalate_to: NotRequired[Fact[str]]  # a group or permission


class ApprovalDecided(Payload):
    """A person's decision on an approval, or its expiry."""

    verb: Fact[str]  # approve | deny | answer | expire
    digest: Fact[str]  # the one decided on; of an edit the new one
    actor: Fact[Actor | None]
    channel: Fact[str]
    reason: NotRequired[str]  # absent from an expiry
    text: NotRequired[str]  # of an answer
    settles: NotRequired[Fact[list[str]]]  # calls in doubt, of the approval that lets the call through
    arguments: NotRequired[dict[str, Any]]  # of an edit, as are the keys below
    edited: NotRequired[dict[str, Any]]  # as the person gave them
    title: NotRequired[str]
    preview: NotRequired[Annotated[Any, None]]
    holds: NotRequired[Annotated[Any, None]]
    held: NotRequired[Fact[str]]


# A class body cannot hold the keyword "from".
_Extended = TypedDict("_Extended", {"from": Fact[str]})


class ApprovalExtended(_Asked, _Extended):
    """A later expiry of an approval."""

    expires_at: Fact[str]
    channel: Fact[str]


class ApprovalVoided(Payload):
    """The withdrawal of approvals: their givers may approve no more, or call, card or value fits no more.

    The call is pending again.
    """

    approval: Fact[str]
    voided: Fact[list[str]]  # ids of users
    why: str
    asks: NotRequired[str]  # why the card asks from then on: an editor is void, or the tool has changed
    expires_at: NotRequired[Fact[str]]  # where the tool has changed, as are the keys below
    risk: NotRequired[Fact[str]]
    approvers: NotRequired[Fact[str]]
    required: NotRequired[Fact[int]]
    holds: NotRequired[Annotated[Any, None]]  # where the tool's `holds` was called again
    held: NotRequired[Fact[str]]
    # Where the start that consumed the approval was rolled back: the id that the next start consumes.
    renews: NotRequired[Fact[str]]


class ApprovalReminded(Payload):
    """The reminder that an approval waits for people."""

    due: Fact[str]


class ApprovalEscalated(Payload):
    """The notice to further people that nobody has decided."""

    due: Fact[str]
    to: Fact[str]  # a group or permission


class ToolStarted(Payload):
    """The start of a call, written before the tool's handler is entered."""

    key: Fact[str]  # idempotency key
    digest: Fact[str]
    declares: Fact[str]  # nothing | safe_to_retry | reconcile | transactional
    timeout: Fact[float | None]  # seconds
    approval: NotRequired[Fact[str]]
    approved_by: NotRequired[Fact[list[str]]]  # names
    awaits: NotRequired[Fact[str]]  # the event, with this row's key, that may bring the result
    untrusted: NotRequired[Fact[bool]]  # the tool reads text that outsiders wrote; its agent distrusts it


class EventAwaited(Payload):
    """The start of a wait: the call's handler has returned, and an event will bring the result."""

    name: Fact[str]
    key: Fact[str]
    until: Fact[str | None]  # the time-out
    every: NotRequired[Fact[float]]  # seconds until the first poll, where a server works on the call
    harmless: NotRequired[Fact[bool]]  # the call only waits: when the wait ends, nothing is in doubt
    limits: NotRequired[Fact[dict[str, Any]]]  # budgets that are set aside for a child run


class EventDelivered(Payload):
    """The delivery of an event to the call that it was for; the next row has the payload."""

    name: Fact[str]
    key: Fact[str]
    actor: Fact[Actor | None]
    at: NotRequired[Fact[str]]  # time of the delivery, where it came before the wait or was stored first
    late: NotRequired[Fact[bool]]  # the call had a result already


class _Returned(Payload):
    stored: NotRequired[Gone[StoredFile | list[StoredFile]]]  # a list, even empty, for a content of blocks
    misfit: NotRequired[Gone[str]]  # why the content does not fit the return annotation
    stringified: NotRequired[Fact[bool]]  # the content had no JSON form
    reconciled: NotRequired[Fact[bool]]  # the result comes from the outside system
    raised: NotRequired[str]  # error of the handler, although the call happened


class ResultFacts(_Returned):
    """The optional members of a call's result."""

    duration_ms: NotRequired[Fact[float]]  # of the handler, where it was entered
    in_doubt: NotRequired[Fact[bool]]  # an error of the handler that may have come after the effect
    edited: NotRequired[Gone[dict[str, Any]]]  # arguments it ran with, where a person set them
    actor: NotRequired[Fact[Actor | None]]  # the decider, if the result is not the handler's
    open_in: NotRequired[Fact[str]]  # in a fork: the run that may execute the call after all
    deferred: NotRequired[Fact[Deferral]]  # the call waits elsewhere; a message will tell its outcome
    spent: NotRequired[Fact[dict[str, Any]]]  # by a child run and its own: budgets, by name
    untrusted: NotRequired[Fact[list[str]]]  # tools by which a child run has read outsiders' text


class ToolResult(ResultFacts):
    """The only result of a call."""

    content: Any
    is_error: Fact[bool]
    outcome: Fact[str]  # ok | error | denied | answered | expired | cancelled | unknown


class LateResult(_Returned):
    """A handler's return value, or the fact that it was never entered, after its worker had lost the run."""

    worker_epoch: Fact[int]
    content: NotRequired[Any]
    is_error: NotRequired[Fact[bool]]
    never_entered: NotRequired[Fact[bool]]  # then there is no content
    pending: NotRequired[Fact[str]]  # the key of the event that brings the result; there is no content yet
    lost: NotRequired[Fact[bool]]  # the row of the reply that requested the call is lost


class OrphanFound(Payload):
    """A call in doubt: it was started and has no result, or its handler raised an ambiguous error."""

    action: Fact[str]  # retry | reconcile | held | surfaced
    declares: Fact[str]
    evidence: str
    started_at: Fact[str | None]
    raised: NotRequired[str]  # error of the handler that leaves open whether something happened
    untrusted: NotRequired[Fact[bool]]  # as in the start, which is lost


class OrphanResolved(Payload):
    """A verdict about a call in doubt."""

    verdict: Fact[str]  # occurred | not_occurred | unknown
    actor: Fact[Actor | None]
    channel: Fact[str]
    reason: NotRequired[str]
    evidence: NotRequired[str]
    result: NotRequired[Any]  # of a call whose result for the model was "unknown" already


class RunResumed(_Asked):
    """A worker's take-over of a run, or a person's order to continue it."""

    epoch: Fact[int]
    unpause: NotRequired[Fact[bool]]


class RunPauseRequested(_Asked):
    """A person's request to pause a run that a worker is driving."""


class RunPaused(Payload):
    """A run's pause, ordered by a person or because the run cannot continue by itself."""

    reason: str
    actor: NotRequired[Fact[Actor | None]]
    restored: NotRequired[Fact[bool]]  # rows of the run may be lost: no later call counts as new
    refused: NotRequired[Fact[bool]]  # the provider refuses the conversation
    budget: NotRequired[Fact[str]]  # the name of the one that is used up


class RunCancelRequested(_Asked):
    """A person's request to cancel a run."""


class RunAdopted(_Asked):
    """A person's order to continue a run under the current definition of its agent."""

    old: Fact[str]  # hash
    new: Fact[str]  # hash
    version: Fact[str]
    tools: NotRequired[Fact[list[str]]]  # as of `run_started`, where the run had none before
    instructions: NotRequired[str]
    stored: NotRequired[Gone[StoredFile]]


class RunCompleted(Payload):
    """The end of a run with an answer."""

    output: str
    truncated: NotRequired[Fact[bool]]  # the reply reached the limit of tokens
    earlier: NotRequired[Fact[bool]]  # the last reply had no text: this is the text of the one before


class RunFailed(Payload):
    """The end of a run with an error."""

    error: Error


class RunCancelled(_Asked):
    """The end of a run that was cancelled."""


class PayloadErased(_Asked):
    """The erasure of another row's content; that row's facts and its place in the chain stay."""

    seq: Fact[int]  # of that row
    file: NotRequired[Fact[str]]  # that held the content, or several, separated by spaces


class LeftOut(_Asked):
    """Rows that later requests get as placeholders; with `bound`, all rows before it in a shorter form."""

    seq: NotRequired[Fact[int]]  # the first of these rows
    until: NotRequired[Fact[int]]  # the last of several
    block: NotRequired[Fact[int]]  # the only place in the row's content that is left out
    bound: NotRequired[Fact[int]]  # characters of each result; files and old reasoning are left out as well


class BudgetLow(Payload):
    """The notice that four fifths of a run's budget are used."""

    budget: Fact[str]  # its name
    used: Fact[str]
    limit: Fact[str]


class BudgetRaised(_Asked):
    """A person's order to give a run higher budgets."""

    limits: Fact[dict[str, Any]]  # by name, in the form of a definition


P = TypeVar("P", bound=Payload)
KINDS: dict[str, Kind[Any]] = {}  # by name


@dataclass(eq=False, repr=False)
class Kind(str, Generic[P]):
    """A kind of row: the name that the journal stores, the payload, and how the program treats such a row."""

    payload: type[P]
    _: KW_ONLY
    is_progress: bool = False  # earlier crashes no longer count against the run
    ends: str = ""  # the status in which such a row ends its run
    names_definitions: bool = False
    has_blocks: bool = False  # the content may be blocks, with their files
    moves_doubts: bool = False  # it begins a doubt, settles it, brings it back or clears it
    event: InitVar[str] = ""  # for notifiers, with its signal (`announced`)
    telemetry: tuple[str, ...] = ()  # the event for telemetry, with the members that it reports
    reads: InitVar[str] = ""  # the members that visitors and customers read; all others are hidden

    def __new__(cls, payload: type[P], **_traits: Any) -> Self:
        """Make the kind a str, because rows, queries, hashes and JSON hold its name: that of its payload."""
        return super().__new__(cls, re.sub(r"\B([A-Z])", r"_\1", payload.__name__).lower())

    def __getnewargs__(self) -> tuple[type[P]]:  # type: ignore[override]
        return (self.payload,)  # for a copy

    def __post_init__(self, event: str, reads: str) -> None:
        self.form, self.public = Form(self.payload), (*PUBLIC, *reads.split())
        signal = vars(signals)[event.replace(".", "_")] if event else None
        self.announced: tuple[str, Signal] | None = (event, signal) if signal else None
        if self.ends:
            self.announced, self.telemetry = (f"run.{self.ends}", signals.run_ended), ("ended",)
        KINDS[str(self)] = self

    def of(self, row: Any) -> P | None:
        """Read the payload of a row of this kind; None for a row of another kind."""
        payload: P | None = row.payload if row.kind == self else None
        return payload


_FILE = "stored.sha256 stored.size stored.form"
_REPLY = "content.type content.text content.id content.name content.input calls.id calls.tool calls.arguments"
_RESULT = f"content is_error outcome deferred.run {_FILE}"

RUN_STARTED = Kind(RunStarted, names_definitions=True, reads="agent version session not_before")
USER = Kind(User, has_blocks=True, moves_doubts=True, reads=f"content reason about.run about.outcome {_FILE}")
ASSISTANT = Kind(Assistant, is_progress=True, reads=f"{_REPLY} stop_reason")  # no thinking
MODEL_FAILED = Kind(ModelFailed)
APPROVAL_REQUESTED = Kind(ApprovalRequested, event="approval.requested", reads="approval expires_at")
APPROVAL_DECIDED = Kind(
    ApprovalDecided, moves_doubts=True, event="approval.decided", telemetry=("decision", "verb"), reads="verb"
)
APPROVAL_EXTENDED = Kind(ApprovalExtended, reads="expires_at")
APPROVAL_VOIDED = Kind(ApprovalVoided, moves_doubts=True, event="approval.requested", reads="approval")
APPROVAL_REMINDED = Kind(ApprovalReminded, event="approval.reminded")
APPROVAL_ESCALATED = Kind(ApprovalEscalated, event="approval.escalated")
TOOL_STARTED = Kind(ToolStarted)
EVENT_AWAITED = Kind(EventAwaited, is_progress=True, reads="name until")
EVENT_DELIVERED = Kind(EventDelivered, reads="name")
TOOL_RESULT = Kind(ToolResult, is_progress=True, moves_doubts=True, has_blocks=True, reads=_RESULT)
LATE_RESULT = Kind(LateResult, has_blocks=True, telemetry=("late_result",))
ORPHAN_FOUND = Kind(OrphanFound, event="run.orphaned", telemetry=("orphan", "action", "declares"))
ORPHAN_RESOLVED = Kind(OrphanResolved, moves_doubts=True, telemetry=("verdict", "verdict"))
RUN_RESUMED = Kind(RunResumed)
RUN_PAUSE_REQUESTED = Kind(RunPauseRequested)
RUN_PAUSED = Kind(RunPaused, event="run.paused")
RUN_CANCEL_REQUESTED = Kind(RunCancelRequested)
RUN_ADOPTED = Kind(RunAdopted, names_definitions=True)
RUN_COMPLETED = Kind(RunCompleted, ends=RunStatus.COMPLETED, reads="output truncated")
RUN_FAILED = Kind(RunFailed, ends=RunStatus.FAILED)
RUN_CANCELLED = Kind(RunCancelled, ends=RunStatus.CANCELLED)
PAYLOAD_ERASED = Kind(PayloadErased, reads="seq")
LEFT_OUT = Kind(LeftOut)
BUDGET_LOW = Kind(BudgetLow, event="budget.low")
BUDGET_RAISED = Kind(BudgetRaised)

CLOSING: dict[str, str] = {kind: kind.ends for kind in KINDS.values() if kind.ends}
_UNKNOWN = Form(Payload)


def form_of(kind: str) -> Form:
    """Find the form of a kind's payload.

    A kind that this code does not know, because newer code wrote it, has only `v` and `copied` as facts.
    """
    return KINDS[kind].form if kind in KINDS else _UNKNOWN


def public(kind: str, payload: Mapping[str, Any], tool: str) -> dict[str, Any]:
    """Select the members of a payload that visitors and customers may read; `tool` is the row's.

    Leaves out the content that the program or a person wrote: of a request to correct an answer, and of a
    result that is no handler's return value, such as an error, a denial or a verdict's result. Leaves out a
    page by `read_result`, too, because the page may repeat such a result.
    """
    told = kind == TOOL_RESULT and ("actor" in payload or tool == excerpts.READER)
    written = told or payload.get("is_error") or payload.get("outcome", Outcome.OK) != Outcome.OK
    hidden = ("content", "stored") if written or payload.get("reason") == OUTPUT_INVALID else ()
    paths = KINDS[kind].public if kind in KINDS else PUBLIC
    return dict(select({**payload}, [path for path in paths if not path.startswith(hidden)]))


def split(kind: str, payload: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a row's payload into its facts and its content."""
    return form_of(kind).split(payload)


def merged(kind: str, facts: dict[str, Any], content: dict[str, Any] | None) -> dict[str, Any]:
    """Join facts and content to a payload; neutral values replace erased content (None)."""
    if content is None:
        content = form_of(kind).neutral(facts)
        if kind == ASSISTANT:  # a provider requires the call of every result
            used = [
                {"type": "tool_use", "id": call["provider_id"], "name": call["tool"], "input": {}}
                for call in facts["calls"]
            ]
            content["content"] = used or content["content"]
    return joined(facts, content)
