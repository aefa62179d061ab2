"""The shipped folders are complete, loadable and as good as their eval.json says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from worker.demo.chatml import ANSWER_START, FILLER_ID, MASK_ID, STOP_ID, render_turns
from worker.demo.evaluate import HEADLINES, MODES, collect, evaluate, table
from worker.demo.export import configuration, load_model, save_model
from worker.demo.model import SHAPES, DemoModel, Shape
from worker.demo.reference_decoder import ReferenceDecoder, Settings
from worker.demo.tasks import TASKS
from worker.demo.train import MODELS

FOLDERS = {"demo": SHAPES["demo"], "demo-nano": SHAPES["nano"]}


def _expected(shape: Shape) -> dict[str, tuple[int, ...]]:
    h, kv, q, ff = shape.hidden, shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim, shape.intermediate
    layer = {
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
        "self_attn.q_norm": (shape.head_dim,),
        "self_attn.k_norm": (shape.head_dim,),
        "mlp.gate_proj": (ff, h),
        "mlp.up_proj": (ff, h),
        "mlp.down_proj": (h, ff),
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
    }
    names = {f"model.layers.{i}.{k}.weight": v for i in range(shape.layers) for k, v in layer.items()}
    return names | {"model.embed_tokens.weight": (shape.vocabulary, h), "model.norm.weight": (h,)}


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                assert tensors.get_slice(name).get_dtype() == "BF16"
                found[name] = tuple(tensors.get_slice(name).get_shape())
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_have_the_names_and_shapes_of_the_family(name: str) -> None:
    assert _shapes(MODELS / name) == _expected(FOLDERS[name])


def test_the_larger_model_is_sharded_with_an_index_that_matches() -> None:
    index = json.loads((MODELS / "demo" / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        with safe_open(MODELS / "demo" / file, "pt") as tensors:
            assert set(tensors.keys()) == {name for name, place in index["weight_map"].items() if place == file}
    assert set(index["weight_map"]) == set(_expected(SHAPES["demo"]))


@pytest.mark.parametrize("name", FOLDERS)
def test_configuration_and_card_are_there(name: str) -> None:
    folder = MODELS / name
    assert json.loads((folder / "config.json").read_text()) == configuration(FOLDERS[name])
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [STOP_ID, FILLER_ID]
    assert (generation["decoding_strategy"], generation["threshold"], generation["block_length"]) == (
        "threshold",
        0.9,
        16,
    )
    card = (folder / "README.md").read_text()
    assert "WordNet" in card
    assert (MODELS.parent / "NOTICE").read_text().count("Princeton University") >= 2
    assert (folder / "tokenizer.json").read_bytes() == (MODELS / "demo" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_evaluation_report_is_sane(name: str) -> None:
    report = json.loads((MODELS / name / "eval.json").read_text())
    assert report["model"] == name
    assert report["tokens"] > 1e8
    assert {"date", "device", "seconds", "tokens"} <= set(report)
    for entry in (*report["tasks"].values(), *report["groups"].values(), report["overall"]):
        assert entry["items"] > 0
        for mode in MODES:
            assert 0 <= entry[mode]["accuracy"] <= 1
            assert 0.5 < entry[mode]["tokens_per_forward"] <= 16
    assert report["overall"]["sequential"]["tokens_per_forward"] <= 1.0
    assert table(report).count("\n") > len(report["tasks"])


def test_the_default_model_is_as_good_as_the_product_promises() -> None:
    report = json.loads((MODELS / "demo" / "eval.json").read_text())
    groups, overall = report["groups"], report["overall"]
    assert overall["sequential"]["accuracy"] - overall["threshold"]["accuracy"] <= 0.01
    assert all(groups[name]["threshold"]["accuracy"] >= 0.96 for name in HEADLINES)
    assert groups["json"]["threshold"]["tokens_per_forward"] >= 4
    assert groups["stories"]["threshold"]["tokens_per_forward"] >= 2.5


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is 345 + 678?", "345 + 678 = 1023"),
        ("who are you?", "I am the demo model of Diffleet, a very small diffusion language model."),
    ],
)
def test_the_default_model_answers_a_newcomer(prompt: str, wanted: str) -> None:
    torch.manual_seed(0)
    model, tokenizer = load_model(MODELS / "demo")
    ids = tokenizer.encode(render_turns([("user", prompt)]) + ANSWER_START, add_special_tokens=False).ids
    ((answer, forwards),) = ReferenceDecoder(model).generate([ids], Settings())
    assert tokenizer.decode(answer[:-1], skip_special_tokens=False) == wanted
    assert answer[-1] == STOP_ID
    assert forwards < len(answer)


def test_saving_and_loading_changes_nothing_but_precision(tmp_path: Path) -> None:
    shape = Shape(hidden=64, layers=2, intermediate=96, heads=2, kv_heads=1, head_dim=32, vocabulary=4096)
    model = DemoModel(shape, seed=3)
    save_model(model.state_dict(), shape, tmp_path, shards=2)
    (tmp_path / "tokenizer.json").write_bytes((MODELS / "demo" / "tokenizer.json").read_bytes())
    loaded, _ = load_model(tmp_path)
    assert loaded.shape == shape
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor.bfloat16().float())


def test_evaluation_takes_any_decoder() -> None:
    tokenizer = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
    items = collect([TASKS["capital"], TASKS["sort"]], 8)
    answers = [item.answer for group in items.values() for item in group]

    def perfect(prompts: list[list[int]], settings: Settings) -> list[tuple[list[int], int]]:
        assert len(prompts) == len(answers)
        return [([*tokenizer.encode(answer).ids, STOP_ID], 2) for answer in answers]

    report = evaluate(perfect, tokenizer, items)
    assert report["overall"]["threshold"]["accuracy"] == 1.0
    assert report["overall"]["threshold"]["unclosed"] == 0
    broken = evaluate(lambda prompts, settings: [([MASK_ID], 1)] * len(prompts), tokenizer, items)
    assert broken["overall"]["threshold"] == {"accuracy": 0.0, "tokens_per_forward": 1.0, "unclosed": len(answers)}
    assert broken["mistakes"]
