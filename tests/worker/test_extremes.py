"""Whatever a payload may legally say, a step survives it: only the request itself may suffer."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.commands import Generate, InvalidCommand, decode_command, encode_command
from shared.events import is_terminal
from shared.keys import new_request_id
from tests.fleet.models import VOCAB, write_tiny_model
from worker.assembly import assemble
from worker.engine.engine import Engine
from worker.engine.ports import Arrival, Inbox
from worker.settings import WorkerSettings

PAGES = 40
MOST = 2**31 - 1


def maybe(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([None, *values])


STEPS = maybe(1, 1000, MOST)
DECODINGS = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {
            "strategy": st.just("threshold"),
            "threshold": st.sampled_from([0, 0.5, 1]),
            "confidence": st.sampled_from(["model", "tempered", "filtered"]),
            "filler_rules": st.booleans(),
        }
    ),
    st.fixed_dictionaries({"strategy": st.just("low_confidence_static"), "steps": STEPS}),
    st.fixed_dictionaries({"strategy": st.just("low_confidence_dynamic"), "steps": STEPS}),
    st.fixed_dictionaries({"strategy": st.just("adaptive_parallel"), "steps": STEPS, "max_parallel": st.just(MOST)}),
    st.fixed_dictionaries({"strategy": st.sampled_from(["sequential", "random"]), "steps": STEPS}),
    st.fixed_dictionaries(
        {
            "strategy": st.just("multi_block"),
            "tau_add": st.sampled_from([1e-9, 1]),
            "tau_semi": st.sampled_from([0, 1]),
            "tau_acc": st.sampled_from([0, 0.5, 1]),
            "max_blocks": st.sampled_from([1, 3, 64]),
            "filler_rules": st.booleans(),
        }
    ),
    st.fixed_dictionaries({"strategy": st.sampled_from(["streaming_window", "linear_speculation"])}),
    st.fixed_dictionaries({"strategy": st.just("entropy_bounded"), "bound": st.sampled_from([1e-9, 1e300])}),
)
BODIES = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.sampled_from([0, 5, VOCAB - 1, VOCAB, 10**30]), min_size=1, max_size=40),
        "sampling": st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0, 1e-30, 1e-6, 0.7, 5]),
                "top_p": st.sampled_from([1e-9, 0.5, 1]),
                "top_k": st.sampled_from([0, 1, VOCAB, MOST]),
                "min_p": st.sampled_from([0, 0.5, 1]),
                "seed": st.sampled_from([0, 2**63 - 1]),
            }
        ),
        "limits": st.fixed_dictionaries(
            {
                "max_tokens": st.sampled_from([1, 7, 30, MOST]),
                "min_tokens": st.sampled_from([0, 3, MOST]),
                "max_nfe": maybe(1, 3, MOST),
                "max_repetition_run": maybe(1, 2, MOST),
                "ignore_eos": st.booleans(),
                "stop": st.sampled_from([[], ["e"], ["\0"], ["once " * 50] * 20]),
                "stop_token_ids": st.sampled_from([[], [5], [-1], [VOCAB], [10**30]]),
            }
        ),
        "decoding": DECODINGS,
        "block_length": maybe(1, 3, 4, 64, 4096),
        "preview": maybe({}),
    }
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("extremes"))
    return assemble(WorkerSettings(model=str(folder), threads=1, max_rows=8, num_pages=PAGES, token_budget=256)).engine


@settings(max_examples=60, deadline=None)
@given(bodies=st.lists(BODIES, min_size=1, max_size=4))
def test_extreme_requests_end_alone_and_free_their_pages(engine: Engine, bodies: list[dict[str, Any]]) -> None:
    requests = [Generate.model_validate(body | {"id": new_request_id("m"), "model": "m"}) for body in bodies]
    open_ids = {request.id for request in requests}
    inbox = Inbox([Arrival(request, 1) for request in requests])
    for _ in range(30):
        for event in engine.step(inbox).events:
            if is_terminal(event):
                open_ids.remove(event.id)
        inbox = Inbox()
    for event in engine.step(Inbox(aborts=[(request_id, "test") for request_id in open_ids])).events:
        if is_terminal(event):
            open_ids.remove(event.id)
    assert not open_ids
    assert engine.idle and engine.load().free_pages == PAGES


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"sampling": {"top_k": 2**63}}, "sampling.top_k"),
        ({"limits": {"max_tokens": 2**31}}, "limits.max_tokens"),
        ({"limits": {"stop": [""]}}, "limits.stop.0"),
        ({"limits": {"total_ms": 2**60}}, "limits.total_ms"),
        ({"decoding": {"strategy": "sequential", "steps": 2**63}}, "decoding.sequential.steps"),
    ],
)
def test_what_would_overflow_a_worker_is_no_command(body: dict[str, Any], field: str) -> None:
    plain = encode_command(Generate(id=new_request_id("m"), model="m", prompt=(1,)))
    envelope = orjson.loads(plain)
    envelope["body"] |= body
    with pytest.raises(InvalidCommand, match=f"^{field}: "):
        decode_command(orjson.dumps(envelope))
