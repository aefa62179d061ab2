"""Spans kept in memory."""

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.opentelemetry import OpenTelemetry


class Spans:
    def __init__(self, share: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = OpenTelemetry("test", SimpleSpanProcessor(self._exporter), share)

    @property
    def ended(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


def traceparent(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
