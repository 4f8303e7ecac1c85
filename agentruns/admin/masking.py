"""Arguments that a tool declared sensitive are masked on a run's page; the approval card shows them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.tools.card import MASK

Sensitive = Mapping[str, Collection[str]]


def sensitive_of(definition: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return, for each tool of a definition that has any, the names of its sensitive arguments."""
    tools = definition.get("tools", {})
    return {name: tuple(policy["sensitive"]) for name, policy in tools.items() if policy.get("sensitive")}


def masked(row: Row, sensitive: Sensitive) -> Row:
    """Return a journal row as it may be shown outside an approval card."""
    if not sensitive:
        return row
    payload = dict(row.payload)
    if row.kind == events.ASSISTANT:
        payload["calls"] = _each(payload.get("calls"), "tool", "arguments", sensitive)
        payload["content"] = _each(payload.get("content"), "name", "input", sensitive)
    for field in ("arguments", "edited"):
        if field in payload:
            payload[field] = _hidden(payload[field], sensitive.get(row.tool_name, ()))
    return row._replace(payload=payload)


def _each(items: Any, tool: str, field: str, sensitive: Sensitive) -> Any:
    if not isinstance(items, list):
        return items
    return [
        {**item, field: _hidden(item[field], sensitive.get(str(item.get(tool)), ()))}
        if isinstance(item, dict) and field in item
        else item
        for item in items
    ]


def _hidden(arguments: Any, names: Collection[str]) -> Any:
    if not names or not isinstance(arguments, dict):
        return arguments
    return {name: MASK if name in names else value for name, value in arguments.items()}
