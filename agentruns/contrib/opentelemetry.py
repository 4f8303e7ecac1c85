"""OpenTelemetry: set AGENTRUNS_TELEMETRY = "agentruns.contrib.opentelemetry.OpenTelemetry".

Spans and metrics have names from the semantic conventions for generative AI. These names are written here
as strings, because the package of the conventions still changes its constants. Spans contain no prompt,
reply, argument or result.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections
from django.db.models import Min
from django.db.models.functions import Coalesce, Greatest, Now
from opentelemetry import context as contexts, metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, TraceFlags

from agentruns import __version__
from agentruns.conf import settings
from agentruns.engine.handler import Interrupted
from agentruns.exceptions import LeaseLostError
from agentruns.journal.telemetry import Facts
from agentruns.models import Run
from agentruns.models.run import SERVED, RunQuerySet
from agentruns.providers.base import ProviderError
from agentruns.services.runs.waiting import MOST, blocked
from agentruns.utils.redaction import get_logger, redact

logger = get_logger("agentruns.opentelemetry")

SCOPE = "agentruns"
LONGEST = 200  # characters of an attribute, as some attributes are texts of a provider
SECONDS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 300, 3600,
)  # fmt: skip
TOKENS = tuple(4**power for power in range(14))
OPERATIONS = {"drive": "invoke_agent", "model": "chat", "tool": "execute_tool"}

# Attribute -> fact. Metrics get few attributes, because each combination of values makes a time series.
RUN = {"agentruns.run.id": "run_id", "agentruns.epoch": "epoch"}
AGENT = {"gen_ai.agent.name": "agent"}
TOOL = {"gen_ai.tool.name": "tool"}
MODEL = {"gen_ai.provider.name": "provider", "gen_ai.request.model": "model"}
CALL = {**TOOL, "gen_ai.tool.call.id": "call_id", "agentruns.attempt": "attempt"}
STATUS = {"agentruns.status": "status"}
AT_THE_END = {"gen_ai.response.model": "response_model", **STATUS, "agentruns.outcome": "outcome"}
BEGINS = {
    "drive": {**RUN, **AGENT, **MODEL, "gen_ai.agent.version": "version", "agentruns.took_over": "took_over"},
    "model": {**RUN, **AGENT, **MODEL, "agentruns.step": "step"},
    "tool": {**RUN, **CALL},
}
MEASURED = {
    "drive": {**AGENT, **STATUS},
    "model": {**MODEL, "gen_ai.response.model": "response_model"},
    "tool": {**TOOL, "agentruns.outcome": "outcome"},
}
CACHED = {
    "gen_ai.usage.cache_read.input_tokens": "cache_read_input_tokens",
    "gen_ai.usage.cache_creation.input_tokens": "cache_creation_input_tokens",
}
DURATIONS = {
    "drive": ("agentruns.drive.duration", "From a run's claim to its release"),
    "step": ("agentruns.step.duration", "A model's reply and its calls"),
    "model": ("gen_ai.client.operation.duration", "A request to the model"),
    "tool": ("gen_ai.execute_tool.duration", "A tool's handler"),
}
# Event -> name, description and attributes of its counter.
COUNTED = {
    "ended": ("agentruns.runs.ended", "Runs that ended", {**AGENT, **STATUS}),
    "decision": ("agentruns.decisions", "Decisions on approvals", {**TOOL, "agentruns.verb": "verb"}),
    "orphan": ("agentruns.orphans", "Calls of unknown outcome", {**TOOL, "agentruns.action": "action"}),
    "verdict": ("agentruns.verdicts", "Verdicts on them", {**TOOL, "agentruns.verdict": "verdict"}),
    "late_result": ("agentruns.late_results", "Results that came too late to count", TOOL),
    "lease_lost": ("agentruns.leases.lost", "Drives that lost their lease", AGENT),
    "sweep": ("agentruns.sweeps", "Sweeps", {"agentruns.sweeper": "name"}),
}
DRIVE = contexts.create_key("agentruns-drive")  # its agent, and the time at which its current step began


class OpenTelemetry:
    """The spans and metrics of runs, made with the given providers or else with those of the process.

    A subclass with `session_key = True` adds the session's key, which may be personal data, to spans.
    """

    session_key = False

    def __init__(
        self, tracer_provider: trace.TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer_provider = tracer_provider
        meter = metrics.get_meter(SCOPE, __version__, meter_provider)
        self._durations = {
            name: meter.create_histogram(
                metric, unit="s", description=text, explicit_bucket_boundaries_advisory=SECONDS
            )
            for name, (metric, text) in DURATIONS.items()
        }
        text = "Tokens of requests and replies"
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", text, explicit_bucket_boundaries_advisory=TOKENS
        )
        self._counters = {
            event: meter.create_counter(name, description=text) for event, (name, text, _) in COUNTED.items()
        }
        text = "How long the oldest run that a worker could claim has waited"
        meter.create_observable_gauge("agentruns.queue.age", [queue_age], unit="s", description=text)
        text = "Runs that the deployed code cannot continue, at most 1000"
        meter.create_observable_gauge("agentruns.runs.blocked", [blocked_runs], description=text)

    @contextmanager
    def span(self, name: str, facts: Facts) -> Iterator[None]:
        """Make a span around a drive, a request to the model or a tool's handler; record its duration.

        `name` is "drive", "model" or "tool". For a request, also records the tokens.
        """
        attributes = {"gen_ai.operation.name": OPERATIONS[name], **_named(BEGINS[name], facts)}
        if name == "tool":
            attributes["gen_ai.tool.type"] = "function"
        if self.session_key and facts.get("session_key"):
            attributes["agentruns.session.key"] = redact(facts["session_key"])[:LONGEST]
        of = facts[{"drive": "agent", "model": "model", "tool": "tool"}[name]]
        title = f"{OPERATIONS[name]} {of}"[:LONGEST]
        above, links = contexts.get_current(), list[Link]()
        if name == "drive":
            if facts["epoch"]:  # epoch 0: a stateless run stays in its caller's trace
                # The run's own trace, with a link to the caller's span, if any.
                caller = trace.get_current_span().get_span_context()
                links = [Link(caller)] if caller.is_valid else []
                trace_id, span_id = run_trace(facts["run_id"])
                # A parent's flag decides whether children are sampled. This parent is no real span: ask
                # the sampler.
                sampler = getattr(self._tracer_provider or trace.get_tracer_provider(), "sampler", None)
                about = (Context(), trace_id, title, SpanKind.INTERNAL, attributes, links)
                sampled = sampler is None or sampler.should_sample(*about).decision.is_sampled()
                flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
                root = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
                above = trace.set_span_in_context(trace.NonRecordingSpan(root))
            above = contexts.set_value(DRIVE, {"agent": facts["agent"], "step_began": None}, above)
        elif name == "model":
            self._next_step(time.perf_counter())
        kind = SpanKind.CLIENT if name == "model" else SpanKind.INTERNAL
        began = time.perf_counter()
        tracer = trace.get_tracer(SCOPE, __version__, self._tracer_provider)
        span = tracer.start_span(title, above, kind, attributes, links)
        error: BaseException | None = None
        own = trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False)
        with _within(above), own:
            try:
                yield
            except BaseException as raised:
                error = raised
                raise
            finally:
                if name == "drive":
                    self._next_step(None)
                self._end(span, name, facts, error, time.perf_counter() - began)

    def event(self, name: str, facts: Facts) -> None:
        """Count an event, and add it to the current span; ignore an event that COUNTED does not name."""
        if name not in COUNTED:
            return
        attributes = _named(COUNTED[name][2], facts)
        self._counters[name].add(1, attributes)
        trace.get_current_span().add_event(f"agentruns.{name}", {**_named(RUN, facts), **attributes})

    def carried(self) -> AbstractContextManager[None]:
        """Build a context manager with which another thread continues the span that is current now."""
        return _within(contexts.get_current())

    def _next_step(self, now: float | None) -> None:
        """Record the duration of the drive's current step; begin the next at `now`, unless `now` is None."""
        drive: Any = contexts.get_value(DRIVE)
        if drive is not None:
            if drive["step_began"] is not None:
                seconds = time.perf_counter() - drive["step_began"]
                self._durations["step"].record(seconds, {"gen_ai.agent.name": drive["agent"]})
            drive["step_began"] = now

    def _end(self, span: Span, name: str, facts: Facts, error: BaseException | None, seconds: float) -> None:
        if name == "tool":
            facts.setdefault("outcome", "unknown")
        attributes = _named(AT_THE_END, facts)
        if facts.get("stop_reason"):
            attributes["gen_ai.response.finish_reasons"] = [str(facts["stop_reason"])[:LONGEST]]
        told, usage = facts.get("usage") or getattr(error, "usage", None), dict[str, int]()
        if name == "model" and isinstance(told, dict):  # input tokens include cached tokens
            usage = {name: _count(told, key) for name, key in CACHED.items() if key in told}
            usage["gen_ai.usage.input_tokens"] = _count(told, "input_tokens") + sum(usage.values())
            usage["gen_ai.usage.output_tokens"] = _count(told, "output_tokens")
        # The kind of an error is the provider's type or the class's name, never its text.
        cause = error.__cause__ if isinstance(error, Interrupted) and error.__cause__ is not None else error
        word = cause.type if isinstance(cause, ProviderError) else ""
        name_of_cause = type(cause).__name__ if cause is not None else facts.get("error")
        kind = str(word or name_of_cause or "")[:LONGEST]
        failed = {"error.type": kind} if kind else {}
        span.set_attributes({**attributes, **usage, **failed})
        if kind:
            span.set_status(trace.Status(StatusCode.ERROR))
        by = {"gen_ai.operation.name": OPERATIONS[name], **_named(MEASURED[name], facts)}
        self._durations[name].record(seconds, {**by, **failed})
        for of in ("input", "output") if usage else ():
            self._tokens.record(usage[f"gen_ai.usage.{of}_tokens"], {**by, "gen_ai.token.type": of})
        if isinstance(error, LeaseLostError):
            self.event("lease_lost", facts)


@contextmanager
def _within(context: Context) -> Iterator[None]:
    token = contexts.attach(context)
    try:
        yield
    finally:
        contexts.detach(token)


def run_trace(run_id: str | UUID) -> tuple[int, int]:
    """Compute the ids of a run's trace and of its root span, which is never exported."""
    # Not the run's id itself, which begins with a time: samplers need evenly distributed ids.
    digest = hashlib.sha256(f"agentruns:{run_id}".encode()).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


def queue_age(options: CallbackOptions) -> Iterable[Observation]:
    """Measure for how many seconds the oldest claimable run has waited; 0 if there is none.

    Leaves out runs that no worker could drive.
    """
    times = (Coalesce(name, "updated_at") for name in ("not_before", "lease_expires_at"))
    waited = Now() - Min(Greatest("updated_at", *times))
    for age in _read(lambda runs: runs.runnable().filter(SERVED).aggregate(age=waited)["age"]):
        yield Observation(max(0.0, age.total_seconds()) if age else 0.0)


def blocked_runs(options: CallbackOptions) -> Iterable[Observation]:
    """Count the runs that a deploy blocks, at most MOST."""
    return map(Observation, _read(lambda runs: runs.filter(blocked())[:MOST].count()))


def _read(measure: Callable[[RunQuerySet], Any]) -> list[Any]:
    """Call `measure` with all runs. Returns [] in a transaction or after an error."""
    connection = connections[settings.DATABASE]
    if connection.in_atomic_block:  # an error here would break the caller's transaction
        return []
    was_open = connection.connection is not None
    try:
        return [measure(Run.objects.using(settings.DATABASE))]
    except (DatabaseError, InterfaceError):
        logger.info("The state of the queue is not known.", exc_info=True)
        return []
    finally:
        if not was_open:  # in a thread of the metric reader, nobody else closes it
            connection.close()


def _named(names: Mapping[str, str], facts: Facts) -> dict[str, Any]:
    """Build the attributes that `names` maps to facts, without those whose fact is missing or empty."""
    values = {name: facts[fact] for name, fact in names.items() if facts.get(fact) not in (None, "")}
    return {
        name: value if isinstance(value, int | float) else str(value)[:LONGEST]
        for name, value in values.items()
    }


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53 else 0
