"""Embeddings: transformers' own hidden states, averaged, whatever else is in the batch and however prompts are cut."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.commands import Generate, Limits
from shared.events import Delta, Event, Failed, Finished
from tests.worker.test_families import DENSE, MOE, QWEN3, TOKENS, load_with_mask, quiet, write_oracle
from tests.worker.texts import NoText
from worker.engine.engine import Engine
from worker.engine.plan import visible_ends
from worker.engine.ports import Arrival, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel, load_model
from worker.models.spec import Attention
from worker.runner import Runner

TOLERANCE = 1e-4
CAUSAL, BLOCKS, WHOLE = Attention.CAUSAL, Attention.BLOCK_CAUSAL, Attention.BIDIRECTIONAL
BERT = {key: DENSE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")} | {
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "eos_token_id": 62,
    "mask_token_id": 63,
    "pad_token_id": 0,
}
# transformers' class, its configuration and task, the architecture that is served, and what a text sees.
CASES: dict[str, tuple[str, dict[str, Any], str, str | None, Attention]] = {
    "qwen3": ("Qwen3", QWEN3, "ForCausalLM", None, CAUSAL),
    "llama": ("Llama", DENSE, "ForCausalLM", None, CAUSAL),
    "sdar": ("Qwen3", QWEN3, "ForCausalLM", "SDARForCausalLM", BLOCKS),
    "sdar_moe": ("Qwen3Moe", MOE, "ForCausalLM", "SDARMoeForCausalLM", BLOCKS),
    "stable_diffcoder": ("Llama", DENSE | {"head_dim": 16}, "ForCausalLM", "StableDiffcoderForCausalLM", BLOCKS),
    "wedlm": ("Qwen3", QWEN3 | {"qk_norm": True}, "ForCausalLM", "WeDLMForCausalLM", CAUSAL),
    "dream": ("Qwen2", DENSE, "ForCausalLM", "DreamModel", WHOLE),
    "fastdllm_v2": ("Qwen2", DENSE | {"bd_size": 4}, "ForCausalLM", "Fast_dLLM_QwenForCausalLM", BLOCKS),
    "bert": ("Bert", BERT, "ForMaskedLM", None, WHOLE),
}
LENGTHS = (1, 4, 9, 22)


def decode(event: Event) -> Tensor:
    assert isinstance(event, Finished) and event.embedding is not None
    assert (event.reason, event.detail) == ("stop", "embedded")
    return torch.frombuffer(bytearray(base64.b64decode(event.embedding)), dtype=torch.float32)


def wanted(folder: Path, oracle: Any, model: LoadedModel, attention: Attention, token_ids: list[int]) -> Tensor:
    """Return what transformers' hidden states give."""
    length = len(token_ids)
    ends = [min(end, length) for end in visible_ends(attention, 0, length, model.spec.block_length, length)]
    hidden = torch.arange(length) >= torch.tensor(ends)[:, None]
    mask = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    with quiet(), torch.inference_mode():
        found = oracle.base_model(torch.tensor([token_ids]), attention_mask=mask).last_hidden_state[0]
    return torch.nn.functional.normalize(found.mean(0), dim=0)


def request(name: str, token_ids: Sequence[int], **changes: Any) -> Generate:
    asked: dict[str, Any] = {"embed": True} | changes
    return Generate(id=name, model="m", prompt=tuple(token_ids), **asked)


def run(model: LoadedModel, requests: Sequence[Generate], budget: int = 256) -> dict[str, list[Event]]:
    cache = CacheShape(page_size=8, num_pages=64)
    engine = Engine(model.spec, cache, BatchLimits(8, budget), Runner(model, 64, 8, model.device), lambda *_: NoText())
    events: dict[str, list[Event]] = {each.id: [] for each in requests}
    inbox = Inbox(arrivals=[Arrival(each, epoch=1) for each in requests])
    for _ in range(200):
        for event in engine.step(inbox).events:
            events[event.id].append(event)
        inbox = Inbox()
        if engine.idle:
            break
    assert engine.idle and engine.load().free_pages == 64
    return events


@pytest.mark.parametrize("budget", [256, 16], ids=["in-one-step", "in-chunks"])
@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_the_mean_of_transformers_hidden_states(tmp_path: Path, name: str, budget: int) -> None:
    kind, config, task, architecture, attention = CASES[name]
    oracle = write_oracle(tmp_path, kind, config, architecture, task)
    model = load_with_mask(tmp_path) if attention is not CAUSAL or "wedlm" in name else load_model(tmp_path)

    events = run(model, [request(f"r{length}", TOKENS[:length]) for length in LENGTHS], budget)

    for length in LENGTHS:
        vector = decode(events[f"r{length}"][-1])
        assert (vector - wanted(tmp_path, oracle, model, attention, TOKENS[:length])).abs().max() < TOLERANCE
        assert vector.norm() == pytest.approx(1.0, abs=1e-6)
        assert events[f"r{length}"][-1].usage.prompt_tokens == length  # type: ignore[union-attr]


def test_embeddings_and_generation_share_a_batch_and_change_nothing_of_each_other(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Qwen3", QWEN3, "SDARForCausalLM")
    model = load_with_mask(tmp_path)
    limits = Limits(max_tokens=12, ignore_eos=True)
    requests = [
        request("e", TOKENS),
        request("g", TOKENS[:7], embed=False, limits=limits),
        request("f", TOKENS[:7]),
        request("h", TOKENS, embed=False, limits=limits),
    ]

    together = run(model, requests, budget=24)

    for each in requests:
        alone = run(model, [each])[each.id]
        if each.embed:
            assert torch.allclose(decode(together[each.id][-1]), decode(alone[-1]), atol=1e-6)
        else:
            assert tokens_of(together[each.id]) == tokens_of(alone) != []


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def test_an_embedding_neither_takes_pages_of_others_nor_leaves_any(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Qwen3", QWEN3, "SDARForCausalLM")
    model = load_with_mask(tmp_path)
    cache = CacheShape(page_size=8, num_pages=16)
    engine = Engine(model.spec, cache, BatchLimits(1, 256), Runner(model, 16, 8), lambda *_: NoText())
    limits = Limits(max_tokens=4, ignore_eos=True)
    for each in (request("g", TOKENS, embed=False, limits=limits), request("e", TOKENS), request("e2", TOKENS)):
        engine.step(Inbox(arrivals=[Arrival(each, epoch=1)]))
        while not engine.idle:
            engine.step(Inbox())
    assert engine.load().cached_tokens == 0


def test_hidden_states_that_are_not_finite_fail_the_request_alone(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Qwen3", QWEN3, "SDARForCausalLM")
    model = load_with_mask(tmp_path)
    model.module.embedding[TOKENS[0]] = float("nan")  # type: ignore[attr-defined]
    other = [token for token in TOKENS if token != TOKENS[0]]

    events = run(model, [request("bad", TOKENS), request("good", other)])

    (failed,) = events["bad"]
    assert isinstance(failed, Failed) and failed.code == "nan"
    assert decode(events["good"][-1]).isfinite().all()
