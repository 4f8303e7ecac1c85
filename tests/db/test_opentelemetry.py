"""Spans and metrics of real runs, as OpenTelemetry's own SDK collects them in memory, and log records."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
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

from agentruns import approve, deny, resolve_orphan, run_agent, start_run, tool
from agentruns.contrib.opentelemetry import OpenTelemetry, run_trace
from agentruns.journal import telemetry
from agentruns.models import Approval, Message, Run
from agentruns.providers.base import ProviderError
from agentruns.services.sweep import sweep
from agentruns.utils.redaction import RunFilter, bound, driven
from tests.crash.child import Orders, serve
from tests.crash.processes import expire_lease, start as start_child
from tests.db.doubts import wire
from tests.db.dying import elsewhere
from tests.db.failures import start
from tests.db.helpers import forget_backoff, run_turns, the_run
from tests.programs import ROOT
from tests.shop.agents import TOOLS, call, shop_agent
from tests.statements import broken_commit, captured_statements

pytestmark = pytest.mark.django_db(transaction=True)

SPANS = "AGENTRUNS_TEST_SPANS"  # the file that a child process writes its spans to


@dataclass
class Watched:
    """What the SDK has collected."""

    tracers: TracerProvider
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def spans(self, start: str = "") -> list[ReadableSpan]:
        """List the spans whose names start so, in the order in which they ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith(start)]

    def traces(self) -> set[int]:
        """Collect the ids of the traces that the spans are in."""
        return {span.context.trace_id for span in self.spans()}

    def points(self, metric: str) -> list[Any]:
        """List the data points of a metric."""
        data = self.reader.get_metrics_data()
        of = [resource.scope_metrics for resource in data.resource_metrics] if data else []
        found = [one for scopes in of for scope in scopes for one in scope.metrics]
        return [point for one in found if one.name == metric for point in one.data.data_points]

    def counts(self, metric: str, by: str) -> dict[Any, int]:
        """Count by one of a counter's attributes."""
        return {point.attributes[by]: point.value for point in self.points(metric)}


class WithKey(OpenTelemetry):
    session_key = True


in_use: list[OpenTelemetry] = []  # the last one is the running test's
recorded = partial(in_use.__getitem__, -1)


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


def serve_traced(orders: Orders, pipe: Connection) -> None:
    """Do what a forked child is to do, with its spans in a file."""
    from agentruns.conf import settings

    settings.TELEMETRY = f"{__name__}.to_file"
    serve(orders, pipe)


@pytest.fixture
def watch(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    """Build a function that starts to watch, with a sampler or a processor of a test's choice."""
    monkeypatch.setattr(telemetry, "_made", {})
    monkeypatch.setattr(telemetry, "_complained", set())
    meters: list[MeterProvider] = []

    def begin(
        sampler: Sampler | None = None,
        processor: SpanProcessor | None = None,
        kind: type[OpenTelemetry] = OpenTelemetry,
    ) -> Watched:
        watched = Watched(TracerProvider(sampler=sampler, shutdown_on_exit=False))
        watched.tracers.add_span_processor(processor or SimpleSpanProcessor(watched.exporter))
        meters.append(MeterProvider([watched.reader], shutdown_on_exit=False))
        in_use.append(kind(watched.tracers, meters[-1]))
        settings.AGENTRUNS_TELEMETRY = f"{__name__}.recorded"
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
    turn = {"text": SAID[0], "tools": [call("lookup", number=SAID[1]), call("broken")], "usage": usage}
    agent = shop_agent(f"agent-{Run.objects.count()}", turn)
    return the_run(run_agent(agent, SAID[3], session, idempotency_key=session))


def test_a_drive_its_requests_and_its_tools_are_spans_and_metrics_without_contents(watched: Watched) -> None:
    run = a_run()
    model = "chat agentruns.providers.scripted.ScriptedModel"
    drive = watched.spans("invoke_agent")[0]
    chats, tools = watched.spans("chat"), watched.spans("execute_tool")
    names = [model, "execute_tool lookup", "execute_tool broken", model, "invoke_agent agent-0"]
    assert [span.name for span in watched.spans()] == names
    assert (above(drive), watched.traces()) == (run_trace(str(run.pk))[1], {run_trace(run.pk)[0]})
    assert {above(span) for span in chats + tools} == {drive.context.span_id}
    about = {of(span, "agentruns.run.id", "agentruns.epoch") for span in watched.spans()}
    assert about == {(str(run.pk), 1)}
    assert of(drive, "gen_ai.agent.name", "agentruns.status") == (run.agent, "completed")
    usage = [f"gen_ai.usage.{kind}_tokens" for kind in ("input", "cache_read.input", "output")]
    assert of(chats[0], "gen_ai.response.finish_reasons", *usage) == (("tool_use",), 95, 90, 7)
    ids = list(run.messages.filter(kind="tool_started").order_by("seq").values_list("call_id", flat=True))
    facts = ("gen_ai.tool.call.id", "agentruns.outcome", "agentruns.attempt", "error.type")
    assert of(tools[0], *facts) == (ids[0], "ok", 1, None)
    assert of(tools[1], *facts) == (ids[1], "error", 1, "ValueError")
    assert [span.status.is_ok for span in tools] == [True, False]
    everything = "".join(span.to_json() for span in watched.spans())
    assert [text for text in SAID if text in everything] == []

    tokens = watched.points("gen_ai.client.token.usage")
    assert {point.attributes["gen_ai.token.type"] for point in tokens} == {"input", "output"}
    assert max(point.max for point in tokens) == 95
    times = watched.points("gen_ai.execute_tool.duration")
    counts = {point.attributes["gen_ai.tool.name"]: point.count for point in times}
    assert counts == {"lookup": 1, "broken": 1}
    assert sum(point.count for point in watched.points("gen_ai.client.operation.duration")) == 2
    assert watched.points("agentruns.step.duration")[0].count == 2
    assert watched.points("agentruns.drive.duration")[0].count == 1
    assert watched.counts("agentruns.runs.ended", "agentruns.status") == {"completed": 1}
    everything = str(watched.reader.get_metrics_data() or "") + str(tokens)
    assert str(run.pk) not in everything, "an id would make a time series of each run"


def test_an_approval_an_hour_later_is_in_the_same_trace(watched: Watched) -> None:
    run = the_run(run_turns({"tools": [call("refund", cents=5000)]}))
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(7, 8, False))):  # the request of a web page
        with transaction.atomic():
            deny(Approval.objects.get().pk, None, "no")
            transaction.set_rollback(True)  # such a decision is none
        approve(Approval.objects.get().pk, None, arguments={"cents": 100})
        sweep()
    first, second = watched.spans("invoke_agent")
    assert [of(span, "agentruns.status")[0] for span in (first, second)] == ["awaiting-approval", "completed"]
    assert watched.traces() == {run_trace(run.pk)[0]}
    assert [(link.context.trace_id, link.context.span_id) for link in second.links] == [(7, 8)]
    assert list(first.links) == []
    assert watched.counts("agentruns.decisions", "agentruns.verb") == {"edit": 1}


def test_a_killed_process_and_the_one_that_takes_over_share_a_trace(watched: Watched, tmp_path: Path) -> None:
    told = {SPANS: str(tmp_path / "spans"), "SHOP_KILL": "post:after"}
    child = start_child("run", "calls-post", "s1", serve=serve_traced, **told)
    assert child.ended() == -9
    child.close()
    run = Run.objects.get()
    expire_lease(run)
    assert sweep().waiting == 1
    trace_id, span_id = run_trace(run.pk)
    first = (tmp_path / "spans").read_text().split("\n")[0]
    assert first.startswith(f"{trace_id:032x} ") and " chat " in first, "the drive and the tool never ended"
    [taken] = watched.spans("invoke_agent")
    assert (taken.context.trace_id, above(taken)) == (trace_id, span_id)
    assert of(taken, "agentruns.took_over", "agentruns.epoch", "agentruns.status") == (True, 2, "orphaned")
    assert [event.name for event in taken.events] == ["agentruns.orphan"]
    call_id = Message.objects.get(kind="orphan_found").call_id
    resolve_orphan(run.pk, call_id, "occurred", None, result="posted")
    sweep()
    assert watched.counts("agentruns.orphans", "agentruns.action") == {"held": 1}
    assert watched.counts("agentruns.verdicts", "agentruns.verdict") == {"occurred": 1}
    assert watched.traces() == {trace_id}


def test_parallel_calls_and_one_of_unknown_outcome_are_below_the_drive(watched: Watched) -> None:
    threads: list[str] = []

    @tool(safe_to_retry=True, parallel=True)
    def peek(number: int) -> str:
        """Look, in a thread of its own, in which the tool's span is the current one."""
        threads.append(threading.current_thread().name)
        trace.get_current_span().set_attribute("seen", number)
        return "seen"

    turn = {"tools": [call("peek", number=1), call("peek", number=2), call("wire", text="x")]}
    run = the_run(run_turns(turn, tools=[peek, wire]))
    assert run.status == "orphaned"
    [drive] = watched.spans("invoke_agent")
    tools = watched.spans("execute_tool")
    assert {above(span) for span in tools} == {drive.context.span_id}
    assert sorted(of(span, "seen")[0] for span in tools[:2]) == [1, 2]
    assert set(threads) == {"agentruns-peek"}
    assert of(tools[2], "agentruns.outcome", "error.type") == ("unknown", "ToolDurabilityError")


def test_a_failed_request_a_lost_lease_and_what_came_too_late_are_told(watched: Watched) -> None:
    @tool
    def robbed() -> str:
        Run.objects.update(lease_epoch=F("lease_epoch") + 1)
        return "too late"

    used = {"input_tokens": 3, "output_tokens": 1}
    run = start([ProviderError(SAID[0], disposition="retry", type="overloaded_error", usage=used)])
    [chat] = watched.spans("chat")
    assert of(chat, "error.type", "gen_ai.usage.input_tokens") == ("overloaded_error", 3)
    assert SAID[0] not in chat.to_json(), "the kind of the error and not its text"
    forget_backoff(run)
    sweep()
    assert len(watched.traces()) == 1
    run_turns({"tools": [call("robbed")]}, tools=[robbed], session="s2")
    assert watched.counts("agentruns.leases.lost", "gen_ai.agent.name") == {"agent-s2": 1}
    assert watched.counts("agentruns.late_results", "gen_ai.tool.name") == {"robbed": 1}
    assert of(watched.spans("invoke_agent")[2], "error.type") == ("LeaseLostError",)


def test_an_event_whose_commit_was_never_acknowledged_is_counted_once(watched: Watched) -> None:
    for nth in (1, 2, 3):
        with broken_commit(nth, went_through=True):
            assert run_agent(shop_agent("unanswered"), "do it", f"s{nth}").status == "completed"
        assert watched.counts("agentruns.runs.ended", "agentruns.status") == {"completed": nth}


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_project_s_sampler_decides_for_whole_runs(ratio: float, watch: Callable[..., Watched]) -> None:
    """A stateless run stays in its caller's trace; a session's key is told only when asked for."""
    watched = watch(sampler=ParentBased(TraceIdRatioBased(ratio)), kind=WithKey)
    run_turns({"tools": [call("refund", cents=5000)]}, session=SAID[4])
    assert len(watched.spans()) == 2 * ratio
    approve(Approval.objects.get().pk, None)
    sweep()
    assert len(watched.spans()) == 5 * ratio
    ended = watched.counts("agentruns.runs.ended", "agentruns.status")
    assert ended == {"completed": 1}, "metrics are of all"
    for drive in watched.spans("invoke_agent"):
        assert of(drive, "agentruns.session.key") == (SAID[4],)
    with watched.tracers.get_tracer("host").start_as_current_span("request") as request:
        run_agent(shop_agent("quick", tools=[]), "do it")
    for drive in watched.spans("invoke_agent")[2:]:
        assert (above(drive), list(drive.links)) == (request.get_span_context().span_id, [])


def on_fire(*about: Any, **more: Any) -> None:
    raise RuntimeError("the collector is on fire")


@pytest.mark.parametrize("at", ["on_start", "on_end"])
def test_what_fails_in_it_changes_nothing(
    at: str, watch: Callable[..., Watched], caplog: pytest.LogCaptureFixture
) -> None:
    a_run("session-of-the-first-connection")  # a process asks some things once
    queries, kinds = [], []
    for is_watched in (False, True):
        if is_watched:
            processor = SpanProcessor()
            setattr(processor, at, on_fire)
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
    assert (watched.counts("agentruns.sweeps", "agentruns.sweeper"), age()) == ({"a sweeper": 1}, 0)
    agent = shop_agent("waits")
    runs = [start_run(agent, "do it", f"s{number}") for number in range(3)]
    hour = {"updated_at": Now() - timedelta(hours=1)}
    Run.objects.filter(pk=runs[0].pk).update(**hour, not_before=Now() - timedelta(seconds=60))
    Run.objects.filter(pk=runs[1].pk).update(**hour, blocked_reason="nobody serves it")
    Run.objects.filter(pk=runs[2].pk).update(**hour, not_before=Now() + timedelta(hours=1))
    with CaptureQueriesContext(connection) as captured:
        assert 55 < age() < 3000, "since it can be claimed"
    assert len(captured) == 2, "one for each gauge"
    assert [point.value for point in watched.points("agentruns.runs.blocked")] == [1]
    late, left = elsewhere(lambda: (age(), connections["default"].connection))
    assert late > 50 and left is None, "the reader's thread keeps no connection"
    with transaction.atomic():
        assert watched.points("agentruns.queue.age") == [], "nobody's transaction is made to wait, or broken"
    with connection.execute_wrapper(unreachable):
        assert watched.points("agentruns.queue.age") == []
    sweep()
    assert age() == 0


def about(record: Any) -> tuple[str, int]:
    return record.run_id, record.epoch


@tool(safe_to_retry=True, parallel=True)
def fragile(number: int) -> str:
    """Fail in a thread of its own, of which the project's own logger says something."""
    logging.getLogger("shop").warning("looking at %s", number)
    raise ValueError("nothing there")


def test_records_of_a_drive_name_its_run_and_epoch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(on_handler := RunFilter())
    try:
        turn = {"tools": [call("broken"), call("fragile", number=1), call("fragile", number=2)]}
        run = the_run(run_turns(turn, {"tools": [call("refund", cents=5000)]}, tools=[*TOOLS, fragile]))
        approve(Approval.objects.get().pk, None)
        sweep()
    finally:
        caplog.handler.removeFilter(on_handler)
    failures = [record for record in caplog.records if record.getMessage().startswith("Tool failed")]
    assert [about(record) for record in failures] == [(str(run.pk), 1)] * 3
    own = [record for record in caplog.records if record.name == "shop"]
    assert [about(record) for record in own] == [(str(run.pk), 1)] * 2
    assert driven() == ("", 0), "nothing is left behind"
    record = logging.makeLogRecord({"msg": "hello"})
    on_handler.filter(record)
    assert about(record) == ("", 0), "it is about no run"
    own = logging.makeLogRecord({"msg": "hello", "run_id": "mine", "epoch": 3})
    with bound("another", 4):
        on_handler.filter(own)
    assert about(own) == ("mine", 3), "it knows its run"


def test_the_page_s_settings_write_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/observability.md are run as they are."""
    page = (ROOT / "docs" / "observability.md").read_text()
    formatter, configuration = (
        next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if word in block)
        for word in ("class JsonFormatter", "LOGGING = ")
    )
    names: dict[str, Any] = {}
    exec(formatter, names)
    exec(configuration, names)
    written = io.StringIO()
    config = names["LOGGING"]
    config["formatters"]["json"]["()"] = names["JsonFormatter"]
    config["handlers"]["json"]["stream"] = written
    config["loggers"] = {"agentruns": config.pop("root")}  # the root logger is pytest's
    logging.config.dictConfig({**config, "disable_existing_loggers": False})
    try:
        run_turns({"tools": [call("broken")]})
    finally:
        logger = logging.getLogger("agentruns")
        logger.setLevel(logging.NOTSET)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
    [line] = written.getvalue().splitlines()
    said = json.loads(line)
    assert (said["run_id"], said["epoch"], said["level"]) == (str(Run.objects.get().pk), 1, "ERROR")
    assert said["logger"] == "agentruns.executor" and "on fire" in said["error"]
