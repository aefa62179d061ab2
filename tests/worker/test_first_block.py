"""A prompt that ends inside a block shares that block with the start of its answer."""

import pytest

from shared.commands import Generate, Limits
from shared.keys import new_request_id
from tests.worker.paper_model import STOP, PaperForward, paper_spec
from tests.worker.texts import NoText
from worker.engine.engine import Engine
from worker.engine.ports import Arrival, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape


def forbidden_in_the_first_block(prompt_length: int, min_tokens: int) -> tuple[int, ...]:
    forward = PaperForward(64, 4)
    engine = Engine(paper_spec(4), CacheShape(4, 64), BatchLimits(4, 64), forward, lambda request, resume: NoText())
    limits = Limits(max_tokens=20, min_tokens=min_tokens)
    request = Generate(id=new_request_id("m"), model="m", prompt=(5,) * prompt_length, limits=limits)
    engine.step(Inbox(arrivals=[Arrival(request, 1)]))
    canvas = forward.plans[0].rows[-1].canvas
    assert canvas is not None
    return canvas.forbidden


@pytest.mark.parametrize("prompt_length", range(1, 9))
def test_an_answer_may_end_in_the_block_that_it_shares_with_its_prompt(prompt_length: int) -> None:
    assert forbidden_in_the_first_block(prompt_length, min_tokens=0) == ()


@pytest.mark.parametrize("prompt_length", range(1, 9))
def test_a_minimum_of_tokens_still_forbids_the_stop_there(prompt_length: int) -> None:
    assert forbidden_in_the_first_block(prompt_length, min_tokens=1) == (STOP,)
