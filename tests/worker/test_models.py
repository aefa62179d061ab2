"""Checkpoints as models: facts, weights, and what is said when they do not fit; logits against transformers."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.attention import plan_attention
from shared.decoding import LowConfidenceDynamic, Threshold
from tests.worker.tiny_checkpoints import TINY, tiny_weights, write_checkpoint, write_tokenizer
from worker.models import FAMILIES, LoadedModel, ModelError, load_model
from worker.models.layers import ForwardContext


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_checkpoint(tmp_path_factory.mktemp("model")))


@torch.inference_mode()
def logits_of(model: LoadedModel, token_ids: list[int], ends: list[int]) -> Tensor:
    """Return [tokens, vocab] for one row without cache; ends[i] is the visible end of position i."""
    length, spec = len(token_ids), model.spec
    plan = plan_attention([0], [ends], [[0]], length, device=model.device, dtype=model.dtype)
    kv = torch.zeros(2, spec.num_layers, 1, length, spec.num_kv_heads, spec.head_dim, dtype=model.dtype)
    context = ForwardContext(plan, torch.arange(length), tuple(zip(*kv, strict=True)))
    return model.module.logits(model.module.forward(torch.tensor(token_ids), context))


@given(wanted=st.lists(st.integers(0, 10), max_size=14))
@torch.inference_mode()
def test_what_is_wanted_is_what_all_would_have_been_and_every_key_is_written(
    wanted: list[int], loaded: LoadedModel
) -> None:
    token_ids, ends = torch.arange(20, 31), [(i // 4 + 1) * 4 if i < 8 else 11 for i in range(11)]
    plan = plan_attention([0], [ends], [[0]], 11, device=loaded.device, dtype=loaded.dtype)
    spec, found = loaded.spec, []
    for rows in (torch.tensor(wanted, dtype=torch.int64), None):
        kv = torch.zeros(2, spec.num_layers, 1, 11, spec.num_kv_heads, spec.head_dim)
        context = ForwardContext(plan, torch.arange(11), tuple(zip(*kv, strict=True)))
        found.append((loaded.module.forward(token_ids, context, rows), kv))
    (some, some_kv), (every, every_kv) = found
    torch.testing.assert_close(some, every[wanted], rtol=1e-5, atol=1e-5)
    assert torch.equal(some_kv, every_kv)


def transformers_logits(folder: Path, token_ids: list[int], ends: list[int]) -> Tensor:
    """Return what transformers' Qwen3 gives for the same folder under the same visibility."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config.from_dict(
            json.loads((folder / "config.json").read_text()) | {"pad_token_id": None, "bos_token_id": None}
        )
        config._attn_implementation = "eager"
        model = Qwen3ForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        hidden = torch.arange(len(token_ids)) >= torch.tensor(ends)[:, None]
        mask = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            return model(torch.tensor([token_ids]), attention_mask=mask).logits[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"num_key_value_heads": 4, "rope_theta": 1e6, "num_hidden_layers": 3},
    ],
    ids=["plain", "tied", "one-kv-head", "all-kv-heads"],
)
@pytest.mark.parametrize("block_length", [1, 4, 32], ids=["causal", "block-causal", "bidirectional"])
def test_logits_equal_those_of_transformers_qwen3(tmp_path: Path, changes: dict[str, Any], block_length: int) -> None:
    folder = write_checkpoint(tmp_path, **changes)
    token_ids = torch.randint(0, 64, (11,), generator=torch.Generator().manual_seed(3)).tolist()
    ends = [min((i // block_length + 1) * block_length, 11) for i in range(11)]

    logits = logits_of(load_model(folder), token_ids, ends)

    assert (logits - transformers_logits(folder, token_ids, ends)).abs().max() < 1e-4


def test_bfloat16_weights_give_nearly_the_same_logits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    token_ids, ends = list(range(8)), [4] * 4 + [8] * 4

    exact = logits_of(load_model(folder), token_ids, ends)
    rounded = logits_of(load_model(folder, dtype=torch.bfloat16), token_ids, ends).float()

    # Two layers of 8-bit mantissas: a few parts in a hundred of the logits' spread.
    assert (rounded - exact).square().mean().sqrt() < 0.05 * exact.std()


def test_shards_are_the_same_model_as_a_single_file(tmp_path: Path) -> None:
    single, sharded = write_checkpoint(tmp_path / "one"), write_checkpoint(tmp_path / "three", shards=3)

    logits = [logits_of(load_model(folder), [1, 2, 3, 4], [4] * 4) for folder in (single, sharded)]

    assert torch.equal(*logits)


# --- facts


def test_a_tied_checkpoint_may_store_its_head_or_leave_it_out(tmp_path: Path) -> None:
    config = TINY | {"tie_word_embeddings": True}
    weights = tiny_weights(config)
    stored = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}

    left_out = load_model(write_checkpoint(tmp_path / "a", weights=weights, tie_word_embeddings=True))
    kept = load_model(write_checkpoint(tmp_path / "b", weights=stored, tie_word_embeddings=True))

    assert torch.equal(logits_of(left_out, [1, 2], [2, 2]), logits_of(kept, [1, 2], [2, 2]))


def test_rope_theta_is_found_where_newer_exports_keep_it(tmp_path: Path) -> None:
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    old = load_model(write_checkpoint(tmp_path / "old"))
    new = load_model(write_checkpoint(tmp_path / "new", rope_theta=None, rope_parameters=parameters))

    assert torch.equal(logits_of(old, [1, 2, 3], [3] * 3), logits_of(new, [1, 2, 3], [3] * 3))


def test_the_heads_need_not_add_up_to_the_hidden_size(tmp_path: Path) -> None:
    spec = load_model(write_checkpoint(tmp_path, head_dim=16)).spec

    assert (spec.hidden_size, spec.num_heads, spec.head_dim) == (24, 4, 16)


def test_generation_config_overrides_config(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [61, 62],
        "block_length": 16,
        "strategy": "low_confidence_dynamic",
        "threshold": 0.85,
        "temperature": 0.6,
    }

    spec = load_model(write_checkpoint(tmp_path, generation=generation)).spec

    assert spec.stop_token_ids == (61, 62)
    assert spec.block_length == 16
    assert spec.decoding == LowConfidenceDynamic(threshold=0.85)
    assert spec.temperature == 0.6


def test_defaults_are_greedy_threshold_decoding_over_the_checkpoints_blocks(tmp_path: Path) -> None:
    spec = load_model(write_checkpoint(tmp_path, generation={"temperature": 0.7, "do_sample": False})).spec

    assert (spec.block_length, spec.temperature, spec.decoding) == (4, 0.0, Threshold())
    assert spec.stop_token_ids == (61,)


def test_padding_of_the_vocabulary_is_not_text(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    write_tokenizer(folder, 62)

    assert load_model(folder).spec.text_vocab_size == 62


@pytest.mark.parametrize(
    ("changes", "names", "mask"),
    [
        ({}, {"mask_token": "t7"}, 60),
        ({"mask_token_id": None}, {"mask_token": "t7"}, 7),
    ],
    ids=["config", "tokenizer"],
)
def test_the_mask_is_found_in_config_then_tokenizer(
    tmp_path: Path, changes: dict[str, Any], names: dict[str, str], mask: int
) -> None:
    folder = write_checkpoint(tmp_path, **changes)
    write_tokenizer(folder, 62, **names)

    assert load_model(folder).spec.mask_token_id == mask


def test_the_mask_is_the_familys_where_no_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="mask token 151669 is outside the vocabulary of 64"):
        load_model(write_checkpoint(tmp_path, mask_token_id=None))


@pytest.mark.parametrize(
    ("generation", "pad", "eos", "fillers"),
    [
        ({"eos_token_id": [61, 62]}, None, None, (62,)),
        ({"eos_token_id": [61, 62]}, 62, None, (62,)),
        ({"eos_token_id": [61, 62]}, None, "t62", (61,)),
        ({"eos_token_id": 61}, None, None, (61,)),
        ({"eos_token_id": 61}, 61, None, (61,)),
        ({"eos_token_id": 61}, 63, None, (63,)),
    ],
    ids=["two-stops", "padded", "tokenizer-names-the-closing-one", "one-stop", "padded-by-it", "padded-by-another"],
)
def test_filler_is_what_stands_behind_the_closing_token(
    tmp_path: Path, generation: dict[str, Any], pad: int | None, eos: str | None, fillers: tuple[int, ...]
) -> None:
    folder = write_checkpoint(tmp_path, generation=generation, pad_token_id=pad)
    if eos is not None:
        write_tokenizer(folder, 64, eos_token=eos)

    assert load_model(folder).spec.filler_ids == fillers


# --- what does not fit


def test_an_unknown_architecture_is_told_what_is_supported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, architectures=["GPT2LMHeadModel"], model_type="sdar")

    with pytest.raises(ModelError, match="GPT2LMHeadModel.*supported: .*SDARForCausalLM"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (write_checkpoint(tmp_path) / name).unlink()

    with pytest.raises(ModelError, match=name):
        load_model(tmp_path)


def test_a_missing_tokenizer_is_named_where_one_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_model(write_checkpoint(tmp_path), need_tokenizer=True)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such model folder"):
        load_model(tmp_path / "nowhere")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(ModelError, match="model-00002-of-00003.safetensors"):
        load_model(folder)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))

    with pytest.raises(ModelError, match="beside the index"):
        load_model(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    (write_checkpoint(tmp_path) / name).write_bytes(b"{ broken")

    with pytest.raises(ModelError, match=name):
        load_model(tmp_path)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny_weights(TINY)
    del weights["model.layers.1.self_attn.k_proj.weight"]

    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(write_checkpoint(tmp_path, weights=weights))


def test_extra_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny_weights(TINY) | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}

    with pytest.raises(ModelError, match=r"no place in this architecture: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(write_checkpoint(tmp_path, weights=weights))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    weights = tiny_weights(TINY) | {"model.layers.0.mlp.up_proj.weight": torch.zeros(41, 24)}

    with pytest.raises(ModelError, match=r"mlp\.up_proj\.weight has shape \[41, 24\]; .* \[40, 24\]"):
        load_model(write_checkpoint(tmp_path, weights=weights))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "24"}, "hidden_size must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope' is not supported"),
        ({"rope_theta": None}, "rope_theta: must be a positive number"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"eos_token_id": 64}, "stop token 64 is outside the vocabulary"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_served_names_its_key(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    weights = tiny_weights(TINY)

    with pytest.raises(ModelError, match=said):
        load_model(write_checkpoint(tmp_path, weights=weights, **changes))


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"strategy": "magic"}, "strategy|magic"),
        ({"strategy": "threshold", "threshold": 2}, "threshold"),
        ({"block_length": 0}, "block_length must be >= 1"),
        ({"temperature": "warm"}, "temperature must be >= 0"),
    ],
)
def test_a_generation_config_out_of_range_names_its_key(tmp_path: Path, generation: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        load_model(write_checkpoint(tmp_path, generation=generation))


def test_every_family_of_the_table_has_a_module_with_both_functions() -> None:
    import importlib

    for name in set(FAMILIES.values()):
        module = importlib.import_module(name)
        assert callable(module.read_spec) and callable(module.build)
