"""What stands in paths, queries and headers, with what OpenAPI is told of it."""

from __future__ import annotations

from typing import Annotated, Any

from ninja import Header, Path, Query
from ninja.params import models
from pydantic import WithJsonSchema

from agentruns.api.schemas import AgentName, ApprovalStatus, Key, RunStatus, Seq

# Any text is taken: what is no id is the 404 of one that is not there.
_Id = Annotated[str, WithJsonSchema({"type": "string", "format": "uuid"})]

RunId = Annotated[_Id, Path(description="`id` of a run")]
ApprovalId = Annotated[_Id, Path(description="`id` of an approval")]
CallId = Annotated[str, Path(description="`call_id` of a row or an approval")]
SessionKey = Annotated[str, Path(description="the caller's own key, percent-encoded; it may hold slashes")]
RowSeq = Annotated[Seq, Path(description="`seq` of the row")]

Cursor = Annotated[str | None, Query(description="`next` of the page before; without it the first page")]
At = Annotated[Seq | None, Query(description="`seq` of the row; without it what the run is now")]
OfRunStatus = Annotated[RunStatus | None, Query(description="only runs of this status")]
OfApprovalStatus = Annotated[ApprovalStatus | None, Query(description="only approvals of this status")]
OfAgent = Annotated[AgentName | None, Query(description="only runs of this agent")]
OfSession = Annotated[Key | None, Query(description="only runs of the session of this key")]
LastEventId = Annotated[
    Seq | None,
    Header(
        alias="Last-Event-ID", description="`id` of the last event that you have; it counts more than `after`"
    ),
]
AFTER: Any = models.Query(0, description="only rows with a greater `seq`")
