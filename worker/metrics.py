"""What the worker counts, for Prometheus."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from shared.events import Delta, Event, Failed, Finished, Snapshot, Usage
from worker.engine.ports import Load, Outbox

_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 0.8, 1.6, 5.0, 30.0)
_LOAD_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_REQUEST_NFE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)

_PHASES = ("waiting", "first_block", "streaming")


class Metrics:
    """Counters with their own registry, so that several workers may live in one process.

    Each method may be called from any thread.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str) -> Counter:
            return Counter(f"diffleet_{name}", text, ("model",), registry=self.registry).labels(model)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"diffleet_{name}", text, ("model",), registry=self.registry).labels(model)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            named = Histogram(f"diffleet_{name}", text, ("model",), registry=self.registry, buckets=buckets)
            return named.labels(model)

        self._model = model
        self._tokens = counter("generated_tokens", "Committed tokens.")
        self._blocks = counter("committed_blocks", "Committed blocks.")
        self._forwards = counter("model_forwards", "Forwards of the model, whatever their number of rows.")
        self._prompt_tokens = counter("finished_prompt_tokens", "Prompt tokens of finished requests.")
        self._nfe = counter("request_forwards", "Denoising forwards (NFE) of finished requests, summed over requests.")
        self._finished_tokens = counter("finished_tokens", "Tokens of finished requests.")
        self._claims = counter("claims", "Requests claimed.")
        self._reclaims = counter("reclaims", "Claims of requests that another claim had begun.")
        self._fenced = counter("fenced", "Requests lost to another worker.")
        self._fenced_writes = counter("fenced_writes", "Writes refused because the request is another worker's.")
        self._duplicates = counter("duplicate_writes", "Writes that were there already: their first answer was lost.")
        self._rewritten = counter("logs_rewritten", "Event logs that had fallen back and were written again.")
        self._handed_back = counter("handed_back", "Requests handed back.")
        self._outages = counter("redis_errors", "Calls to Redis that failed and were tried again.")
        self._malformed = gauge("malformed_entries", "Entries removed from the queue that no submit had written.")
        self._previews_dropped = counter("previews_dropped", "Snapshots that were not published.")
        self._terminal = Counter(
            "diffleet_requests", "Requests by the way they ended.", ("model", "outcome"), registry=self.registry
        )
        self._aborts = Counter(
            "diffleet_aborts",
            "Claimed requests that were aborted, by how far they had come.",
            ("model", "phase"),
            registry=self.registry,
        )
        for phase in _PHASES:
            self._aborts.labels(model, phase)
        self._forward_seconds = counter(
            "forward_seconds", "Time of the steps that was spent in the forward, its waiting for the device included."
        )
        self._prefix_hits = counter("prefix_hit_tokens", "Prompt tokens not prefilled, for their keys were cached.")
        self._step_seconds = histogram("step_seconds", "Duration of one engine step.", _STEP_BUCKETS)
        self._request_nfe = histogram("request_nfe", "Denoising forwards of one request.", _REQUEST_NFE_BUCKETS)
        self._ranks = gauge("ranks", "Processes that share the model, each with a device of its own.")
        self._rows = gauge("rows_running", "Requests being decoded.")
        self._waiting = gauge("rows_waiting", "Claimed requests that wait for a row or for pages.")
        self._pages_free = gauge("kv_pages_free", "Free KV pages.")
        self._pages = gauge("kv_pages", "KV pages.")
        self._preemptions = gauge("preemptions", "Times that a row gave its pages to an older one.")
        self._tokens_per_forward = gauge(
            "mean_tokens_per_forward", "Tokens of finished requests over their denoising forwards, since the start."
        )
        self._adapter_seconds = histogram(
            "adapter_load_seconds", "Time to load one adapter, its check included.", _LOAD_BUCKETS
        )
        self._adapter_failures = counter("adapter_load_failures", "Adapters that could not be loaded.")
        self._adapter_evictions = counter("adapter_evictions", "Adapters let go of for the room of others.")
        self._adapters = gauge("adapters_resident", "Adapters that are loaded.")
        self._adapter_bytes = gauge("adapter_bytes", "Memory of the loaded adapters, as they lie in the store.")
        self._slots_free = gauge("slots_free", "Requests that could be claimed on top of those held.")
        self._beat_age = gauge("beat_age_seconds", "Time since the last heartbeat that Redis answered.")
        self._forward_s: Callable[[], float] = lambda: 0.0
        self._forward_seen_s = 0.0
        self._hits_seen = 0
        self._finished_total = 0
        self.tokens = 0
        """Committed tokens."""
        self.reclaims = 0
        """Claims of requests that another claim had begun."""
        self._nfe_total = 0

    def show_ranks(self, count: int) -> None:
        self._ranks.set(count)

    def watch(
        self, slots_free: Callable[[], float], beat_age_s: Callable[[], float], forward_s: Callable[[], float]
    ) -> None:
        """Ask these from now on: the first two at each scrape, the time of all forwards so far after each step."""
        self._forward_s = forward_s
        self._slots_free.set_function(slots_free)
        self._beat_age.set_function(beat_age_s)

    def count_adapter_load(self, seconds: float) -> None:
        self._adapter_seconds.observe(seconds)

    def count_adapter_failure(self) -> None:
        self._adapter_failures.inc()

    def count_adapter_eviction(self) -> None:
        self._adapter_evictions.inc()

    def show_adapters(self, count: int, size: int) -> None:
        self._adapters.set(count)
        self._adapter_bytes.set(size)

    def count_step(self, outbox: Outbox, load: Load, seconds: float) -> None:
        """Account for one step that ran `seconds`."""
        self._forwards.inc()
        total_s = self._forward_s()
        self._forward_seconds.inc(total_s - self._forward_seen_s)
        self._forward_seen_s = total_s
        self._step_seconds.observe(seconds)
        self._count_events(outbox.events)
        self.show(load)

    def show(self, load: Load) -> None:
        self._rows.set(load.running)
        self._waiting.set(load.waiting)
        self._pages_free.set(load.free_pages)
        self._pages.set(load.total_pages)
        self._preemptions.set(load.preemptions)
        self._prefix_hits.inc(load.cached_tokens - self._hits_seen)
        self._hits_seen = load.cached_tokens

    def show_malformed(self, count: int) -> None:
        self._malformed.set(count)

    def count_claim(self, again: bool) -> None:
        self._claims.inc()
        if again:
            self.reclaims += 1
            self._reclaims.inc()

    def count_fenced(self) -> None:
        self._fenced.inc()

    def count_fenced_write(self) -> None:
        self._fenced_writes.inc()

    def count_duplicate(self) -> None:
        self._duplicates.inc()

    def count_rewritten(self) -> None:
        self._rewritten.inc()

    def count_hand_back(self) -> None:
        self._handed_back.inc()

    def count_outage(self) -> None:
        self._outages.inc()

    def count_dropped_preview(self) -> None:
        self._previews_dropped.inc()

    def count_refused(self, code: str) -> None:
        """Account for a request that ended before it reached the engine."""
        self._terminal.labels(self._model, code).inc()

    def render(self) -> bytes:
        """Return the text format."""
        return generate_latest(self.registry)

    def _count_events(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Delta():
                    self.tokens += len(event.token_ids)
                    self._tokens.inc(len(event.token_ids))
                    self._blocks.inc()
                case Finished():
                    self._terminal.labels(self._model, event.detail).inc()
                    self._account(event)
                case Failed():
                    self._terminal.labels(self._model, event.code).inc()
                case Snapshot():
                    pass
                case _:
                    raise AssertionError(f"the engine does not make {event.t} events")

    def _account(self, event: Finished) -> None:
        usage = event.usage
        if event.reason == "aborted":
            self._aborts.labels(self._model, _phase(usage)).inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._finished_tokens.inc(usage.completion_tokens)
        self._nfe.inc(usage.nfe)
        self._request_nfe.observe(usage.nfe)
        self._finished_total += usage.completion_tokens
        self._nfe_total += usage.nfe
        if self._nfe_total:
            self._tokens_per_forward.set(self._finished_total / self._nfe_total)


def _phase(usage: Usage) -> str:
    """Return how far a request had come: waiting for a row or its prefill, in its first block, or behind it."""
    if not usage.nfe:
        return "waiting"
    return "streaming" if usage.blocks else "first_block"
