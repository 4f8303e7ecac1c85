"""Read a Google-style docstring."""

from __future__ import annotations

import inspect
import re
from itertools import pairwise

_ARGS = re.compile(r"(?:args|arguments|parameters):", re.IGNORECASE)
_SECTION = re.compile(r"(?:args|arguments|parameters|returns?|raises|yields):", re.IGNORECASE)
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def parse(doc: str | None) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the description of each entry of `Args:`."""
    lines = inspect.cleandoc(doc or "").splitlines()
    heads = [number for number, line in enumerate(lines) if _SECTION.fullmatch(line.rstrip())]
    description = "\n".join(lines[: heads[0]] if heads else lines).strip()
    entries: dict[str, str] = {}
    for head, end in pairwise([*heads, len(lines)]):
        if _ARGS.fullmatch(lines[head].rstrip()):
            entries.update(_entries(lines[head + 1 : end]))
    return description, entries


def _entries(lines: list[str]) -> dict[str, str]:
    entries: dict[str, list[str]] = {}
    current: list[str] = []
    indent: int | None = None
    for line in lines:
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if not text:
            continue
        if depth == 0:
            break
        indent = depth if indent is None else indent
        match = _ENTRY.fullmatch(text) if depth <= indent else None
        if match:
            current = entries.setdefault(match[1], [])
            text = match[2]
        current.append(text)
    return {name: " ".join(part for part in parts if part) for name, parts in entries.items()}
