"""The journal as lines of text: one row, one line, for people; one row, one object, for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.fold import text_of
from agentruns.journal.payloads import names_in
from agentruns.management.terminal import call_text, escaped, moment, shortened
from agentruns.utils import json as canonical
from agentruns.utils.redaction import redact, redacted

Payload = dict[str, Any]


def line(row: Row) -> str:
    """Return a row as one line: number, time, kind, tool, and what it says."""
    says = _SAYS.get(row.kind, _anything)(row.payload)
    copied = "(copied)" if events.COPIED in row.payload else ""
    tool = (
        "" if says.startswith(f"{row.tool_name}(") else row.tool_name
    )  # a card without a sentence of its own
    text = " ".join(part for part in (copied, tool, says) if part)
    return escaped(f"{row.seq:>5}  {moment(row.created_at)}  {row.kind:<18}  {shortened(text, 160)}")


def as_dict(row: Row) -> dict[str, Any]:
    """Return a row under the names of Message's fields, what its texts say redacted."""
    values = row._asdict()
    texts = {"tool_name": redact(row.tool_name), "payload": redacted(row.payload)}
    return {"run": str(values.pop("run_id")), **values, **texts}


def _actor(payload: Payload) -> str:
    actor = payload.get("actor")
    return f"by {actor['name']}" if actor else "by the program"


def _started(payload: Payload) -> str:
    key = f", key {payload['idempotency_key']}" if payload.get("idempotency_key") else ""
    return f"{payload['agent']} version {payload['version']} {_actor(payload)}{key}"


def _user(payload: Payload) -> str:
    reason = payload.get("reason")
    return (f"{reason}: " if reason else "") + _size(payload) + text_of(payload["content"])


def _assistant(payload: Payload) -> str:
    calls = [call_text(call["tool"], call["arguments"]) for call in payload["calls"]]
    return "  ".join(part for part in (text_of(payload["content"]), *calls) if part)


def _requested(payload: Payload) -> str:
    return f"{payload['title']} (risk {payload['risk']}, digest {payload['digest'][:12]}): {payload['why']}"


def _decided(payload: Payload) -> str:
    said = payload.get("reason") or payload.get("text") or ""
    return f"{payload['verb']} {_actor(payload)}" + (f": {said}" if said else "")


def _tool_started(payload: Payload) -> str:
    approved = ", ".join(payload.get("approved_by", []))
    return f"key {payload['key'][:12]}" + (f", approved by {approved}" if approved else "")


def _result(payload: Payload) -> str:
    return f"{payload['outcome']}: {_content(payload)}"


def _failed(payload: Payload) -> str:
    retry = payload.get("retry_in")
    return _error(payload) + (f" (again in {retry:.0f} s)" if retry else "")


def _error(payload: Payload) -> str:
    return f"{payload['error']['type']}: {payload['error']['text']}"


def _reason(payload: Payload) -> str:
    return f"{payload.get('reason', '')} {_actor(payload)}".strip()


def _verdict(payload: Payload) -> str:
    evidence = payload.get("evidence")
    return f"{payload['verdict']} {_actor(payload)}" + (f": {evidence}" if evidence else "")


def _late(payload: Payload) -> str:
    return "never entered" if payload.get("never_entered") else _content(payload)


def _content(payload: Payload) -> str:
    return _size(payload) + _text(payload.get("content"))


def _size(payload: Payload) -> str:
    """Return how large a content is that is stored in a file, of which a row has only the beginning."""
    return f"[{payload['stored'].get('size')} bytes in a file] " if names_in(payload) else ""


def _anything(payload: Payload) -> str:
    return _text({name: value for name, value in payload.items() if name != "v"})


def _text(content: Any) -> str:
    return content if isinstance(content, str) else canonical.dumps(redacted(content))


_SAYS: dict[str, Callable[[Payload], str]] = {
    events.RUN_STARTED: _started,
    events.USER: _user,
    events.ASSISTANT: _assistant,
    events.APPROVAL_REQUESTED: _requested,
    events.APPROVAL_DECIDED: _decided,
    events.TOOL_STARTED: _tool_started,
    events.TOOL_RESULT: _result,
    events.MODEL_FAILED: _failed,
    events.LATE_RESULT: _late,
    events.ORPHAN_FOUND: lambda payload: f"{payload['action']}: {payload['evidence']}",
    events.ORPHAN_RESOLVED: _verdict,
    events.RUN_RESUMED: _reason,
    events.RUN_PAUSE_REQUESTED: _reason,
    events.RUN_PAUSED: lambda payload: payload.get("reason", ""),
    events.RUN_CANCEL_REQUESTED: _reason,
    events.RUN_ADOPTED: _reason,
    events.RUN_COMPLETED: lambda payload: payload.get("output") or "",
    events.RUN_FAILED: _error,
    events.RUN_CANCELLED: _reason,
}
