"""Spans of one trace across processes, and log lines that name it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, Self

import grpc
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from antiphon.service.web import web_server
from antiphon.telemetry import export, tracing
from antiphon.telemetry import log as logs
from antiphon.telemetry.export import OtlpTarget
from antiphon.telemetry.tracing import request_context, span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.trace import SpanContext

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT[:-1] + "0"


class Collector:
    def __init__(self, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = export.start_with(
            self._exporter, service="gateway", instance="gateway-0", ratio=ratio
        )

    def spans(self) -> dict[str, ReadableSpan]:
        self._provider.force_flush()
        return {found.name: found for found in self._exporter.get_finished_spans()}

    def stop(self) -> None:
        export.stop(self._provider)


def parent_of(found: ReadableSpan) -> int | None:
    return found.parent.span_id if found.parent else None


def context_of(found: ReadableSpan) -> SpanContext:
    context = found.get_span_context()
    assert context is not None
    return context


@pytest.fixture
def collector() -> Generator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


def test_spans_across_processes_share_a_trace_and_each_has_its_parent(collector: Collector) -> None:
    with span("gateway", PARENT) as gateway, span("submit", tokens=12):
        carried = tracing.current()
    with span("scheduler", carried):
        pass
    spans = collector.spans()
    assert {context_of(found).trace_id for found in spans.values()} == {int(TRACE, 16)}
    assert parent_of(spans["submit"]) == context_of(spans["gateway"]).span_id
    assert parent_of(spans["scheduler"]) == context_of(spans["submit"]).span_id
    assert dict(spans["submit"].attributes or {}) == {"tokens": 12}
    assert gateway.traceparent is not None
    assert gateway.traceparent.startswith(f"00-{TRACE}-")
    assert tracing.current() is None


def test_error_is_on_its_span(collector: Collector) -> None:
    with pytest.raises(ValueError, match="wrong"), span("failing"):
        raise ValueError("wrong")
    assert collector.spans()["failing"].status.description == "ValueError"


def test_parent_that_was_not_sampled_is_not_traced_below(collector: Collector) -> None:
    with span("gateway", NOT_SAMPLED) as here:
        assert here.traceparent is not None
        assert here.traceparent.endswith("-00")
    assert collector.spans() == {}


@pytest.mark.parametrize("text", ["", "garbage", PARENT.upper(), "00-" + "0" * 32 + PARENT[35:]])
def test_parent_that_is_not_w3c_begins_a_trace_of_its_own(collector: Collector, text: str) -> None:
    with span("gateway", text):
        pass
    assert collector.spans()["gateway"].parent is None


def test_work_without_a_block_has_a_beginning_and_an_end(collector: Collector) -> None:
    waiting = span("queue", PARENT).start()
    assert tracing.current() is None
    waiting.set(position=3)
    waiting.end()
    assert dict(collector.spans()["queue"].attributes or {}) == {"position": 3}


def test_ratio_decides_for_traces_that_begin_here() -> None:
    collector = Collector(ratio=0.1)
    for n in range(300):
        with span(f"request-{n}"):
            pass
    kept = len(collector.spans())
    collector.stop()
    assert 5 <= kept <= 90


def export_to(endpoint: str) -> TracerProvider:
    return export.start(endpoint=endpoint, service="gateway", instance="gateway-0", ratio=1.0)


async def test_collector_gets_the_spans_over_http() -> None:
    got: list[tuple[str, bytes]] = []

    async def take(request: web.Request) -> web.Response:
        got.append((request.path, await request.read()))
        return web.Response()

    app = web.Application()
    app.router.add_post("/{path:.*}", take)
    async with web_server(web.AppRunner(app), "127.0.0.1", 0) as port:
        provider = export_to(f"http://127.0.0.1:{port}")
        with span("gateway.chat", PARENT):
            pass
        await asyncio.to_thread(export.stop, provider)
    assert [path for path, _ in got] == ["/v1/traces"]
    assert b"gateway.chat" in got[0][1]
    assert bytes.fromhex(TRACE) in got[0][1]


class GrpcCollector(TraceServiceServicer):
    """Takes spans over OTLP/gRPC on a free port."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._server = grpc.server(ThreadPoolExecutor(max_workers=1))
        add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def Export(  # noqa: N802
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.names += [span.name for span in scope.spans]
        return ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=1.0).wait()


@pytest.mark.parametrize("scheme", ["", "grpc://"])
async def test_collector_gets_the_spans_over_grpc(scheme: str) -> None:
    with GrpcCollector() as collector:
        provider = export_to(f"{scheme}127.0.0.1:{collector.port}")
        with span("gateway.chat"):
            pass
        await asyncio.to_thread(export.stop, provider)
    assert collector.names == ["gateway.chat"]


@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("localhost:4317", OtlpTarget(grpc=True, address="localhost:4317", insecure=True)),
        ("collector", OtlpTarget(grpc=True, address="collector:4317", insecure=True)),
        ("[::1]:5000", OtlpTarget(grpc=True, address="[::1]:5000", insecure=True)),
        ("grpcs://a:443", OtlpTarget(grpc=True, address="a:443", insecure=False)),
        ("http://a:4317", OtlpTarget(grpc=True, address="a:4317", insecure=True)),
        ("https://a:4317/", OtlpTarget(grpc=True, address="a:4317", insecure=False)),
        ("a:4318", OtlpTarget(grpc=False, address="http://a:4318/v1/traces")),
        ("http://a:4318", OtlpTarget(grpc=False, address="http://a:4318/v1/traces")),
        ("http://a:4317/v1/traces", OtlpTarget(grpc=False, address="http://a:4317/v1/traces")),
        ("https://a/otlp/", OtlpTarget(grpc=False, address="https://a/otlp/v1/traces")),
    ],
)
def test_form_of_an_endpoint_names_its_transport(endpoint: str, target: OtlpTarget) -> None:
    assert OtlpTarget.parse(endpoint) == target


def test_collector_that_is_away_does_not_hold_up_the_end() -> None:
    provider = export_to("http://127.0.0.1:9")
    with span("gateway.chat"):
        pass
    since = time.monotonic()
    export.stop(provider)
    assert time.monotonic() - since < 3.5


def test_without_a_collector_the_parent_is_passed_on_and_costs_little() -> None:
    with span("gateway", PARENT), span("submit") as here:
        assert here.traceparent == PARENT
    best_s = min(_time_of_spans(1000) for _ in range(5))
    assert best_s / 1000 < 10e-6


def _time_of_spans(count: int) -> float:
    since = time.process_time()
    for _ in range(count):
        with span("gateway.submit", PARENT, tokens=12):
            pass
    return time.process_time() - since


log = logging.getLogger("antiphon.test")

Form = Literal["text", "json"]
Written = Callable[[Form], io.StringIO]


@pytest.fixture
def written() -> Generator[Written]:
    root = logging.getLogger()
    before = root.handlers[:], root.level

    def set_up(form: Form) -> io.StringIO:
        stream = io.StringIO()
        logs.set_up(level="info", form=form, instance="gateway-0", stream=stream)
        return stream

    yield set_up
    root.handlers[:], root.level = before
    logging.captureWarnings(capture=False)


def test_json_has_the_event_its_fields_the_request_and_the_trace(written: Written) -> None:
    stream = written("json")
    with request_context("r-1"), span("gateway.submit", PARENT):
        log.info("request admitted", extra={"prompt_tokens": 12, "level": "hidden"})
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["prompt_tokens"]) == ("request admitted", "info", 12)
    assert (line["request_id"], line["trace_id"], line["instance"]) == ("r-1", TRACE, "gateway-0")
    stream = written("json")
    log.info("odd", extra={"where": io, "bytes": b"\xff", "number": float("nan")})
    assert json.loads(stream.getvalue())["where"] == str(io)


@pytest.mark.parametrize("form", ["text", "json"])
def test_traceback_and_a_line_break_stay_in_one_line(written: Written, form: Form) -> None:
    stream = written(form)
    try:
        int("two\nlines")
    except ValueError:
        log.exception("handler failed", extra={"prompt": "a\nb c", "route": "x"})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "ValueError" in text
    if form == "text":
        assert ' prompt="a\\nb c"' in text
        assert " route=x" in text


def test_level_holds_and_outside_of_a_request_there_is_no_request(written: Written) -> None:
    stream = written("text")
    log.debug("not written")
    log.info("bus joined")
    assert stream.getvalue().endswith(" INFO gateway-0 antiphon.test: bus joined\n")
