"""What a request has produced so far, gathered from its events."""

from collections.abc import Callable
from typing import Any, assert_never

from api.relay import Follow, Progress
from shared.events import Delta, Finished, Queued, Snapshot, Started, Usage


class Transcript:
    """`clock` tells in seconds when the event at hand came, `began` is its reading at the submit."""

    def __init__(self, began: float, clock: Callable[[], float], keep_deltas: bool = False) -> None:
        self._keep_deltas = keep_deltas
        self._began = began
        self._clock = clock
        self._texts: list[str] = []
        self.deltas: list[Delta] = []
        """Only where they are to be kept: an open stream has no use for what it has sent."""
        self.token_ids: list[int] = []
        self.nfe = 0
        self.end: Finished | None = None
        self._started_ms: float | None = None
        self._first_ms: float | None = None
        self._total_ms: float | None = None

    @classmethod
    def of(cls, follow: Follow, keep_deltas: bool = False) -> "Transcript":
        return cls(follow.began, lambda: follow.came, keep_deltas)

    def observe(self, event: Progress) -> None:
        match event:
            case Queued() | Snapshot():
                pass
            case Started():
                if self._started_ms is None:
                    self._started_ms = self._elapsed_ms() if event.queued_ms is None else float(event.queued_ms)
            case Delta():
                self._first_ms = self._elapsed_ms() if self._first_ms is None else self._first_ms
                self._texts.append(event.text)
                if self._keep_deltas:
                    self.deltas.append(event)
                self.token_ids += event.token_ids
                self.nfe = event.nfe
            case Finished():
                self.end = event
                self.nfe = event.usage.nfe
                self._total_ms = self._elapsed_ms()
            case _:
                assert_never(event)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def timings(self) -> dict[str, float | None]:
        """Milliseconds since the submit; None for what was not seen (`queue_ms` comes from a preview).

        `queue_ms` ends with the claim by a worker, `first_block_ms` with the first committed block.
        """
        return {"queue_ms": self._started_ms, "first_block_ms": self._first_ms, "total_ms": self._total_ms}

    def _elapsed_ms(self) -> float:
        return round((self._clock() - self._began) * 1000, 1)


async def read_to_end(follow: Follow, keep_deltas: bool = False) -> tuple[Transcript, Finished]:
    """Follow to the end, and close; raises as `Follow`."""
    transcript = Transcript.of(follow, keep_deltas)
    try:
        async for event in follow:
            if event is not None:
                transcript.observe(event)
    finally:
        await follow.aclose()
    assert transcript.end is not None, "a follow that ends without raising has seen Finished"
    return transcript, transcript.end


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return token counts in OpenAI's words, and beside them what they cost: denoising forwards (`nfe`) and blocks."""
    content: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "nfe": usage.nfe,
        "blocks": usage.blocks,
        "tokens_per_forward": round(usage.completion_tokens / usage.nfe, 3) if usage.nfe else 0.0,
    }
    if usage.block_length:
        content["block_length"] = usage.block_length
    if usage.accepted_draft_tokens or usage.rejected_draft_tokens:
        content["completion_tokens_details"] = {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        }
    return content
