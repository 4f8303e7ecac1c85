"""Runs and journal rows for the terminal: a row becomes a line for people, or a dict for programs.

Other lines explain why runs wait, and name the next step: a page of the admin, or a command.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

from django.conf import settings as django_settings
from django.db import DatabaseError, InterfaceError, connections
from django.urls import NoReverseMatch, reverse

from agentruns.content import described
from agentruns.journal import events, fold, masking, payloads, read
from agentruns.management.base import call_text, escaped, moment, shortened
from agentruns.models import Approval, Run, Session
from agentruns.models.event import CHILD
from agentruns.models.statuses import Priority
from agentruns.services.runs import waiting
from agentruns.tools.card import members_text
from agentruns.utils import carry, json as canonical
from agentruns.utils.redaction import get_logger, redact, redacted

logger = get_logger("agentruns.management")

PAUSE = 0.1  # seconds between two queries for new rows
MOST = 10  # waiting runs that are listed
FIELDS = (
    "agent", "version", "status", "input", "step", "usage", "output", "error", "lease_expires_at",
    "not_before", "attempts", "blocked_reason", "created_at", "updated_at",
)  # fmt: skip
TEXTS = ("input", "output", "error", "blocked_reason")

Payload = dict[str, Any]


def line(row: events.Row) -> str:
    """Format a row as one line: `seq`, time, kind, tool, and a summary of the payload.

    Tool and summary are redacted, and cut at 160 characters.
    """
    if row.kind in _SAYS:
        says = _SAYS[row.kind](row.payload)
    else:
        says = _text({name: value for name, value in row.payload.items() if name != "v"})
    copied = "(copied)" if events.COPIED in row.payload else ""
    is_call = says.startswith(f"{row.tool_name}(")  # the tool has no title of its own
    tool = "" if is_call else row.tool_name
    text = " ".join(part for part in (copied, tool, says) if part)
    return escaped(f"{row.seq:>5}  {moment(row.created_at)}  {row.kind:<18}  {shortened(text, 160)}")


def as_dict(row: events.Row) -> dict[str, Any]:
    """Convert a row to a dict of Message's fields, without salts, and with tool name and payload redacted."""
    values = row.shown()
    texts = {"tool_name": redact(row.tool_name), "payload": redacted(row.payload)}
    return {"run": str(values.pop("run_id")), **values, **texts}


def _actor(payload: Payload) -> str:
    actor = payload.get("actor")
    return f"by {actor['name']}" if actor else "by the program"


def _after(lead: str, text: str | None) -> str:
    """Put `lead` before a text; "" if the text is empty."""
    return f"{lead}{text}" if text else ""


def _assistant(payload: Payload) -> str:
    calls = [call_text(call["tool"], call["arguments"]) for call in payload["calls"]]
    return "  ".join(part for part in (fold.text_of(payload["content"]), *calls) if part)


def _failed(payload: Payload) -> str:
    retry, other = payload.get("retry_in"), payload.get("fallback")
    then = f" (again in {retry:.0f} s)" if retry else f" ({other} is asked instead)" if other else ""
    return _error(payload) + then


def _error(payload: Payload) -> str:
    return f"{payload['error']['type']}: {payload['error']['text']}"


def _reason(payload: Payload) -> str:
    return f"{payload.get('reason', '')} {_actor(payload)}".strip()


def _of_row(payload: Payload) -> str:
    return (f"row {payload['seq']}: " if "seq" in payload else "") + _reason(payload)


def _content(payload: Payload) -> str:
    if payloads.has_blocks(payload) and isinstance(payload["content"], list):
        return described(payload["content"])
    return _size(payload) + _text(payload.get("content"))


def _size(payload: Payload) -> str:
    """Format the size of a text whose row holds only the beginning; "" for other contents."""
    is_cut = payload.get("stored") and not payloads.has_blocks(payload)
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
        + (f"agent {payload['giver']} says: " if payload.get("giver") else "")
        + _size(payload)
        + described(payload["content"])
    ),
    events.ASSISTANT: _assistant,
    events.APPROVAL_REQUESTED: lambda payload: (
        f"{payload['title']} (risk {payload['risk']}, digest {payload['digest'][:12]}): {payload['why']}"
        + (f" Holds: {members_text(payload['holds'])}" if payload.get("holds") is not None else "")
    ),
    events.APPROVAL_DECIDED: lambda payload: (
        f"{payload['verb']} {_actor(payload)}"
        + _after(", which settles the doubt about ", ", ".join(payload.get("settles", [])))
        + _after(": ", payload.get("reason") or payload.get("text"))
    ),
    events.APPROVAL_ESCALATED: lambda payload: f"to {payload['to']}",
    events.APPROVAL_VOIDED: lambda payload: payload.get("why", ""),
    events.TOOL_STARTED: lambda payload: (
        f"key {payload['key'][:12]}" + _after(", approved by ", ", ".join(payload.get("approved_by", [])))
    ),
    events.EVENT_AWAITED: lambda payload: (
        f"{payload['name']} {payload['key']}" + _after(" until ", payload["until"])
    ),
    events.EVENT_DELIVERED: lambda payload: (
        f"{payload['name']} {payload['key']} {_actor(payload)}{', late' if payload.get('late') else ''}"
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
    events.LEFT_OUT: _of_row,
    events.BUDGET_LOW: lambda payload: f"{payload['budget']}: {payload['used']} of {payload['limit']}",
    events.BUDGET_RAISED: lambda payload: (
        ", ".join(f"{name} {value}" for name, value in payload["limits"].items()) + f" {_reason(payload)}"
    ),
    events.PAYLOAD_ERASED: _of_row,
}


def run_record(run: Run, waits: Iterable[waiting.Wait] = ()) -> dict[str, Any]:
    """Convert a run and those of its `waits` that are for events to a dict with redacted texts.

    `owner` is the user's name, or None.
    """
    return {
        "id": str(run.pk),
        "session": redact(run.session.key),
        "owner": redact(run.owner_name) or None,
        "definition": run.definition_id,
        "origin": str(run.origin_id) if run.origin_id else None,
        "origin_seq": run.origin_seq,
        "imported_at": run.session.imported_at,
        "priority": Priority.of(run.priority).value,
        "parent": str(run.parent_id) if run.parent_id else None,
        "waits_for": [redacted(wait.record()) for wait in waits if wait.kind == waiting.EVENT],
        **{name: getattr(run, name) for name in FIELDS},
        **{name: redacted(getattr(run, name)) for name in TEXTS},
    }


def waits_for(wait: waiting.Wait) -> str:
    """Say which verdict, decision, event or child run a call waits for; "" for other waits."""
    if wait.kind != waiting.EVENT:
        what = {waiting.ORPHAN: "a verdict", waiting.APPROVAL: "a decision"}.get(wait.kind)
        return f"Waits for {what} on {wait.tool}" if what else ""
    until = f"until {moment(wait.until)}" if wait.until else "without a time limit"
    what = f"{wait.event} {wait.text}"
    if wait.event == CHILD:
        what = f"run {wait.text}, which a call of {wait.tool} started,"
    return f"{what} since {moment(wait.since)} {until} (UTC)"


@contextmanager
def following(alias: str, key: str, scope: str, show: Callable[[events.Row], None]) -> Iterator[None]:
    """Call `show` with every row that is added to a session during the block, once each and in order.

    A thread calls `show` during the block. At the end, the caller's thread does so for the last rows.
    """
    sessions, stop = Session.objects.using(alias).filter(scope=scope, key=key), threading.Event()
    seq = sessions.values_list("next_seq", flat=True).first() or 1

    def show_new() -> None:
        nonlocal seq
        session_id = sessions.values_list("pk", flat=True).first()
        for row in () if session_id is None else read.session_rows(alias, session_id, after=seq - 1):
            seq = row.seq + 1
            show(row)

    def follow() -> None:
        try:
            while not stop.wait(PAUSE):
                try:
                    show_new()
                except (DatabaseError, InterfaceError):  # rows missed now are shown later
                    logger.info("Journal not readable now", exc_info=True)
                    connections[alias].close()
                except BrokenPipeError:  # the output has no reader, but the run continues
                    return
        finally:
            connections[alias].close()

    thread = threading.Thread(target=carry.carrying(alias, follow), name="agentruns-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        show_new()


def idle(stands: dict[str, Any]) -> str:
    """Explain why no run can continue; `stands` are the counts that `waiting.standing` returns."""
    said, until = ["Nothing can go on now."], f"{moment(stands['leased_until'])} UTC"
    if stands["leased"] == 1:
        said += [f"1 run is held by a live lease until {until}; if its process died it is taken over then."]
    elif stands["leased"]:
        said += [f"{stands['leased']} runs are held by live leases, the first until {until};"]
        said += ["a run whose process died is taken over then."]
    if number := stands["for_events"]:
        said.append(f"{'1 run waits' if number == 1 else f'{number} runs wait'} for an event.")
    if number := stands["for_people"]:
        listed = page("run_changelist")
        where = f"{listed}?status=person" if listed else "manage.py list_runs"
        said.append(f"{'1 run waits' if number == 1 else f'{number} runs wait'} for a person ({where}).")
    if stands["unserved"]:
        said.append("No process that looked could take these:")
    return " ".join(said)


def unserved(alias: str, run_id: UUID | str | None = None) -> Iterator[str]:
    """Yield a line with the reason for each run that no worker could drive, or only for `run_id`.

    After ten runs, yields "and more" if there are others.
    """
    runs = waiting.unserved(Run.objects.using(alias)).select_related("session").order_by("created_at")
    waiting_runs = masking.masked_runs((runs if run_id is None else runs.filter(pk=run_id))[: MOST + 1])
    for run in waiting_runs[:MOST]:
        yield f"Session {run.session.key}: {shortened(run.blocked_reason, 300)}"
    if len(waiting_runs) > MOST:
        yield "and more"


def for_people(alias: str, run_ids: Iterable[UUID]) -> Iterator[str]:
    """Yield a line with the next step for each of these runs that waits for a person.

    After ten runs, yields the number of the others.
    """
    stopped = Run.objects.using(alias).filter(pk__in=list(run_ids), status__in=waiting.FOR_PEOPLE)
    runs = masking.masked_runs(stopped.select_related("session").order_by("created_at"))
    waits = waiting.waits(alias, runs[:MOST])
    for run in runs[:MOST]:
        first = waits[run.pk][0] if waits[run.pk] else None
        if first is not None and first.kind == waiting.ORPHAN:
            why, step = f"did {first.tool} happen?", verdict(run.pk, first.call_id)
        elif first is not None and first.approval_id is not None:
            step = page("approval_change", first.approval_id)
            step = step or f"manage.py approve_call {first.approval_id} --user NAME"
            why = f"{first.tool} waits for approval."
        else:
            step = page("run_change", run.pk) or f"manage.py show_run {run.pk}"
            why = f"{run.status}: {shortened(run.blocked_reason) or 'see why'}"
        yield f"Run {run.pk} in session {run.session.key}: {why} {step}"
    if len(runs) > MOST:
        yield f"and {len(runs) - MOST} more"


def verdict(run_id: UUID | str, call_id: str) -> str:
    """Name the admin's page for the verdict on a call in doubt; without the admin, the Python call."""
    in_shell = f'agentruns.resolve_orphan("{run_id}", "{call_id}", ...) in manage.py shell'
    return page("run_call", run_id, call_id) or in_shell


def to_resume(run: Run) -> str:
    """Say why a run is paused, and how to resume it once the cause is removed."""
    step = page("run_change", run.pk)
    is_over = run.blocked_reason.startswith("budget_exhausted")
    button, function = ("Raise the budget", "raise_budget") if is_over else ("Resume", "resume_run")
    how = f"press {button} on {step}" if step else f'agentruns.{function}("{run.pk}", ...) in manage.py shell'
    run = masking.mask_of(run).run(run)
    reason = shortened(run.blocked_reason).removesuffix(".") or "no reason was given"
    return f"Held: {reason}. {'To go on,' if is_over else 'Put that right, then'} {how}"


def to_decide(approval: Approval) -> str:
    """Say how to decide an approval and let a worker execute the decision."""
    command = f"manage.py approve_call {approval.pk} --user NAME; then manage.py resume_runs."
    in_admin = " in the admin under Approvals, or" if page("approval_change", approval.pk) else ""
    return f"Decide{in_admin}: {command}"


def page(name: str, *args: Any) -> str:
    """Build the path of a page of our admin; "" if the project does not serve it."""
    if getattr(django_settings, "ROOT_URLCONF", None):
        with suppress(NoReverseMatch):
            return reverse(f"admin:agentruns_{name}", args=args)
    return ""
