"""Plain values that callers get back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to, or where it stands.

    `messages` is in the provider's form; `pending` holds the Approvals that wait for people, `orphans` the
    ids of the calls whose outcome is in doubt.
    """

    status: str
    output: Any = None  # text, or a value of the agent's output_type
    run_id: str | None = None
    session_key: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    pending: list[Any] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    error: str = ""
