"""What a run was started with and what its agent is now, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from agentruns.admin.text import plain, pretty, visible
from agentruns.agents.agent import Agent, definition_difference, get_agent
from agentruns.exceptions import UnknownAgentError
from agentruns.models import Run
from agentruns.utils.redaction import redact

CUT = 400  # characters
LEAD = 60  # of them, before the first that differs


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a part; `whole` where `shown` is only the piece around what differs."""

    shown: SafeString
    whole: SafeString | str = ""
    length: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One part in which two definitions differ."""

    name: str
    before: Cell
    now: Cell


@dataclass(frozen=True, slots=True)
class Drift:
    """How the agent of this process compares with what a run was started with.

    `agent` is None where this process knows none of that name. `is_served` says that the run's own version
    is registered as it was, so the run just goes on with it, whatever a newer version differs in.
    """

    agent: Agent | None
    is_served: bool
    parts: list[Part]

    @property
    def hash(self) -> str:
        """The digest of the definition that would be adopted, or ""."""
        return self.agent.definition_hash if self.agent else ""

    @property
    def is_other(self) -> bool:
        """Whether the run cannot go on in this process as it is."""
        return self.agent is not None and not self.is_served


def drift(run: Run, definition: dict[str, Any]) -> Drift:
    """Compare the definition a run goes by with the agent that is registered for it in this process."""
    own, newest = _registered(run.agent, run.version), _registered(run.agent)
    is_served = own is not None and own.definition_hash == run.definition_id
    agent = newest if is_served else own or newest  # what adopting would take
    if agent is None or agent.definition_hash == run.definition_id:
        return Drift(agent, is_served, [])
    now = agent.definition()
    names = definition_difference(definition, now)
    return Drift(agent, is_served, [_part(name, definition, now) for name in names])


def told(run: Run, found: Drift) -> str:
    """Return in words what the comparison means for a run, or "" where nothing differs."""
    about = {"agent": plain(run.agent), "version": plain(run.version)}
    if found.agent is None:
        text = _(
            "This process does not know the agent %(agent)s, so it cannot tell whether its definition is "
            "another one now. A worker that knows it goes on."
        )
        return text % about
    about["newest"] = plain(found.agent.version)
    if found.is_served and found.parts:
        text = _(
            "Version %(newest)s of %(agent)s is the newest here. Version %(version)s, which this run was "
            "started with, is still registered as it was: the run just goes on with it."
        )
        return text % about
    if found.is_served:
        return ""
    text = _("The run was started with another definition of %(agent)s than is registered here now.")
    if found.agent.version != run.version:
        text = _(
            "Version %(version)s of %(agent)s, which the run goes by, is not registered here any more; "
            "version %(newest)s is."
        )
    waits = _(
        "No worker that has only the new one takes the run up. Serve the old one again under its own "
        "version, or adopt the new one."
    )
    return f"{text % about} {waits}"


def _registered(name: str, version: str | None = None) -> Agent | None:
    try:
        return get_agent(name, version)
    except UnknownAgentError:
        return None


def _part(name: str, before: dict[str, Any], now: dict[str, Any]) -> Part:
    texts = [redact(_text(_value(name, body))) for body in (before, now)]
    start = 0
    if max(map(len, texts)) > CUT:  # where they part, or both would begin with the same
        pairs = enumerate(zip(*texts, strict=False))
        start = max(0, next((place for place, (a, b) in pairs if a != b), min(map(len, texts))) - LEAD)
    first, second = (_cell(text, start) for text in texts)
    return Part(plain(name), first, second)


def _value(name: str, body: dict[str, Any]) -> Any:
    """Return the value of a part as `definition_difference` names it: "model", "tools.refund.timeout" ..."""
    if not name.startswith("tools."):
        return body.get(name)
    tool, _dot, key = name.removeprefix("tools.").partition(" (")[0].partition(".")
    policy = body.get("tools", {}).get(tool)
    return policy.get(key) if key and policy is not None else policy


def _text(value: Any) -> str:
    if value is None:
        return _("not there")
    return value if isinstance(value, str) else pretty(value)


def _cell(text: str, start: int) -> Cell:
    piece = text[start : start + CUT]
    if len(piece) == len(text):
        return Cell(visible(text))
    shown = ("…" if start else "") + piece + ("…" if start + CUT < len(text) else "")
    return Cell(visible(shown), visible(text), len(text))
