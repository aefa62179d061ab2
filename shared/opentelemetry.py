"""Spans by OpenTelemetry's SDK: the extra `otel`. Only `shared.tracing.open_tracing` imports this."""

from collections.abc import Mapping
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.tracing import Attributes, Kind, Span

_CONTEXT = TraceContextTextMapPropagator()
_KINDS = {"client": SpanKind.CLIENT, "server": SpanKind.SERVER}
_CLOSE_MS = 3_000
_chosen: ContextVar[int | None] = ContextVar("chosen_trace_id", default=None)


class _Ids(RandomIdGenerator):
    """Gives a trace that begins here the id that the logs already have."""

    def generate_trace_id(self) -> int:
        return _chosen.get() or super().generate_trace_id()


class Recorded:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def context(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _CONTEXT.inject(carrier, trace.set_span_in_context(self._span))
        return carrier

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        self._span.add_event(name, attributes)

    def fail(self, code: str) -> None:
        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        self._span.end()


class OpenTelemetry:
    """One process's spans, by a provider of its own: what else in the process uses OpenTelemetry is left alone."""

    records = True

    def __init__(self, service: str, processor: SpanProcessor, share: float) -> None:
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)),
            resource=Resource.create({SERVICE_NAME: service}),
            id_generator=_Ids(),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("diffleet")

    def start(self, name: str, kind: Kind, parent: Mapping[str, str], attributes: Attributes) -> Span:
        fresh = _begun_here(parent)
        context = Context() if fresh is not None else _CONTEXT.extract(dict(parent), Context())
        token = _chosen.set(fresh)
        try:
            return Recorded(self._tracer.start_span(name, context, _KINDS[kind], attributes))
        finally:
            _chosen.reset(token)

    def close(self) -> None:
        self._provider.force_flush(_CLOSE_MS)
        self._provider.shutdown()


def export_to(endpoint: str, service: str, share: float, exporter: SpanExporter | None = None) -> OpenTelemetry:
    """Return what sends spans to an OTLP receiver, e.g. http://collector:4318; only in batches, off the hot path."""
    exporter = exporter or OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=3)
    return OpenTelemetry(service, BatchSpanProcessor(exporter), share)


def _begun_here(parent: Mapping[str, str]) -> int | None:
    """Return the trace id of a context that no span stands behind, as `api.trace.trace_context` makes it."""
    match parent.get("traceparent", "").split("-"):
        case [_, trace_id, span_id, _] if trace_id[:16] == span_id:
            return int(trace_id, 16)
        case _:
            return None
