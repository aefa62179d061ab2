import dataclasses
from typing import Any

import pytest

from shared.commands import Preview
from shared.decoding import (
    AdaptiveParallel,
    Factor,
    LowConfidenceStatic,
    MultiBlock,
    RandomOrder,
    Threshold,
    TopkMargin,
)
from shared.events import Delta, Failed, Finished, Queued, Snapshot, Started, Usage
from shared.keys import partition_of
from tests.api.scripted import CARD, Caller, ScriptedFleet, answer, steps
from tests.shared.tokenizers_for_tests import byte_level


async def test_a_text_prompt_is_answered_whole(caller: Caller, fleet: ScriptedFleet) -> None:
    response = await caller.post("/generate", {"prompt": "the fox"})

    content = response.json()
    assert response.status == 200
    assert content["id"] == fleet.commands[0].id
    assert content["model"] == "org/demo"
    assert content["text"] == "Hello, wörld 🎉"
    assert content["token_ids"] == byte_level().encode("Hello, wörld 🎉")
    assert (content["finish_reason"], content["finish_detail"]) == ("stop", "stop_token")
    usage = content["usage"]
    assert usage["prompt_tokens"] == len(byte_level().encode("the fox"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["nfe"] == content["nfe"] > 0
    assert usage["tokens_per_forward"] == pytest.approx(usage["completion_tokens"] / usage["nfe"], abs=1e-3)
    assert content["timings"]["total_ms"] >= content["timings"]["first_block_ms"] >= 0
    assert fleet.aborts == []


async def test_a_text_prompt_is_not_put_into_a_chat_template(caller: Caller, fleet: ScriptedFleet) -> None:
    await caller.post("/generate", {"prompt": "plain <|MASK|>"})
    assert fleet.commands[0].prompt == tuple(byte_level().encode("plain <|MASK|>"))


async def test_token_ids_are_taken_as_they_are(caller: Caller, fleet: ScriptedFleet) -> None:
    await caller.post("/generate", {"prompt": [5, 3, 399]})
    assert fleet.commands[0].prompt == (5, 3, 399)


async def test_every_field_reaches_the_command(caller: Caller, fleet: ScriptedFleet) -> None:
    body = {
        "prompt": "x",
        "model": "org/demo",
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 42,
        "stop": "END",
        "stop_token_ids": [9],
        "ignore_eos": True,
        "max_nfe": 20,
        "max_repetition_run": 4,
        "block_length": 8,
        "user": "u1",
        "stream": True,
        "stream_mode": "denoise",
        "diffusion": {"threshold": 0.5, "frame_interval_ms": 10},
        "made_up": "ignored",
    }
    await caller.post("/generate", body)
    command = fleet.commands[0]
    limits = command.limits
    assert (limits.max_tokens, limits.min_tokens, limits.max_nfe, limits.max_repetition_run) == (7, 2, 20, 4)
    assert (limits.stop, limits.stop_token_ids, limits.ignore_eos) == (("END",), (9,), True)
    assert limits.total_ms == 600_000
    sampling = command.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (1, 0.5, 3, 0.1, 42)
    assert (command.block_length, command.user, command.model) == (8, "u1", "org/demo")
    assert command.preview == Preview(interval_ms=10)
    assert command.decoding == Threshold(threshold=0.5)
    assert fleet.queue_limits == [256]


async def test_a_top_p_of_nothing_takes_the_most_probable_token(caller: Caller, fleet: ScriptedFleet) -> None:
    assert (await caller.post("/generate", {"prompt": "x", "temperature": 1, "top_p": 0, "top_k": 9})).status == 200
    sampling = fleet.commands[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1, 1, 1)


@pytest.mark.parametrize(
    ("fields", "choices"),
    [({}, 1), ({"best_of": 1}, 1), ({"n": 2, "best_of": 2}, 2), ({"best_of": 2}, 0), ({"n": 2, "best_of": 1}, 0)],
)
async def test_the_best_of_as_many_as_are_asked_for_is_all_of_them(
    caller: Caller, fleet: ScriptedFleet, fields: dict[str, int], choices: int
) -> None:
    answer = await caller.post("/v1/completions", {"prompt": "x"} | fields)
    assert (answer.status == 200) == bool(choices) and len(fleet.commands) == choices
    if not choices:
        assert (answer.error["param"], answer.error["code"]) == ("best_of", "unsupported_parameter")


async def test_what_is_unset_is_the_models_own(caller: Caller, fleet: ScriptedFleet) -> None:
    fields = "temperature top_p top_k seed stop stop_token_ids max_nfe block_length stream stream_mode user diffusion"
    await caller.post("/generate", {"prompt": [4, 5]} | dict.fromkeys(fields.split()))
    command = fleet.commands[0]
    assert command.sampling.temperature == CARD.temperature
    assert command.decoding is None and command.block_length is None and command.preview is None
    assert command.limits.max_tokens == CARD.max_model_len - 2


async def test_max_tokens_is_512_where_the_context_has_room(fleet: ScriptedFleet, caller: Caller) -> None:
    fleet.cards = {CARD.name: dataclasses.replace(CARD, max_model_len=10_000, digest="")}
    await caller.post("/generate", {"prompt": "x"})
    assert fleet.commands[0].limits.max_tokens == 512


async def test_unseeded_requests_get_different_seeds_and_negative_ones_are_taken(
    caller: Caller, fleet: ScriptedFleet
) -> None:
    for seed in (None, None, -1):
        await caller.post("/generate", {"prompt": "x", "seed": seed})
    first, second, negative = (command.sampling.seed for command in fleet.commands)
    assert first != second
    assert negative == 2**63 - 1


@pytest.mark.parametrize(
    ("options", "decoding"),
    [
        ({}, None),
        ({"threshold": 0.3}, Threshold(threshold=0.3)),
        ({"strategy": "threshold"}, Threshold(threshold=0.8)),
        ({"strategy": "low_confidence_static", "steps": 2}, LowConfidenceStatic(steps=2)),
        ({"strategy": "factor", "factor": 0.5}, Factor(factor=0.5)),
        ({"strategy": "topk_margin", "steps": 4}, TopkMargin(steps=4)),
        ({"strategy": "adaptive_parallel", "max_parallel": 4, "steps": 8}, AdaptiveParallel(max_parallel=4, steps=8)),
        ({"strategy": "multi_block", "tau_add": 0.5, "max_blocks": 3}, MultiBlock(tau_add=0.5, max_blocks=3)),
        ({"confidence": "tempered"}, Threshold(threshold=0.8, confidence="tempered")),
        ({"remasking": "low_confidence", "steps": 2}, LowConfidenceStatic(steps=2)),
        ({"remasking": "random"}, RandomOrder()),
        ({"filler_rules": False}, Threshold(threshold=0.8, filler_rules=False)),
    ],
)
async def test_diffusion_options_build_on_the_models_default(
    caller: Caller, fleet: ScriptedFleet, options: dict[str, Any], decoding: object
) -> None:
    assert (await caller.post("/generate", {"prompt": "x", "diffusion": options})).status == 200
    assert fleet.commands[0].decoding == decoding


# One test for each event.


async def stream(caller: Caller, **body: object) -> list[Any]:
    response = await caller.post("/generate", {"prompt": [4, 5], "stream": True, **body})
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return response.events


async def test_queued_and_started_are_not_told(caller: Caller, fleet: ScriptedFleet) -> None:
    finished = Finished("r", 2, 1, "stop", "stop_token", Usage(2, 0, 1, 1))
    fleet.script = steps(Queued, lambda request_id: Started(request_id, 1, "w"), finished)
    assert [event["event"] for event in await stream(caller)] == ["final"]


async def test_a_delta_becomes_an_append(caller: Caller, fleet: ScriptedFleet) -> None:
    finished = Finished("r", 3, 1, "stop", "stop_token", Usage())
    fleet.script = steps(Queued, Delta("r", 2, 1, 0, 8, [75], "h", 3), finished)
    assert (await stream(caller))[0] == {
        "event": "append",
        "id": "r",
        "seq": 2,
        "token_offset": 8,
        "text": "h",
        "token_ids": [75],
        "nfe": 3,
        "finished": False,
    }


async def test_a_snapshot_becomes_a_buffer_snapshot_with_masks_shown(caller: Caller, fleet: ScriptedFleet) -> None:
    snapshot = Snapshot("r", 1, 1, 2, 8, 3, 11, [None, 75, 76, None, None], [0.0, 0.5, 0.75, 0.0, 0.0])
    fleet.script = steps(Queued, snapshot, Finished("r", 2, 1, "stop", "stop_token", Usage()))
    assert (await stream(caller, stream_mode="denoise"))[0] == {
        "event": "buffer_snapshot",
        "id": "r",
        "after": 1,
        "finished": False,
        "token_offset": 8,
        "absolute_start": 10,
        "absolute_end": 15,
        "token_ids": [None, 75, 76, None, None],
        "text": "░hi░░",
        "tokens": [None, "h", "i", None, None],
        "confidence": [0.0, 0.5, 0.75, 0.0, 0.0],
        "block": 2,
        "step": 3,
        "nfe": 11,
    }


async def test_finished_becomes_a_final_with_the_whole_text(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = answer(reason="length", detail="max_nfe")
    *appends, final = await stream(caller)
    assert final["event"] == "final" and final["finished"]
    assert final["text"] == "".join(event["text"] for event in appends) == "Hello, wörld 🎉"
    assert final["token_ids"] == [token for event in appends for token in event["token_ids"]]
    assert (final["finish_reason"], final["finish_detail"]) == ("length", "max_nfe")
    assert final["usage"]["prompt_tokens"] == 2


async def test_a_late_failure_becomes_an_error_event(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.script = steps(
        Queued, Delta("r", 2, 1, 0, 0, [75], "h", 1), Failed("r", 3, 1, "nan", "logits are NaN", "prompt")
    )
    append, error = await stream(caller)
    assert append["event"] == "append"
    assert error["event"] == "error"
    assert error["id"] == append["id"]
    assert error["message"] == "logits are NaN"
    assert error["error"] == {
        "message": "logits are NaN",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert fleet.aborts == []


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("invalid_request", 400, "invalid_value"),
        ("unsupported", 400, "unsupported_parameter"),
        ("too_long", 400, "context_length_exceeded"),
        ("out_of_memory", 503, "server_is_overloaded"),
        ("nan", 500, "internal_error"),
        ("internal", 500, "internal_error"),
        ("poison", 500, "internal_error"),
        ("lost", 500, "worker_lost"),
        ("expired", 504, "timeout"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_early_failure_has_its_own_status(
    caller: Caller, fleet: ScriptedFleet, code: Any, status: int, said: str, streamed: bool
) -> None:
    fleet.script = steps(Queued, Failed("r", 2, 1, code, "because"))
    response = await caller.post("/generate", {"prompt": "x", "stream": streamed})
    assert response.status == status
    assert response.error["code"] == said
    assert response.error["message"] == "because"
    assert fleet.aborts == []
    assert fleet.closed == 1


async def test_a_request_is_ended_by_the_id_that_its_answer_has_told(caller: Caller, fleet: ScriptedFleet) -> None:
    for path, body in (
        ("/generate", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        told = (await caller.post(path, body)).headers["x-diffleet-request"]
        assert told == fleet.commands[-1].id
        ended = await caller.call("DELETE", f"/generate/{told}", b"", {})
        assert (ended.status, ended.json()["state"]) == (200, "running")
        assert fleet.aborts[-1] == (told, "cancelled")
    before = list(fleet.aborts)
    unknown = await caller.call("DELETE", "/generate/r_org/demo.0_01M8G46GYM81Z18DX6SY52ZA27", b"", {})
    assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (404, "not_found", "request_id")
    assert fleet.aborts == before


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
    ],
)
async def test_requests_go_to_all_partitions_and_equal_calls_to_the_same(
    caller: Caller, fleet: ScriptedFleet, path: str, fields: dict[str, Any]
) -> None:
    fleet.cards = {CARD.name: dataclasses.replace(CARD, partitions=3, digest="")}
    for _ in range(30):
        assert (await caller.post(path, fields)).status == 200
    # All in one of three: once in 3 ** 29 runs.
    assert len({partition_of(command.id) for command in fleet.commands}) > 1
    fleet.commands.clear()
    for _ in range(5):
        assert (await caller.post(path, fields, {"idempotency-key": "k"})).status == 200
    assert len({partition_of(command.id) for command in fleet.commands}) == 1
