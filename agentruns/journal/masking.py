"""Masking arguments that a tool declares sensitive, and recognising a mask in an edit."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from agentruns.conf import settings
from agentruns.journal import events
from agentruns.journal.events import Row
from agentruns.journal.read import definitions_of
from agentruns.models import Definition, Run
from agentruns.tools.card import MASK
from agentruns.utils.redaction import FAILED, is_on, redact

LEAST_MASK = 3  # characters; shorter pieces also occur in texts that carry no mask
MOST_COMPARED = 1_000  # words and signs; comparing more would hold a decision's transaction open

Sensitive = Mapping[str, Collection[str]]

_WORD = re.compile(r"\w+|\W")


def sensitive_of(definition: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the names of sensitive arguments by tool, for the tools of a definition that have any."""
    tools = definition.get("tools", {})
    return {name: tuple(policy["sensitive"]) for name, policy in tools.items() if policy.get("sensitive")}


def sensitive_of_all(definitions: Iterable[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the same for several definitions: sensitive in one of them is sensitive."""
    found: dict[str, tuple[str, ...]] = {}
    for definition in definitions:
        for tool, names in sensitive_of(definition).items():
            found[tool] = tuple(dict.fromkeys((*found.get(tool, ()), *names)))
    return found


def sensitive_in(run: Run) -> dict[str, tuple[str, ...]]:
    """Return the same for all definitions that a run's session ever had: its conversation spans them all.

    The rows that a fork copied name those of its origin.
    """
    alias = settings.DATABASE
    hashes = {run.definition_id, *definitions_of(alias, run.session_id)}
    found = Definition.objects.using(alias).filter(pk__in=hashes)
    return sensitive_of_all(found.values_list("body", flat=True))


def masked(row: Row, sensitive: Sensitive) -> Row:
    """Return a journal row as it may be shown outside an approval card."""
    if not sensitive:
        return row
    payload = dict(row.payload)
    if row.kind == events.ASSISTANT:
        payload["calls"] = _each(payload.get("calls"), "tool", "arguments", sensitive)
        payload["calls"] = _each(payload["calls"], "tool", "original", dict.fromkeys(sensitive, ("input",)))
        payload["content"] = _each(payload.get("content"), "name", "input", sensitive)
    for field in ("arguments", "edited"):
        if field in payload:
            payload[field] = hide(payload[field], sensitive.get(row.tool_name, ()))
    return row._replace(payload=payload)


def hide(arguments: Any, names: Collection[str]) -> Any:
    """Return arguments with those of these names masked."""
    if not names or not isinstance(arguments, dict):
        return arguments
    return {name: MASK if name in names else value for name, value in arguments.items()}


def carries_mask(edited: Any, name: str, original: dict[str, Any]) -> bool:
    """Return whether an edited argument holds a mask that readers saw instead of an original text."""
    if not is_on():
        return False
    kept = list(_texts(original.get(name)))
    changed = [(text, shown) for text in _texts(original) if (shown := redact(text)) != text]
    pieces = {piece for text, shown in changed for piece in _pieces(text, shown)}
    for text in _texts(edited):
        if text not in kept and any(text == shown for _text, shown in changed):
            return True
        if any(piece in text and not any(piece in one for one in kept) for piece in pieces):
            return True
    return False


def without_values(text: str, arguments: dict[str, Any], names: Collection[str]) -> str:
    """Return an error's text without the values of sensitive arguments that it quotes."""
    for value in _texts([arguments.get(name) for name in names]):
        text = text.replace(value, MASK) if len(value) >= LEAST_MASK else text
    return text


def _each(items: Any, tool: str, field: str, sensitive: Sensitive) -> Any:
    if not isinstance(items, list):
        return items
    return [
        {**item, field: hide(item[field], sensitive.get(str(item.get(tool)), ()))}
        if isinstance(item, dict) and field in item
        else item
        for item in items
    ]


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys included, and every integer as text."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)


def _pieces(text: str, shown: str) -> Iterator[str]:
    """Yield the pieces of `shown` that replace something in `text`; one piece where the texts are long."""
    if shown == FAILED:
        yield shown
        return
    before, after = _WORD.findall(text), _WORD.findall(shown)
    head = _common(before, after)
    before, after = before[head:][::-1], after[head:][::-1]
    tail = _common(before, after)
    before, after = before[tail:][::-1], after[tail:][::-1]
    found = ["".join(after)]
    if len(before) + len(after) <= MOST_COMPARED:
        steps = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        found = ["".join(after[start:end]) for kind, _i, _j, start, end in steps if kind != "equal"]
    yield from (piece for piece in found if len(piece) >= LEAST_MASK)


def _common(one: list[str], other: list[str]) -> int:
    """Return the length of the common beginning of two lists."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
