"""The metrics under the names that boards and benchmark clients made for vLLM look for.

The time to the first token is that of the first block: a diffusion model commits no earlier.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.events import Finished

_LABELS = ("model_name",)
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)


class VllmNames:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = _LABELS) -> Counter:
            return Counter(f"vllm:{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=_SECONDS, registry=registry)

        def tokens(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=_TOKENS, registry=registry)

        self.running = Gauge(
            "vllm:num_requests_running",
            "Requests that a worker runs, of those that this process follows.",
            _LABELS,
            registry=registry,
        )
        self.waiting = Gauge(
            "vllm:num_requests_waiting",
            "Requests that wait for a worker, of those that this process follows.",
            _LABELS,
            registry=registry,
        )
        self.first_token_seconds = seconds("time_to_first_token_seconds", "Time from submit to the first block.")
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generated = counter("generation_tokens", "Produced tokens of finished requests.")
        self._success = counter("request_success", "Finished requests.", (*_LABELS, "finished_reason"))
        self._seconds = seconds("e2e_request_latency_seconds", "Time from submit to the end.")
        self._token_seconds = seconds("request_time_per_output_token_seconds", "Time of a request by its tokens.")
        self._prompt_lengths = tokens("request_prompt_tokens", "Prompt tokens of a request.")
        self._lengths = tokens("request_generation_tokens", "Produced tokens of a request.")
        self._queried = counter("prefix_cache_queries", "Prompt tokens of finished requests, looked for in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens of finished requests, found in the cache.")
        self._steps = counter("diffusion_num_denoising_steps", "Denoising forwards of finished requests.")
        self._positions = counter("diffusion_num_canvas_positions", "Canvas positions of finished requests.")
        self._committed = counter("diffusion_num_committed_tokens", "Tokens that finished requests committed.")

    def count_finished(self, model: str, event: Finished, seconds: float, canvas_positions: int) -> None:
        usage = event.usage
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._generated.labels(model).inc(usage.completion_tokens)
        self._success.labels(model, "abort" if event.reason == "aborted" else event.reason).inc()
        self._seconds.labels(model).observe(seconds)
        if usage.completion_tokens:
            self._token_seconds.labels(model).observe(seconds / usage.completion_tokens)
        self._prompt_lengths.labels(model).observe(usage.prompt_tokens)
        self._lengths.labels(model).observe(usage.completion_tokens)
        self._queried.labels(model).inc(usage.prompt_tokens)
        self._hits.labels(model).inc(usage.cached_tokens)
        self._steps.labels(model).inc(usage.nfe)
        self._positions.labels(model).inc(canvas_positions)
        self._committed.labels(model).inc(usage.completion_tokens)
