"""The options of `@tool`: declarations about a tool's effects and approval, checked on import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypedDict

from agentruns.tools.refusals import Refusal, mistake as misnamed
from agentruns.utils.bounds import LEAST_SENT, MAX_APPROVALS, NAME_LENGTH, OWN_EVENTS, is_name
from agentruns.utils.calls import arity_mistake

Risk = Literal["low", "normal", "high"]
Gate = bool | Callable[[dict[str, Any], Any], Any]

REQUESTER = "requester"  # `approvers` of a call that the run's owner or visitor confirms

_HOOKS = {  # option -> the arguments of its function
    "requires_approval": ("arguments", "ctx"),
    "describe": ("arguments",),
    "preview": ("arguments",),
    "holds": ("arguments", "ctx"),
    "reconcile": ("ctx", "arguments"),
}
_LONGEST = timedelta(days=3650)


class ChildKeywords(TypedDict, total=False):
    """The keyword arguments of `Agent.as_tool` beside name and description, which are those of `@tool`."""

    requires_approval: Gate
    approvers: str | None
    approvals: int
    expires_in: timedelta | None
    remind_after: timedelta | None
    escalate_after: timedelta | None
    escalate_to: str | None
    risk: Risk
    describe: Callable[[dict[str, Any]], str] | None
    preview: Callable[[dict[str, Any]], dict[str, Any]] | None
    holds: Callable[[dict[str, Any], Any], Any] | None
    sent_max: int | None


class ToolKeywords(ChildKeywords, total=False):
    """The keyword arguments of `@tool`, for type checkers."""

    name: str | None
    description: str | None
    safe_to_retry: bool
    transactional: bool
    reconcile: Callable[[Any, dict[str, Any]], Any] | None
    parallel: bool
    timeout: float | timedelta | None
    sensitive: Iterable[str]
    sensitive_results: Iterable[str]
    refuses: Refusal | Iterable[Refusal]
    awaits: str | None
    deferred: bool
    untrusted: bool
    outward: bool
    rules: bool | None


@dataclass(kw_only=True, eq=False)
class Options:
    """The declarations of one tool; `timeout` in seconds, `sensitive` and `sensitive_results` sorted."""

    requires_approval: Gate = False
    approvers: str | None = None
    approvals: int = 1
    expires_in: timedelta | None = None
    remind_after: timedelta | None = None
    escalate_after: timedelta | None = None
    escalate_to: str | None = None  # a group or permission, whose people are told as well
    risk: Risk = "normal"
    describe: Callable[[dict[str, Any]], str] | None = None
    preview: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    holds: Callable[[dict[str, Any], Any], Any] | None = None  # what an approver relies on
    safe_to_retry: bool = False
    transactional: bool = False
    reconcile: Callable[[Any, dict[str, Any]], Any] | None = None
    parallel: bool = False
    timeout: float | None = None
    sensitive: tuple[str, ...] = ()
    sensitive_results: tuple[str, ...] = ()  # members of the result; "*" is all of it
    refuses: tuple[Refusal, ...] = ()
    sent_max: int | None = None  # characters of a result in a request; None: AGENTRUNS_RESULT_SENT_MAX
    awaits: str | None = None  # name of the event that may bring a result later
    deferred: bool = False  # a gated or waiting call is a run of its own, and its run goes on meanwhile
    untrusted: bool = False  # it reads text that outsiders wrote
    outward: bool = False  # it sends, pays or publishes: a person is asked once outsiders' text was read
    rules: bool | None = None  # whether standing rules may answer; None: unless its risk is high
    only_answers: bool = False  # a question for a person: never executed
    only_waits: bool = False  # nothing happens outside: its handler only says what to wait for
    agent: str = ""  # name of the agent to which the tool hands a task; its run is a child of the caller's
    origin: dict[str, Any] | None = None  # the server that the tool comes from, and its hints
    # Called once in a drive, before the first call: returns why the run must wait, or "".
    ready: Callable[[Any], str] | None = None
    poll: Callable[[Any, str], Any] | None = None  # gets the result of a server's task, Pending, or Unknown

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        """Build options from keywords of `@tool`; raises TypeError for one that cannot be converted."""
        timeout, refuses = given.get("timeout"), given.get("refuses", ())
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        elif isinstance(timeout, bool) or not isinstance(timeout, int | float | None):
            raise TypeError(f"timeout must be seconds or a timedelta, not {timeout!r}.")
        if isinstance(refuses, type) or not isinstance(refuses, Iterable):
            refuses = [refuses]  # one of them
        members = given.get("sensitive_results", ())
        made = {
            "timeout": timeout,
            "refuses": tuple(refuses),
            "sensitive": as_names(given.get("sensitive", ())),
            "sensitive_results": as_names(members, "sensitive_results", "members of the result"),
        }
        return cls(**{**given, **made})

    @property
    def recovery(self) -> Literal["transactional", "safe_to_retry", "reconcile", "nothing"]:
        """The rule for a call that was started and has no result."""
        if self.transactional:
            return "transactional"
        if self.safe_to_retry:
            return "safe_to_retry"
        return "reconcile" if self.reconcile is not None else "nothing"

    def check(self, name: str, *, is_async: bool, parameters: Iterable[str]) -> None:
        """Raise TypeError for an option of a wrong type or value, or for two that contradict each other."""
        if first := next(self._mistakes(is_async, parameters), ""):
            raise TypeError(f"Tool {name!r}: {first}")

    def _mistakes(self, is_async: bool, parameters: Iterable[str]) -> Iterator[str]:
        # The type of each option.
        for flag in ("safe_to_retry", "transactional", "parallel", "deferred", "untrusted", "outward"):
            if not isinstance(getattr(self, flag), bool):
                yield f"{flag} must be True or False, not {getattr(self, flag)!r}."
        if self.rules not in (True, False, None):
            yield f"rules must be True, False or None, not {self.rules!r}."
        for hook, given in _HOOKS.items():
            value = getattr(self, hook)
            if isinstance(value, bool) and hook == "requires_approval":
                continue
            if value is not None and not callable(value):
                yield f"{hook} must be a function, not {value!r}."
            if mistake := arity_mistake(value, *given):
                yield f"{hook} {mistake}."
        for refusal in self.refuses:
            if wrong := misnamed(refusal):
                yield f"refuses names what it cannot: {wrong}."
        if self.sent_max is not None and (type(self.sent_max) is not int or self.sent_max < LEAST_SENT):
            yield f"sent_max must be a whole number from {LEAST_SENT} on, not {self.sent_max!r}."
        event: Any = self.awaits
        if event is not None and not (isinstance(event, str) and event.strip() and is_name(event)):
            yield f"awaits must be the name of an event, not {event!r}."
        if event is not None and event.startswith(OWN_EVENTS):
            yield f"awaits must not begin with {OWN_EVENTS!r}: agentruns delivers these events itself."
        if self.timeout is not None and not 0 < self.timeout <= _LONGEST.total_seconds():  # false for NaN
            yield f"timeout must be positive and at most ten years, not {self.timeout!r}."
        asks, who, count, whom = self.requires_approval, self.approvers, self.approvals, self.escalate_to
        if not isinstance(asks, bool) and not callable(asks):
            yield f"requires_approval must be a bool or a function, not {asks!r}."
        if who is not None and not (isinstance(who, str) and who.strip() and who.isprintable()):
            yield f"approvers must be a permission or a group name, not {who!r}."
        if who == REQUESTER and count != 1:
            yield "approvers='requester' is one person; leave approvals at 1."
        if who is not None and len(who) > NAME_LENGTH:
            yield f"approvers must be at most {NAME_LENGTH} characters long."
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_APPROVALS:
            yield f"approvals must be a whole number from 1 to {MAX_APPROVALS}, not {count!r}."
        for option in ("expires_in", "remind_after", "escalate_after"):
            time = getattr(self, option)
            if time is not None and (not isinstance(time, timedelta) or time <= timedelta(0)):
                yield f"{option} must be a positive timedelta, not {time!r}."
            if time is not None and time > _LONGEST:
                yield f"{option} is more than ten years; leave it out to wait for ever."
        if whom is not None and not (isinstance(whom, str) and whom.strip() and is_name(whom)):
            yield f"escalate_to must be a permission or a group name, not {whom!r}."
        if self.risk not in ("low", "normal", "high"):
            yield f"risk must be 'low', 'normal' or 'high', not {self.risk!r}."
        yield from self._contradictions(is_async, parameters)

    def _contradictions(self, is_async: bool, parameters: Iterable[str]) -> Iterator[str]:
        if unknown := sorted({*self.sensitive} - {*parameters}):
            yield f"sensitive names {', '.join(unknown)}, which it does not take."
        given = {each.name for each in fields(Options) if getattr(self, each.name) != each.default}
        of_a_card: list[str] = ["approvers", "approvals", "expires_in", "holds"]
        of_a_card += ["remind_after", "escalate_to"]
        of_a_card = [name for name in of_a_card if name in given]
        of_a_card += ["risk='high'"] if self.risk == "high" else []
        may_ask = self.requires_approval is not False or self.outward
        for option in of_a_card if not may_ask else ():
            yield (
                f"{option} and requires_approval=False contradict each other: nobody would be asked. "
                "Declare requires_approval=True, or a function of (arguments, ctx)."
            )
        if (self.escalate_after is None) != (self.escalate_to is None):
            yield "escalate_after and escalate_to require each other: when, and whom to tell."
        if self.remind_after and self.escalate_after and self.remind_after >= self.escalate_after:
            yield "remind_after must be shorter than escalate_after."
        if self.deferred and not may_ask and self.awaits is None:
            yield "deferred requires requires_approval or awaits: a call would have nothing to wait for."
        if self.deferred and self.parallel:
            yield "deferred and parallel contradict each other. A deferred call is a run of its own."
        if self.deferred and self.approvers == REQUESTER:
            yield "deferred and approvers='requester' contradict each other: the requester is there."
        forbidden = ["an async function"] if is_async else []
        others = ("awaits", "parallel", "timeout", "reconcile", "safe_to_retry")
        forbidden += [name for name in others if name in given]
        for other in forbidden if self.transactional else ():
            yield (
                f"transactional and {other} contradict each other. A transactional handler commits with "
                "its result in one transaction of one thread, or not at all."
            )
        if self.safe_to_retry and self.reconcile is not None:
            yield (
                "safe_to_retry and reconcile contradict each other. A call that is safe to repeat is "
                "repeated without asking whether it happened."
            )
        if self.parallel and not self.safe_to_retry:
            yield (
                "parallel requires safe_to_retry. Calls that run together can all be in doubt after a crash."
            )


def as_names(given: object, option: str = "sensitive", what: str = "parameter names") -> tuple[str, ...]:
    """Sort the names of an option; raises TypeError for a bare string, and for anything but texts."""
    if isinstance(given, Iterable) and not isinstance(given, str):
        names = list(given)
        if all(isinstance(each, str) for each in names):
            return tuple(sorted(set(names)))
    raise TypeError(f"{option} must be a list of {what}, not {given!r}.")
