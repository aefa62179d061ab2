"""Requests that take a known number of steps, and what to look for in their events."""

from collections.abc import AsyncIterable, Sequence

from shared.commands import Generate, Limits, Preview, Sampling
from shared.decoding import Sequential
from shared.events import Delta, Event, Finished, is_terminal
from shared.keys import new_request_id


def sequential(model: str, max_tokens: int, seed: int = 7, **more: object) -> Generate:
    """One token a step, sampled: the text depends on every number drawn on the way."""
    return Generate.model_validate(
        {
            "id": new_request_id(model),
            "model": model,
            "prompt": (40, 41, 42, 43, 44),
            "sampling": Sampling(temperature=1.0, seed=seed),
            "limits": Limits(max_tokens=max_tokens, ignore_eos=True),
            "decoding": Sequential(),
            **more,
        }
    )


def with_previews() -> Preview:
    return Preview(interval_ms=0)


async def collect(events: AsyncIterable[Event]) -> list[Event]:
    return [event async for event in events]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def assert_whole(events: Sequence[Event]) -> Finished:
    """Check that nothing is missing or repeated, and that the stream ended once, well; return its end."""
    durable = [event for event in events if event.t in ("queued", "delta", "finished", "failed")]
    assert [event.seq for event in durable if not event.t == "started"] == list(range(1, len(durable) + 1))  # type: ignore[union-attr]
    offset = 0
    for event in durable:
        if isinstance(event, Delta):
            assert event.offset == offset
            offset += len(event.token_ids)
    last = durable[-1]
    assert isinstance(last, Finished), last
    assert sum(is_terminal(event) for event in durable) == 1
    assert last.usage.completion_tokens == offset
    return last
