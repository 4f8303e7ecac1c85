"""A run and its journal as text: one line a row for people, one object a row for programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    if row.kind in _SAYS:
        says = _SAYS[row.kind](row.payload)
    else:
        says = _text({name: value for name, value in row.payload.items() if name != "v"})
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


def _after(lead: str, text: str | None) -> str:
    """Build the end of a sentence: the text after its lead, "" where there is no text."""
    return f"{lead}{text}" if text else ""


def _assistant(payload: Payload) -> str:
    calls = [call_text(call["tool"], call["arguments"]) for call in payload["calls"]]
    return "  ".join(part for part in (text_of(payload["content"]), *calls) if part)


def _decided(payload: Payload) -> str:
    settles = _after(", which settles the doubt about ", ", ".join(payload.get("settles", [])))
    said = _after(": ", payload.get("reason") or payload.get("text"))
    return f"{payload['verb']} {_actor(payload)}{settles}{said}"


def _failed(payload: Payload) -> str:
    retry, other = payload.get("retry_in"), payload.get("fallback")
    then = f" (again in {retry:.0f} s)" if retry else f" ({other} is asked instead)" if other else ""
    return _error(payload) + then


def _error(payload: Payload) -> str:
    return f"{payload['error']['type']}: {payload['error']['text']}"


def _reason(payload: Payload) -> str:
    return f"{payload.get('reason', '')} {_actor(payload)}".strip()


def _content(payload: Payload) -> str:
    if has_blocks(payload) and isinstance(payload["content"], list):
        return described(payload["content"])
    return _size(payload) + _text(payload.get("content"))


def _size(payload: Payload) -> str:
    """Return the size of a content that is stored in a file, of which a row has only the beginning."""
    is_cut = payload.get("stored") and not has_blocks(payload)
    return f"[{payload['stored'].get('size')} bytes in a file] " if is_cut else ""


def _text(content: Any) -> str:
    return content if isinstance(content, str) else canonical.dumps(redacted(content))


_SAYS: dict[str, Callable[[Payload], str]] = {
    events.RUN_STARTED: lambda payload: (
        f"{payload['agent']} version {payload['version']} {_actor(payload)}"
        + _after(", key ", payload.get("idempotency_key"))
    ),
    events.USER: lambda payload: (
        (f"{payload['reason']}: " if payload.get("reason") else "")
        + _size(payload)
        + described(payload["content"])
    ),
    events.ASSISTANT: _assistant,
    events.APPROVAL_REQUESTED: lambda payload: (
        f"{payload['title']} (risk {payload['risk']}, digest {payload['digest'][:12]}): {payload['why']}"
    ),
    events.APPROVAL_DECIDED: _decided,
    events.APPROVAL_VOIDED: lambda payload: payload.get("why", ""),
    events.TOOL_STARTED: lambda payload: (
        f"key {payload['key'][:12]}" + _after(", approved by ", ", ".join(payload.get("approved_by", [])))
    ),
    events.TOOL_RESULT: lambda payload: (
        f"{payload['outcome']}{', in doubt' if payload.get('in_doubt') else ''}: {_content(payload)}"
    ),
    events.MODEL_FAILED: _failed,
    events.LATE_RESULT: lambda payload: (
        "never entered" if payload.get("never_entered") else _content(payload)
    ),
    events.ORPHAN_FOUND: lambda payload: f"{payload['action']}: {payload['evidence']}",
    events.ORPHAN_RESOLVED: lambda payload: (
        f"{payload['verdict']} {_actor(payload)}" + _after(": ", payload.get("evidence"))
    ),
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


@contextmanager
def following(alias: str, key: str, scope: str, show: Callable[[Row], None]) -> Iterator[None]:
    """Pass every row that is added to a session inside the block to `show`, each once and in order."""
    sessions, stop = Session.objects.using(alias).filter(scope=scope, key=key), threading.Event()
    seq = sessions.values_list("next_seq", flat=True).first() or 1

    def show_new() -> None:
        nonlocal seq
        session_id = sessions.values_list("pk", flat=True).first()
        for row in () if session_id is None else session_rows(alias, session_id, after=seq - 1):
            seq = row.seq + 1
            show(row)

    def follow() -> None:
        try:
            while not stop.wait(PAUSE):
                try:
                    show_new()
                except (DatabaseError, InterfaceError):  # rows missed now are shown at the end
                    logger.info("Journal not readable now", exc_info=True)
                    connections[alias].close()
                except BrokenPipeError:  # no reader any more; the run goes on anyway
                    return
        finally:
            connections[alias].close()

    thread = threading.Thread(target=follow, name="agentruns-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        show_new()
