"""Spans and metrics of real runs, as OpenTelemetry's own SDK collects them in memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from agentruns import Agent, approve, deny, resolve_orphan, run_agent, start_run, tool
from agentruns.contrib.opentelemetry import OpenTelemetry, run_trace
from agentruns.exceptions import ToolDurabilityError
from agentruns.journal import telemetry
from agentruns.journal.store import Batch, DatabaseStore
from agentruns.models import Approval, Message, Run
from agentruns.providers.base import ModelReply, ModelRequest, ProviderError
from agentruns.services.sweep import sweep
from agentruns.testing import ScriptedModel
from tests.crash.child import Orders, perform
from tests.crash.processes import Forked, expire_lease
from tests.db.helpers import forget_backoff, run_turns, the_run
from tests.effects import VARIABLE
from tests.shop.agents import call, shop_agent
from tests.statements import captured_statements

pytestmark = pytest.mark.django_db(transaction=True)

SPANS = "AGENTRUNS_TEST_SPANS"  # the file that a child process writes its spans to


@dataclass
class Watched:
    """What the SDK has collected."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def spans(self, start: str = "") -> list[ReadableSpan]:
        """Return the spans whose names start so, in the order in which they ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith(start)]

    def points(self, metric: str) -> list[Any]:
        """Return the data points of a metric."""
        data = self.reader.get_metrics_data()
        of = [resource.scope_metrics for resource in data.resource_metrics] if data else []
        found = [one for scopes in of for scope in scopes for one in scope.metrics]
        return [point for one in found if one.name == metric for point in one.data.data_points]

    def counts(self, metric: str, by: str) -> dict[Any, int]:
        """Return a counter's values by one of its attributes."""
        return {point.attributes[by]: point.value for point in self.points(metric)}


class Asked(OpenTelemetry):
    session_key = True


class Told(OpenTelemetry):
    """What `AGENTRUNS_TELEMETRY` is made of here; `providers` are a test's own."""

    providers: tuple[Any, Any] = (None, None)


def recorded() -> OpenTelemetry:
    return OpenTelemetry(*Told.providers)


def recorded_with_key() -> OpenTelemetry:
    return Asked(*Told.providers)


class ToFile(SpanExporter):
    """Writes each span's line at once, so that it outlives a SIGKILL."""

    def export(self, spans: Any) -> SpanExportResult:
        with Path(os.environ[SPANS]).open("a") as file:
            for span in spans:
                file.write(f"{span.context.trace_id:032x} {span.parent.span_id:016x} {span.name}\n")
        return SpanExportResult.SUCCESS


def to_file() -> OpenTelemetry:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(ToFile()))
    return OpenTelemetry(provider)


def perform_traced(orders: Orders, pipe: Connection) -> None:
    """Do what a forked child is to do, with its spans in a file."""
    from agentruns.conf import settings

    settings.TELEMETRY = f"{__name__}.to_file"
    perform(orders, pipe)


@pytest.fixture
def watch(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    """Return what starts to watch; a sampler or a processor may be given."""
    monkeypatch.setattr(telemetry, "_made", {})
    monkeypatch.setattr(telemetry, "_complained", set())
    meters: list[MeterProvider] = []

    def begin(
        sampler: Sampler | None = None, processor: SpanProcessor | None = None, factory: str = "recorded"
    ) -> Watched:
        watched = Watched()
        tracers = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        tracers.add_span_processor(processor or SimpleSpanProcessor(watched.exporter))
        meters.append(MeterProvider([watched.reader], shutdown_on_exit=False))
        monkeypatch.setattr(Told, "providers", (tracers, meters[-1]))
        settings.AGENTRUNS_TELEMETRY = f"{__name__}.{factory}"
        return watched

    yield begin
    for meter in meters:
        meter.shutdown()


@pytest.fixture
def watched(watch: Callable[..., Watched]) -> Watched:
    return watch()


def of(span: ReadableSpan, *names: str) -> tuple[Any, ...]:
    assert span.attributes is not None
    return tuple(span.attributes.get(name) for name in names)


def above(span: ReadableSpan) -> int:
    assert span.parent is not None, f"{span.name} is in no trace of ours"
    return span.parent.span_id


SAID = ["the customer is Ada", "A1-secret", "the printer is on fire", "what to do", "session-of-ada"]


def a_run(session: str = "session-of-ada") -> Run:
    """Run an agent that reasons, succeeds once and fails once."""
    usage = {"input_tokens": 5, "cache_read_input_tokens": 90, "output_tokens": 7}
    turns: list[Any] = [
        {"text": SAID[0], "tools": [call("lookup", number=SAID[1]), call("broken")], "usage": usage}
    ]
    agent = shop_agent(f"agent-{Run.objects.count()}", *turns)
    return the_run(run_agent(agent, SAID[3], session, idempotency_key=session))


def test_a_drive_its_requests_and_its_tools_are_spans_without_contents(watched: Watched) -> None:
    run = a_run()
    model = "chat agentruns.providers.scripted.ScriptedModel"
    drive = watched.spans("invoke_agent")[0]
    chats, tools = watched.spans("chat"), watched.spans("execute_tool")
    names = [model, "execute_tool lookup", "execute_tool broken", model, "invoke_agent agent-0"]
    assert [span.name for span in watched.spans()] == names
    assert above(drive) == run_trace(str(run.pk))[1]
    assert {span.context.trace_id for span in watched.spans()} == {run_trace(run.pk)[0]}
    assert {above(span) for span in chats + tools} == {drive.context.span_id}
    assert all(
        of(span, "agentruns.run.id", "agentruns.epoch") == (str(run.pk), 1) for span in watched.spans()
    )
    assert of(drive, "gen_ai.agent.name", "agentruns.status") == (run.agent, "completed")
    usage = (
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.cache_read.input_tokens",
        "gen_ai.usage.output_tokens",
    )
    assert of(chats[0], "gen_ai.response.finish_reasons", *usage) == (("tool_use",), 95, 90, 7)
    ids = list(run.messages.filter(kind="tool_started").order_by("seq").values_list("call_id", flat=True))
    facts = ("gen_ai.tool.call.id", "agentruns.outcome", "agentruns.attempt", "error.type")
    assert [of(span, *facts) for span in tools] == [
        (ids[0], "ok", 1, None),
        (ids[1], "error", 1, "ValueError"),
    ]
    assert [span.status.is_ok for span in tools] == [True, False]
    everything = "".join(span.to_json() for span in watched.spans())
    assert [text for text in SAID if text in everything] == []


def test_metrics_of_a_run(watched: Watched) -> None:
    run = a_run()
    tokens = watched.points("gen_ai.client.token.usage")
    assert {point.attributes["gen_ai.token.type"] for point in tokens} == {"input", "output"}
    assert max(point.max for point in tokens) == 95
    times = watched.points("gen_ai.execute_tool.duration")
    assert {(point.attributes["gen_ai.tool.name"], point.count) for point in times} == {
        ("lookup", 1),
        ("broken", 1),
    }
    assert sum(point.count for point in watched.points("gen_ai.client.operation.duration")) == 2
    assert watched.points("agentruns.step.duration")[0].count == 2
    assert watched.points("agentruns.drive.duration")[0].count == 1
    assert watched.counts("agentruns.runs.ended", "agentruns.status") == {"completed": 1}
    everything = str(watched.reader.get_metrics_data() or "") + str(tokens)
    assert str(run.pk) not in everything, "an id would make a time series of each run"


def test_the_session_s_key_is_told_only_when_asked_for(watch: Callable[..., Watched]) -> None:
    watched = watch(factory="recorded_with_key")
    a_run()
    assert of(watched.spans("invoke_agent")[0], "agentruns.session.key") == ("session-of-ada",)


def test_an_approval_an_hour_later_is_in_the_same_trace(watched: Watched) -> None:
    run = the_run(run_turns({"tools": [call("refund", cents=5000)]}))
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(7, 8, False))):  # the request of a web page
        with suppress(RuntimeError), transaction.atomic():
            deny(Approval.objects.get().pk, None, "no")
            raise RuntimeError("a decision that is rolled back is none")
        approve(Approval.objects.get().pk, None, arguments={"cents": 100})
        sweep()
    first, second = watched.spans("invoke_agent")
    assert [of(span, "agentruns.status")[0] for span in (first, second)] == ["awaiting-approval", "completed"]
    assert {span.context.trace_id for span in watched.spans()} == {run_trace(run.pk)[0]}
    assert [(link.context.trace_id, link.context.span_id) for link in second.links] == [(7, 8)]
    assert list(first.links) == []
    assert watched.counts("agentruns.decisions", "agentruns.verb") == {"edit": 1}


def test_a_killed_process_and_the_one_that_takes_over_share_a_trace(watched: Watched, tmp_path: Path) -> None:
    orders = Orders(
        actions=[("run", "calls-post", "s1")],
        lease=0.3,
        database={"NAME": str(connection.settings_dict["NAME"])},
        environment={
            VARIABLE: os.environ[VARIABLE],
            SPANS: str(tmp_path / "spans"),
            "SHOP_KILL": "post:after",
        },
    )
    child = Forked(perform_traced, orders)
    try:
        assert child.ended() == -9
    finally:
        child.close()
    run = Run.objects.get()
    expire_lease(run)
    assert sweep().waiting == 1
    trace_id, span_id = run_trace(run.pk)
    left = (tmp_path / "spans").read_text().split("\n")
    assert left[0].startswith(f"{trace_id:032x} ") and " chat " in left[0], (
        "the drive and the tool never ended"
    )
    [taken] = watched.spans("invoke_agent")
    assert (taken.context.trace_id, above(taken)) == (trace_id, span_id)
    assert of(taken, "agentruns.took_over", "agentruns.epoch", "agentruns.status") == (True, 2, "orphaned")
    assert [event.name for event in taken.events] == ["agentruns.orphan"]
    call_id = Message.objects.get(kind="orphan_found").call_id
    resolve_orphan(run.pk, call_id, "occurred", None, result="posted")
    sweep()
    assert watched.counts("agentruns.orphans", "agentruns.action") == {"held": 1}
    assert watched.counts("agentruns.verdicts", "agentruns.verdict") == {"occurred": 1}
    assert {span.context.trace_id for span in watched.spans()} == {trace_id}


def test_parallel_calls_and_one_of_unknown_outcome_are_below_the_drive(watched: Watched) -> None:
    threads: list[str] = []

    @tool(safe_to_retry=True, parallel=True)
    def peek(number: int) -> str:
        """Look, in a thread of its own, in which the tool's span is the current one."""
        threads.append(threading.current_thread().name)
        trace.get_current_span().set_attribute("seen", number)
        return "seen"

    @tool
    def unsure() -> str:
        """Not know."""
        raise ToolDurabilityError("the line went dead")

    turn = {"tools": [call("peek", number=1), call("peek", number=2), call("unsure")]}
    run = the_run(run_turns(turn, tools=[peek, unsure]))
    assert run.status == "orphaned"
    [drive] = watched.spans("invoke_agent")
    tools = watched.spans("execute_tool")
    assert {above(span) for span in tools} == {drive.context.span_id}
    assert sorted(of(span, "seen")[0] for span in tools[:2]) == [1, 2]
    assert set(threads) == {"agentruns-peek"}
    assert of(tools[2], "agentruns.outcome", "error.type") == ("unknown", "ToolDurabilityError")


def test_a_lost_lease_and_what_came_too_late_are_counted(watched: Watched) -> None:
    @tool
    def robbed() -> str:
        """Lose the lease while at work."""
        Run.objects.update(lease_epoch=F("lease_epoch") + 1)
        return "too late"

    run_turns({"tools": [call("robbed")]}, tools=[robbed])
    assert watched.counts("agentruns.leases.lost", "gen_ai.agent.name") == {"agent-s1": 1}
    assert watched.counts("agentruns.late_results", "gen_ai.tool.name") == {"robbed": 1}
    assert of(watched.spans("invoke_agent")[0], "error.type") == ("LeaseLostError",)


@pytest.mark.parametrize("is_reported", [True, False])
def test_an_event_whose_commit_was_never_acknowledged_is_counted_once(
    is_reported: bool, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, unanswered = DatabaseStore.append, list[Batch]()

    def append_unanswered(store: DatabaseStore, batch: Batch, **options: Any) -> None:
        if unanswered or batch.rows[-1].kind != "run_completed":
            append(store, batch, **options)
            return
        unanswered.append(batch)
        with monkeypatch.context() as patch:
            if not is_reported:
                patch.setattr(telemetry, "stored", lambda batch, alias: None)
            append(store, batch, **options)
        raise OperationalError("the connection broke before the acknowledgement came")

    monkeypatch.setattr(DatabaseStore, "append", append_unanswered)
    assert run_agent(shop_agent("unanswered"), "do it", "s1").status == "completed"
    assert unanswered
    assert watched.counts("agentruns.runs.ended", "agentruns.status") == {"completed": 1}


def test_a_failed_request_tells_the_kind_of_error_and_not_its_text(watched: Watched) -> None:
    def busy(request: ModelRequest) -> ModelReply:
        raise ProviderError(
            SAID[0],
            disposition="retry",
            type="overloaded_error",
            usage={"input_tokens": 3, "output_tokens": 1},
        )

    run = the_run(run_turns(busy))
    [chat] = watched.spans("chat")
    assert of(chat, "error.type", "gen_ai.usage.input_tokens") == ("overloaded_error", 3)
    assert SAID[0] not in chat.to_json()
    forget_backoff(run)
    sweep()
    assert len({span.context.trace_id for span in watched.spans()}) == 1


def test_a_stateless_run_stays_in_its_caller_s_trace(watched: Watched) -> None:
    tracer = Told.providers[0].get_tracer("host")
    agent = Agent("quick", instructions="Be quick.", model=ScriptedModel([{"text": "hi"}]))
    with tracer.start_as_current_span("request") as request:
        run_agent(agent, "do it")
    [drive] = watched.spans("invoke_agent")
    assert above(drive) == request.get_span_context().span_id
    assert list(drive.links) == []


@pytest.mark.parametrize(("ratio", "spans"), [(0.0, 0), (1.0, 3)])
def test_the_project_s_sampler_decides_for_whole_runs(
    ratio: float, spans: int, watch: Callable[..., Watched]
) -> None:
    watched = watch(sampler=ParentBased(TraceIdRatioBased(ratio)))
    run_turns({"tools": [call("refund", cents=5000)]})
    assert len(watched.spans()) == (2 if spans else 0)
    approve(Approval.objects.get().pk, None)
    sweep()
    assert len(watched.spans()) == 2 + spans if spans else not watched.spans()
    assert watched.counts("agentruns.runs.ended", "agentruns.status") == {"completed": 1}, (
        "metrics are of all"
    )


class Raising(SpanProcessor):
    """A processor that fails at either end of a span."""

    def __init__(self, at: str) -> None:
        self.at = at

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.at == "start":
            raise RuntimeError("the collector is on fire")

    def on_end(self, span: Any) -> None:
        if self.at == "end":
            raise RuntimeError("the collector is on fire")


@pytest.mark.parametrize("at", ["start", "end"])
def test_what_fails_in_it_changes_nothing(
    at: str,
    watch: Callable[..., Watched],
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    a_run("session-of-the-first-connection")  # a process asks some things once
    queries, kinds = [], []
    for processor in (None, Raising(at)):
        if processor is not None:
            watch(processor=processor)
        with captured_statements() as captured:
            run = a_run(f"session-{len(queries)}")
        queries.append(len(captured))
        kinds.append(list(run.messages.order_by("seq").values_list("kind", "attempt")))
    assert kinds[0] == kinds[1]
    assert queries[0] == queries[1], "telemetry costs no query, and none without it"
    said = [record for record in caplog.records if record.name == "agentruns.telemetry"]
    assert [record.levelno for record in said] == [logging.ERROR], "once"


def unreachable(*statement: Any) -> None:
    raise OperationalError("no route to the database")


def test_the_age_of_the_queue(watched: Watched) -> None:
    def age() -> float:
        [point] = watched.points("agentruns.queue.age")
        return float(point.value)

    telemetry.event("sweep", {"name": "a sweeper", "found": 0})
    telemetry.event("of a later version", {})
    assert watched.counts("agentruns.sweeps", "agentruns.sweeper") == {"a sweeper": 1}
    assert age() == 0
    agent = shop_agent("waits")
    runs = [start_run(agent, "do it", f"s{number}") for number in range(3)]
    hour = {"updated_at": Now() - timedelta(hours=1)}
    Run.objects.filter(pk=runs[0].pk).update(**hour, not_before=Now() - timedelta(seconds=60))
    Run.objects.filter(pk=runs[1].pk).update(**hour, blocked_reason="nobody serves it")
    Run.objects.filter(pk=runs[2].pk).update(**hour, not_before=Now() + timedelta(hours=1))
    with CaptureQueriesContext(connection) as captured:
        assert 55 < age() < 100, "since it can be claimed"
    assert len(captured) == 1
    left: list[Any] = []
    reader = threading.Thread(
        target=lambda: left.extend([age(), connections["default"].connection]), name="agentruns-reader"
    )
    reader.start()
    reader.join()
    assert left[0] > 50 and left[1] is None, "the reader's thread keeps no connection"
    with transaction.atomic():
        assert watched.points("agentruns.queue.age") == [], "nobody's transaction is made to wait, or broken"
    with connection.execute_wrapper(unreachable):
        assert watched.points("agentruns.queue.age") == []
    sweep()
    assert age() == 0
