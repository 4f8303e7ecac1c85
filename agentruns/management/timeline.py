"""A run and its journal as text: one line a row for people, one object a row for programs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

from django.db import DatabaseError, InterfaceError, connections

from agentruns.agents.content import described
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.fold import text_of
from agentruns.journal.payloads import has_blocks
from agentruns.journal.read import session_rows
from agentruns.management.terminal import call_text, escaped, moment, shortened
from agentruns.models import Run, Session
from agentruns.utils import json as canonical
from agentruns.utils.redaction import get_logger, redact, redacted

logger = get_logger("agentruns.management")

PAUSE = 0.1  # seconds between two looks for new rows
FIELDS = (
    "agent", "version", "status", "input", "step", "usage", "output", "error", "lease_expires_at",
    "not_before", "attempts", "blocked_reason", "created_at", "updated_at",
)  # fmt: skip
TEXTS = ("input", "output", "error", "blocked_reason")

Payload = dict[str, Any]


def line(row: Row) -> str:
    """Return a row as one line: number, time, kind, tool, and a summary of its payload."""
    says = _SAYS.get(row.kind, _anything)(row.payload)
    copied = "(copied)" if events.COPIED in row.payload else ""
    is_call = says.startswith(f"{row.tool_name}(")  # a card without a sentence of its own
    tool = "" if is_call else row.tool_name
    text = " ".join(part for part in (copied, tool, says) if part)
    return escaped(f"{row.seq:>5}  {moment(row.created_at)}  {row.kind:<18}  {shortened(text, 160)}")


def as_dict(row: Row) -> dict[str, Any]:
    """Return a row under the names of Message's fields, with redacted texts."""
    values = row.shown()
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
    return (f"{reason}: " if reason else "") + _size(payload) + described(payload["content"])


def _assistant(payload: Payload) -> str:
    calls = [call_text(call["tool"], call["arguments"]) for call in payload["calls"]]
    return "  ".join(part for part in (text_of(payload["content"]), *calls) if part)


def _requested(payload: Payload) -> str:
    return f"{payload['title']} (risk {payload['risk']}, digest {payload['digest'][:12]}): {payload['why']}"


def _decided(payload: Payload) -> str:
    said = payload.get("reason") or payload.get("text") or ""
    settled = ", ".join(payload.get("settles", []))
    settles = f", which settles the doubt about {settled}" if settled else ""
    return f"{payload['verb']} {_actor(payload)}{settles}" + (f": {said}" if said else "")


def _tool_started(payload: Payload) -> str:
    approved = ", ".join(payload.get("approved_by", []))
    return f"key {payload['key'][:12]}" + (f", approved by {approved}" if approved else "")


def _result(payload: Payload) -> str:
    doubt = ", in doubt" if payload.get("in_doubt") else ""
    return f"{payload['outcome']}{doubt}: {_content(payload)}"


def _failed(payload: Payload) -> str:
    retry, other = payload.get("retry_in"), payload.get("fallback")
    then = f" (again in {retry:.0f} s)" if retry else f" ({other} is asked instead)" if other else ""
    return _error(payload) + then


def _error(payload: Payload) -> str:
    return f"{payload['error']['type']}: {payload['error']['text']}"


def _reason(payload: Payload) -> str:
    return f"{payload.get('reason', '')} {_actor(payload)}".strip()


def _verdict(payload: Payload) -> str:
    evidence = payload.get("evidence")
    return f"{payload['verdict']} {_actor(payload)}" + (f": {evidence}" if evidence else "")


def _content(payload: Payload) -> str:
    if has_blocks(payload) and isinstance(payload["content"], list):
        return described(payload["content"])
    return _size(payload) + _text(payload.get("content"))


def _size(payload: Payload) -> str:
    """Return the size of a content that is stored in a file, of which a row has only the beginning."""
    is_cut = payload.get("stored") and not has_blocks(payload)
    return f"[{payload['stored'].get('size')} bytes in a file] " if is_cut else ""


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
    events.APPROVAL_VOIDED: lambda payload: payload.get("why", ""),
    events.TOOL_STARTED: _tool_started,
    events.TOOL_RESULT: _result,
    events.MODEL_FAILED: _failed,
    events.LATE_RESULT: lambda payload: (
        "never entered" if payload.get("never_entered") else _content(payload)
    ),
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
    events.PAYLOAD_ERASED: lambda payload: f"row {payload['seq']}: {_reason(payload)}",
}


def run_record(run: Run) -> dict[str, Any]:
    """Return a run as JSON, its texts redacted; `owner` is a name."""
    return {
        "id": str(run.pk),
        "session": redact(run.session.key),
        "owner": redact(run.owner_name) or None,
        "definition": run.definition_id,
        "origin": str(run.origin_id) if run.origin_id else None,
        "origin_seq": run.origin_seq,
        "imported_at": run.session.imported_at,
        **{name: getattr(run, name) for name in FIELDS},
        **{name: redacted(getattr(run, name)) for name in TEXTS},
    }


class Follower:
    """Passes every row that is added to a session inside the block to `show`, each once and in order."""

    def __init__(self, alias: str, key: str, scope: str, show: Callable[[Row], None]) -> None:
        self.alias = alias
        self.sessions = Session.objects.using(alias).filter(scope=scope, key=key)
        self.show = show
        self.seq = self.sessions.values_list("next_seq", flat=True).first() or 1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="agentruns-follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show_new()

    def _follow(self) -> None:
        try:
            while not self._stop.wait(PAUSE):
                try:
                    self._show_new()
                except (DatabaseError, InterfaceError):  # rows missed now are shown at the end
                    logger.info("Journal not readable now", exc_info=True)
                    connections[self.alias].close()
                except BrokenPipeError:  # no reader any more; the run goes on anyway
                    return
        finally:
            connections[self.alias].close()

    def _show_new(self) -> None:
        session_id = self.sessions.values_list("pk", flat=True).first()
        if session_id is None:
            return
        for row in session_rows(self.alias, session_id, after=self.seq - 1):
            self.seq = row.seq + 1
            self.show(row)
