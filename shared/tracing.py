"""Spans of requests, from the front to the worker; nothing is recorded unless an endpoint is set.

The trace context travels in the command (`Generate.trace`). Neither prompt nor answer, nor anything else that a caller
writes as text, becomes an attribute. Names follow the semantic conventions for generative AI
(github.com/open-telemetry/semantic-conventions-genai) where they have one, else begin with `diffleet.`.
"""

from collections.abc import Mapping
from typing import Literal, Protocol

from shared.commands import Generate
from shared.events import Failed, Finished

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]
Kind = Literal["client", "server"]


class TracingUnavailable(Exception):
    """Tracing was asked for, and the packages for it are not installed."""


class Span(Protocol):
    @property
    def context(self) -> dict[str, str]:
        """What a child in another process needs: `traceparent`, perhaps `tracestate`."""
        ...

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes) -> None: ...

    def fail(self, code: str) -> None:
        """Mark as an error of this type."""
        ...

    def end(self) -> None: ...


class Tracing(Protocol):
    @property
    def records(self) -> bool: ...

    def start(self, name: str, kind: Kind, parent: Mapping[str, str], attributes: Attributes) -> Span: ...

    def close(self) -> None:
        """Send what was recorded; takes a few seconds at most."""
        ...


class _NoSpan:
    def __init__(self, parent: Mapping[str, str]) -> None:
        self.context = dict(parent)

    def set(self, attributes: Attributes) -> None:
        pass

    def event(self, name: str, attributes: Attributes) -> None:
        pass

    def fail(self, code: str) -> None:
        pass

    def end(self) -> None:
        pass


NO_SPAN: Span = _NoSpan({})


class Untraced:
    """Records nothing, and passes contexts on as they are."""

    records = False

    def start(self, name: str, kind: Kind, parent: Mapping[str, str], attributes: Attributes) -> Span:
        return _NoSpan(parent)

    def close(self) -> None:
        pass


def require_tracing(endpoint: str | None) -> None:
    """Raise `TracingUnavailable` if spans are to be sent and cannot be."""
    if endpoint is None:
        return
    try:
        import shared.opentelemetry  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise TracingUnavailable("otlp_endpoint: needs the extra otel, pip install 'diffleet[otel]'") from error


def open_tracing(service: str, endpoint: str | None, share: float) -> Tracing:
    """Return what records and exports the spans of a process; without an endpoint it does neither.

    `share` of the traces that begin here are kept; of those that a caller has begun, the ones that it keeps. Raises
    `TracingUnavailable`.
    """
    require_tracing(endpoint)
    if endpoint is None:
        return Untraced()
    from shared.opentelemetry import export_to

    return export_to(endpoint, service, share)


def asked(command: Generate) -> dict[str, Value]:
    """Return the attributes of a request before it has run."""
    operation = "embeddings" if command.embed else "generate_content"
    found: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "diffleet",
        "gen_ai.request.model": command.model,
        "gen_ai.response.id": command.id,
        "gen_ai.request.max_tokens": command.limits.max_tokens,
        "gen_ai.request.temperature": command.sampling.temperature,
        "gen_ai.request.top_p": command.sampling.top_p,
        "gen_ai.request.top_k": command.sampling.top_k,
        "gen_ai.request.seed": command.sampling.seed,
        "diffleet.lane": command.lane,
    }
    if command.decoding is not None:
        found["diffleet.strategy"] = command.decoding.strategy
    return found


def span_name(command: Generate) -> str:
    return f"{'embeddings' if command.embed else 'generate_content'} {command.model}"


def close_with(span: Span, end: Finished | Failed) -> None:
    """Put the end of a request on its span; the span stays open."""
    match end:
        case Finished():
            span.set(
                {
                    "gen_ai.response.finish_reasons": (end.reason,),
                    "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": end.usage.completion_tokens,
                    "diffleet.finish_detail": end.detail,
                    "diffleet.forwards": end.usage.nfe,
                    "diffleet.blocks": end.usage.blocks,
                }
            )
        case Failed():
            span.fail(end.code)
