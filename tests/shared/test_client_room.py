"""What a model has no room for is refused by the client itself, before anything is queued."""

from typing import Any

import pytest

from shared.client import FleetClient, OutputTooLong, PromptTooLong
from shared.keys import Keys
from shared.queue import WorkerQueue
from tests.shared.protocol_for_tests import MODEL, card_of


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [
        ([1, 2, 3], 62, OutputTooLong),
        ([1] * 63, 2, OutputTooLong),
        ([1] * 64, None, PromptTooLong),
        ([1] * 64, 1, PromptTooLong),
    ],
)
async def test_generate_refuses_more_than_the_model_takes(
    redis_url: str, fleet_redis: Any, prompt: list[int], max_tokens: int | None, error: type[Exception]
) -> None:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1")
    await queue.publish_card(card_of())
    await queue.close()
    async with FleetClient.connect(redis_url) as fleet:
        with pytest.raises(error, match="64") as refused:
            async for _ in fleet.generate(MODEL, prompt, max_tokens=max_tokens):
                pass
    if error is OutputTooLong:
        assert f"max_tokens is {max_tokens}" in str(refused.value)
        assert f"leaves {64 - len(prompt)} for" in str(refused.value)
    assert fleet_redis.xlen(Keys(f"{MODEL}.0").lane("std")) == 0


async def test_generate_takes_all_the_room_that_there_is(redis_url: str) -> None:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1")
    await queue.publish_card(card_of())
    async with FleetClient.connect(redis_url) as fleet:
        events = fleet.generate(MODEL, [1, 2, 3], max_tokens=61)
        assert (await anext(events)).t == "queued"
        await events.aclose()
    await queue.close()
