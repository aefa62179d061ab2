"""The soak of the benchmarks, for seconds: nothing is lost under mixed arrivals, aborts and preemptions."""

from collections.abc import Mapping

import pytest
import torch

from tests.bench.gpu.serving import served
from tests.bench.gpu.shapes import TINY, random_model
from tests.bench.gpu.soak import Traffic, soak

STEPS = 500
TRAFFIC = Traffic(
    rows=6,
    pages=18,
    waiting=4,
    prompts=(5, 30),
    produce=(8, 200, 300),
    known=3,
    filtered=0.1,
    adapted=0.1,
    embedded=0.2,
)


@pytest.mark.parametrize("ahead", [False, True])
def test_pages_and_memory_come_back_under_mixed_arrivals_aborts_and_preemptions(ahead: bool) -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        model = served(TINY, random_model(TINY, torch.device("cpu"), torch.float32), 4, 2)

    seen = soak(model, STEPS, lambda: False, TRAFFIC, ahead)

    ends = seen["ends"]
    assert isinstance(ends, Mapping)
    assert set(ends) == {"max_tokens", "aborted", "embedded"}
    assert sum(ends.values()) == seen["requests"]
    assert seen["without_an_end"] == seen["pages_lost"] == 0
    assert isinstance(seen["preemptions"], int)
    assert seen["preemptions"] > 0
    assert isinstance(seen["host_growth_mb"], float)
    # An allocator's own coming and going; a page of keys kept by each request would be 40 MB.
    assert seen["host_growth_mb"] < 25


def test_a_soak_that_is_told_to_end_ends_what_has_come_and_tells_how_far_it_got() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        model = served(TINY, random_model(TINY, torch.device("cpu"), torch.float32), 4, 2)
    asked, told = iter([False] * 60), list[str]()

    seen = soak(model, STEPS, lambda: next(asked, True), TRAFFIC, tell=told.append)

    assert isinstance(seen["steps"], int)
    assert 20 < seen["steps"] < STEPS
    assert seen["without_an_end"] == seen["pages_lost"] == 0
    assert told
    assert told[0].startswith("20 of 500 steps, ")
