"""Text that outsiders wrote, and the rows by which a conversation has it: once it does, it always does."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

from agentruns.journal import events
from agentruns.models import Message, Run

STARTS = (events.TOOL_STARTED, events.ORPHAN_FOUND)
KINDS = (events.RUN_STARTED, events.USER, events.ASSISTANT, events.TOOL_RESULT, *STARTS)


def readers(kind: str, tool: str, facts: Mapping[str, Any]) -> list[str]:
    """List the tools that have read text of outsiders, as the facts of a row say; `tool` is the row's.

    These are the tool of a call that starts or whose start is lost, the provider's own tools, and the tools
    of another run whose text the row brings.
    """
    if kind in STARTS:
        return [tool] if facts.get("untrusted") else []
    if kind == events.RUN_STARTED:
        given = (facts.get(source) or {} for source in ("parent", "origin"))
        return [name for each in given for name in each.get("untrusted", ())]
    told: Mapping[str, Any] = facts.get("about", {}) if kind == events.USER else facts
    return [*told.get("untrusted", ())] if kind in KINDS else []


def read_by(alias: str, run: Run) -> dict[str, tuple[UUID, int]]:
    """Map the tools that have read text of outsiders in a run's conversation to the run and row that did.

    Leaves out the rows from the first one that cannot be read.
    """
    own = Message.objects.using(alias).filter(run_id=run.pk).order_by("-seq")
    rows = Message.objects.using(alias).filter(session_id=run.session_id, kind__in=KINDS)
    rows = rows.filter(seq__lte=own.values("seq")[:1]).order_by("seq")
    found: dict[str, tuple[UUID, int]] = {}
    with suppress(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        for kind, name, facts, run_id, seq in rows.values_list("kind", "tool_name", "facts", "run_id", "seq"):
            for tool in readers(kind, name, facts):
                found.setdefault(tool, (run_id, seq))
    return found
