"""Families without golden data, against transformers' own layers on tiny random checkpoints made here."""

import json
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.attention import plan_attention
from shared.commands import Generate, Limits, Sampling
from shared.decoding import LowConfidenceDynamic, LowConfidenceStatic, Threshold
from shared.events import Delta, Failed, Finished
from tests.worker.naive_decoder import decode_naively
from tests.worker.test_models import logits_of
from tests.worker.texts import NoText
from worker.engine.engine import Engine
from worker.engine.plan import near_view, visible_ends
from worker.engine.ports import Arrival, Inbox
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel, ModelError, load_model
from worker.models.layers import ForwardContext
from worker.models.spec import NO_MASK, Attention, Commit
from worker.runner import Runner

TOLERANCE = 1e-4
DENSE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 62,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
QWEN3 = DENSE | {"head_dim": 16}
MOE = QWEN3 | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TOKENS = torch.randint(0, 60, (22,), generator=torch.Generator().manual_seed(5)).tolist()


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers warns about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_oracle(
    folder: Path, kind: str, config: dict[str, Any], architecture: str | None = None, task: str = "ForCausalLM"
) -> Any:
    """Write a random checkpoint of transformers' class `kind` for `task`, and return the class's model.

    The folder names `architecture` where that is another one with the same layers.
    """
    with quiet():
        import transformers

        torch.manual_seed(11)
        cls = getattr(transformers, kind + task)
        oracle = cls._from_config(cls.config_class(**config), attn_implementation="eager", dtype=torch.float32).eval()
        for name, parameter in oracle.named_parameters():
            # The initial spread is so small that all logits would be alike, and norms would be ones.
            spread, norm = 32 if "lm_head" in name else 8, "norm" in name.lower()
            if name.endswith("bias"):
                parameter.data = torch.randn_like(parameter) / 8
            else:
                parameter.data = 1 + torch.randn_like(parameter) / 8 if norm else parameter.data * spread
        oracle.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture or cls.__name__]}))
    return oracle


@torch.inference_mode()
def oracle_logits(oracle: Any, token_ids: list[int], ends: Sequence[int]) -> Tensor:
    hidden = torch.arange(len(token_ids)) >= torch.tensor(ends)[:, None]
    mask = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    with quiet():
        return oracle(torch.tensor([token_ids]), attention_mask=mask).logits[0]


def run(model: LoadedModel, requests: Sequence[Generate], token_budget: int = 256) -> dict[str, tuple[list[int], int]]:
    """Run requests to the end, the second half arriving late; return tokens and nfe of each."""
    cache = CacheShape(page_size=4, num_pages=256)
    engine = Engine(
        model.spec,
        cache,
        BatchLimits(16, token_budget),
        Runner(model, 256, 4, model.device),
        lambda request, resume: NoText(),
    )
    tokens: dict[str, list[int]] = defaultdict(list)
    nfe: dict[str, int] = {}
    pending = [requests[: (len(requests) + 1) // 2], [], requests[(len(requests) + 1) // 2 :]]
    while pending or not engine.idle:
        joining = pending.pop(0) if pending else []
        for event in engine.step(Inbox(arrivals=[Arrival(request, epoch=1) for request in joining])).events:
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                tokens[event.id] += event.token_ids
            elif isinstance(event, Finished):
                nfe[event.id] = event.usage.nfe
    return {name: (tokens[name], count) for name, count in nfe.items()}


# --- SDAR-MoE


@pytest.mark.parametrize("block_length", [1, 4, 8])
@pytest.mark.parametrize(
    "changes",
    [{}, {"norm_topk_prob": False}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2, "attention_bias": True}],
    ids=["plain", "unnormalised", "first-layer-dense", "every-second-layer"],
)
def test_sdar_moe_is_qwen3_moe_under_a_block_mask(tmp_path: Path, changes: dict[str, Any], block_length: int) -> None:
    oracle = write_oracle(tmp_path, "Qwen3Moe", MOE | changes, "SDARMoeForCausalLM")
    model = load_with_mask(tmp_path)
    ends = visible_ends(Attention.BLOCK_CAUSAL, 0, 22, block_length, 22)
    ends = [min(end, 22) for end in ends]

    difference = logits_of(model, TOKENS, ends) - oracle_logits(oracle, TOKENS, ends)

    assert difference.abs().max() < TOLERANCE
    assert oracle_logits(oracle, TOKENS, ends).std() > 1, "logits that are all alike prove nothing"


def load_with_mask(folder: Path) -> LoadedModel:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mask_token_id": 63}))
    return load_model(folder)


@pytest.mark.parametrize("end", ["", ".weight"])
@pytest.mark.parametrize("fused", [True, False], ids=["gate-and-up-in-one", "gate-and-up-apart"])
def test_stacked_experts_are_the_same_model_as_single_ones(tmp_path: Path, fused: bool, end: str) -> None:
    write_oracle(tmp_path / "single", "Qwen3Moe", MOE, "SDARMoeForCausalLM")
    single = load_with_mask(tmp_path / "single")
    weights = load_file(tmp_path / "single" / "model.safetensors")
    stacked = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(MOE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([weights[f"{prefix}{e}.{part}_proj.weight"] for e in range(MOE["num_experts"])])
            for part in ("gate", "up", "down")
        }
        stacked[f"{prefix}down_proj{end}"] = parts["down"]
        if fused:
            stacked[f"{prefix}gate_up_proj{end}"] = torch.cat((parts["gate"], parts["up"]), 1)
        else:
            stacked |= {f"{prefix}{part}_proj{end}": parts[part] for part in ("gate", "up")}
    folder = tmp_path / "stacked"
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "single" / "config.json").read_text())
    save_file(stacked, folder / "model.safetensors")

    ends = [22] * 22
    assert torch.equal(logits_of(load_model(folder), TOKENS, ends), logits_of(single, TOKENS, ends))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Qwen3Moe", MOE, "SDARMoeForCausalLM")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(weights, path)

    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight"):
        load_with_mask(tmp_path)


def test_a_batch_of_sdar_moe_decodes_as_if_nothing_were_cached(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Qwen3Moe", MOE, "SDARMoeForCausalLM")
    assert_decodes_as_without_cache(load_with_mask(tmp_path))


def assert_decodes_as_without_cache(model: LoadedModel) -> None:
    decodings = [
        Threshold(threshold=0.6, filler_rules=False),
        LowConfidenceStatic(steps=3, filler_rules=False),
        LowConfidenceDynamic(threshold=0.5, steps=2, filler_rules=False),
    ]
    requests = [
        Generate(
            id=f"r{i}",
            model="m",
            prompt=tuple(TOKENS[: 3 + 4 * i]),
            limits=Limits(max_tokens=13, ignore_eos=True),
            decoding=decoding,
            block_length=(4, 8, 4)[i],
        )
        for i, decoding in enumerate(decodings)
    ]

    result = run(model, requests)

    for request in requests:
        assert request.decoding is not None and request.block_length is not None
        expected = decode_naively(
            model, list(request.prompt), 13, request.block_length, request.decoding, Sampling(temperature=0)
        )
        assert result[request.id] == expected


# --- Stable-DiffCoder


@pytest.mark.parametrize("block_length", [1, 4])
def test_stable_diffcoder_is_llama_under_a_block_mask(tmp_path: Path, block_length: int) -> None:
    oracle = write_oracle(tmp_path, "Llama", DENSE | {"head_dim": 16}, "StableDiffcoderForCausalLM")
    model = load_model(tmp_path)
    ends = [min(end, 22) for end in visible_ends(Attention.BLOCK_CAUSAL, 0, 22, block_length, 22)]

    assert (logits_of(model, TOKENS, ends) - oracle_logits(oracle, TOKENS, ends)).abs().max() < TOLERANCE


def test_stable_diffcoder_is_known_by_its_architecture_and_not_by_its_model_type(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Llama", DENSE, "StableDiffcoderForCausalLM")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"

    spec = load_model(tmp_path).spec

    assert (spec.family, spec.mask_token_id, spec.block_length, spec.logit_shift) == ("stable_diffcoder", 5, 4, 0)
    assert spec.decoding == Threshold(threshold=0.95)


def test_a_batch_of_stable_diffcoder_decodes_as_if_nothing_were_cached(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Llama", DENSE, "StableDiffcoderForCausalLM")
    assert_decodes_as_without_cache(load_model(tmp_path))


# --- plain autoregressive models


AUTOREGRESSIVE = {
    "qwen3": ("Qwen3", QWEN3),
    "qwen3-tied": ("Qwen3", QWEN3 | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", DENSE),
    "llama": ("Llama", DENSE),
    "llama-3.1": ("Llama", DENSE | {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("Llama", DENSE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
}


@pytest.mark.parametrize("name", AUTOREGRESSIVE)
def test_an_autoregressive_model_gives_transformers_logits(tmp_path: Path, name: str) -> None:
    kind, config = AUTOREGRESSIVE[name]
    oracle = write_oracle(tmp_path, kind, config)
    ends = range(1, 23)

    difference = logits_of(load_model(tmp_path), TOKENS, list(ends)) - oracle_logits(oracle, TOKENS, ends)

    assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("name", AUTOREGRESSIVE)
@pytest.mark.parametrize("token_budget", [256, 8], ids=["prompts-at-once", "prompts-in-chunks"])
def test_autoregressive_requests_in_a_batch_give_what_transformers_generates(
    tmp_path: Path, name: str, token_budget: int
) -> None:
    kind, config = AUTOREGRESSIVE[name]
    oracle = write_oracle(tmp_path, kind, config)
    model = load_model(tmp_path)
    lengths = (1, 4, 9, 22)
    requests = [
        Generate(id=f"r{length}", model="m", prompt=tuple(TOKENS[:length]), limits=Limits(max_tokens=15))
        for length in lengths
    ]

    result = run(model, requests, token_budget)

    for length in lengths:
        with quiet():
            generated = oracle.generate(torch.tensor([TOKENS[:length]]), do_sample=False, max_new_tokens=15)
        expected = generated[0, length:].tolist()
        forwards = len(expected)
        if config["eos_token_id"] in expected:
            expected = expected[: expected.index(config["eos_token_id"])]
        assert result[f"r{length}"] == (expected, forwards)


def test_an_autoregressive_model_has_blocks_of_one_token_and_no_mask(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Qwen3", QWEN3)

    spec = load_model(tmp_path).spec

    assert (spec.block_length, spec.fixed_block_length, spec.mask_token_id) == (1, True, NO_MASK)
    assert (spec.attention, spec.commit) == (Attention.CAUSAL, Commit.SEEDED)
    assert spec.stop_token_ids == (62,)


def test_the_last_id_of_the_vocabulary_is_an_ordinary_token_where_there_is_no_mask(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Qwen3", QWEN3)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    request = Generate(id="r", model="m", prompt=(1, 2, 3), limits=Limits(max_tokens=8, ignore_eos=True))
    row, seen = weights["lm_head.weight"][5].clone(), set[int]()
    for sign in (1, -1):
        # Whichever sign makes the last id's logit positive, all others have 0.
        weights["lm_head.weight"].zero_()[63] = sign * row
        save_file(weights, path)
        seen.update(run(load_model(tmp_path), [request])["r"][0])

    assert seen == {0, 63}


def test_a_rotation_that_is_not_known_is_named(tmp_path: Path) -> None:
    write_oracle(tmp_path, "Llama", DENSE)
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"rope_parameters": {"rope_type": "su", "rope_theta": 1.0}})
    )

    with pytest.raises(ModelError, match=r"rope_scaling: rope type 'su' is not supported, only 'default'"):
        load_model(tmp_path)


# --- masked language models


ENCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
BERT = ENCODER | {"num_hidden_layers": 2}
# Windows of 4 on either side: most of 22 tokens are out of sight.
MODERNBERT = ENCODER | {"num_hidden_layers": 5, "local_attention": 8, "sep_token_id": 62, "eos_token_id": 62}
MASKED = {
    "bert": ("Bert", BERT),
    "modernbert": ("ModernBert", MODERNBERT),
    "modernbert-biased": (
        "ModernBert",
        MODERNBERT | {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
    ),
    "modernbert-window-of-7": ("ModernBert", MODERNBERT | {"local_attention": 7}),
    "modernbert-all-global": ("ModernBert", MODERNBERT | {"global_attn_every_n_layers": 1}),
}


@torch.inference_mode()
def masked_logits(model: LoadedModel) -> Tensor:
    """Return [22, vocab] for all tokens in one forward, with what layers with a window see."""
    spec, length = model.spec, len(TOKENS)
    ends, near = [length] * length, None
    if spec.sliding_window:
        views = [near_view(spec.attention, position, spec.sliding_window, 0, length) for position in range(length)]
        near = plan_attention(
            [0],
            [[end for _, end in views]],
            [[0]],
            length,
            device=model.device,
            dtype=model.dtype,
            visible_start=[[start for start, _ in views]],
        )
    plan = plan_attention([0], [ends], [[0]], length, device=model.device, dtype=model.dtype)
    kv = torch.zeros(2, spec.num_layers, 1, length, spec.num_kv_heads, spec.head_dim)
    context = ForwardContext(plan, torch.arange(length), tuple(zip(*kv, strict=True)), near=near)
    return model.module.logits(model.module.forward(torch.tensor(TOKENS), context))


def write_masked(folder: Path, name: str) -> Any:
    kind, config = MASKED[name]
    oracle = write_oracle(folder, kind, config, task="ForMaskedLM")
    path = folder / "config.json"
    added = {"mask_token_id": 63, "sep_token_id": 62}
    path.write_text(json.dumps(json.loads(path.read_text()) | added))
    return oracle


@pytest.mark.parametrize("name", MASKED)
@torch.inference_mode()
def test_a_masked_language_model_gives_transformers_logits(tmp_path: Path, name: str) -> None:
    oracle = write_masked(tmp_path, name)
    with quiet():
        known = oracle(torch.tensor([TOKENS])).logits[0]

    difference = masked_logits(load_model(tmp_path)) - known

    assert difference.abs().max() < TOLERANCE
    assert known.std() > 0.5, "logits that are all alike prove nothing"


@pytest.mark.parametrize("name", MASKED)
@torch.inference_mode()
def test_masked_language_models_fill_their_canvas_in_a_batch_as_transformers_would(tmp_path: Path, name: str) -> None:
    """The oracle is LLaDA's loop with one position a step, written out over transformers' logits."""
    oracle = write_masked(tmp_path, name)
    decoding = LowConfidenceStatic(filler_rules=False, early_stop=False)
    limits = Limits(max_tokens=12, ignore_eos=True)
    requests = [
        Generate(id=f"r{n}", model="m", prompt=tuple(TOKENS[:n]), limits=limits, decoding=decoding, block_length=6)
        for n in (3, 10, 17)
    ]

    result = run(load_model(tmp_path), requests)

    for request in requests:
        start = len(request.prompt)
        tokens = torch.tensor([*request.prompt, *[63] * 12])
        for block in (start, start + 6):
            for _ in range(6):
                with quiet():
                    logits = oracle(tokens[None]).logits[0, block : block + 6]
                # The mask has probability but is never proposed.
                best = logits.index_fill(1, torch.tensor(63), float("-inf")).argmax(-1)
                sure = logits.softmax(-1).gather(1, best[:, None])[:, 0]
                place = sure.masked_fill(tokens[block : block + 6] != 63, -1).argmax()
                tokens[block + place] = best[place]
        assert result[request.id] == (tokens[start:].tolist(), 12)


def test_the_first_exports_of_bert_name_their_norms_in_another_way(tmp_path: Path) -> None:
    write_masked(tmp_path, "bert")
    now = masked_logits(load_model(tmp_path))
    path = tmp_path / "model.safetensors"
    weights = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in load_file(path).items()
    }
    assert any(name.endswith("gamma") for name in weights)
    save_file(weights, path)

    assert torch.equal(masked_logits(load_model(tmp_path)), now)
