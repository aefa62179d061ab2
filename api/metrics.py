"""Prometheus metrics of the front. Labels are closed sets: routes, models, statuses, reasons; never ids or users."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from api.queue_metrics import QueueMetrics
from api.vllm_metrics import VllmNames
from api.webhooks.metrics import WebhookMetrics
from shared.events import Finished

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS_PER_FORWARD = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)


class Metrics:
    """One registry for each app, so that two apps in a process do not share counts."""

    def __init__(self, vllm_names: bool = True) -> None:
        registry = self._registry = CollectorRegistry()
        self._vllm = VllmNames(registry) if vllm_names else None
        self.http_requests = Counter(
            "diffleet_http_requests", "HTTP responses.", ("route", "method", "status"), registry=registry
        )
        self.http_seconds = Histogram(
            "diffleet_http_request_seconds",
            "Time from a request's head to the end of its response.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.open_requests = Gauge(
            "diffleet_open_requests", "Generate requests that this process follows.", ("model",), registry=registry
        )
        self.first_delta_seconds = Histogram(
            "diffleet_time_to_first_block_seconds",
            "Time from submit to the first committed block.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "diffleet_request_seconds",
            "Time from submit to the terminal event.",
            ("model",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.finished = Counter(
            "diffleet_requests_finished",
            "Requests ended by their own rules, by detail.",
            ("model", "detail"),
            registry=registry,
        )
        self.failed = Counter(
            "diffleet_requests_failed", "Submitted requests ended by an error.", ("model", "code"), registry=registry
        )
        self.disconnects = Counter(
            "diffleet_disconnects", "Requests aborted because the caller left.", ("model",), registry=registry
        )
        self.prompt_tokens = Counter(
            "diffleet_prompt_tokens", "Prompt tokens of finished requests.", ("model",), registry=registry
        )
        self.cached_tokens = Counter(
            "diffleet_cached_prompt_tokens",
            "Prompt tokens of finished requests whose keys another request had written.",
            ("model",),
            registry=registry,
        )
        self.completion_tokens = Counter(
            "diffleet_completion_tokens", "Produced tokens of finished requests.", ("model",), registry=registry
        )
        self.forwards = Counter(
            "diffleet_denoising_forwards", "Denoising forwards of finished requests.", ("model",), registry=registry
        )
        self.tokens_per_forward = Histogram(
            "diffleet_tokens_per_forward",
            "Produced tokens by denoising forwards, one value for each finished request.",
            ("model",),
            buckets=_TOKENS_PER_FORWARD,
            registry=registry,
        )

        self.queued_aborts = Counter(
            "diffleet_queued_aborts",
            "Requests that this process aborted before a worker had claimed them.",
            ("model",),
            registry=registry,
        )
        self.queue = QueueMetrics(registry)
        self.webhooks = WebhookMetrics(registry)

    def count_open(self, model: str, change: int) -> None:
        """Count a request that this process begins (1) or ceases (-1) to follow."""
        self.open_requests.labels(model).inc(change)

    def count_waiting(self, model: str, change: int) -> None:
        """Count a request that no worker has begun (1), or that one has, or that was dropped before (-1)."""
        if self._vllm is not None:
            self._vllm.waiting.labels(model).inc(change)

    def count_running(self, model: str, change: int) -> None:
        """Count a request that a worker has begun (1), or that is no longer followed (-1)."""
        if self._vllm is not None:
            self._vllm.running.labels(model).inc(change)

    def count_first_block(self, model: str, seconds: float) -> None:
        self.first_delta_seconds.labels(model).observe(seconds)
        if self._vllm is not None:
            self._vllm.first_token_seconds.labels(model).observe(seconds)

    def count_finished(self, model: str, event: Finished, seconds: float, canvas_positions: int) -> None:
        usage = event.usage
        self.finished.labels(model, event.detail).inc()
        self.request_seconds.labels(model).observe(seconds)
        self.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        self.cached_tokens.labels(model).inc(usage.cached_tokens)
        self.completion_tokens.labels(model).inc(usage.completion_tokens)
        self.forwards.labels(model).inc(usage.nfe)
        if usage.nfe:
            self.tokens_per_forward.labels(model).observe(usage.completion_tokens / usage.nfe)

        if self._vllm is not None:
            self._vllm.count_finished(model, event, seconds, canvas_positions)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
