"""The kinds of journal rows, and the form of each."""

from __future__ import annotations

from agentruns.journal import events

CONSTANTS = {value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)}
KINDS = CONSTANTS - {events.COPIED, events.OUTPUT_INVALID, events.MESSAGE}
# Each kind has its form, a TypedDict of its name.
PAYLOADS = {kind: getattr(events, kind.title().replace("_", "")) for kind in sorted(KINDS)}
