"""Adapters of DiffusionGemma against transformers' own model under peft, which wraps text and canvas by themselves."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shared.adapters import CONFIG, WEIGHTS, InvalidAdapter, digest_of
from shared.commands import Generate, Limits, LoraUse
from shared.decoding import Renoise
from tests.goldens.folder import GoldenFolder, find_folders
from tests.goldens.passes import run_canvas
from tests.goldens.test_goldens import run
from tests.worker.test_adapters import Shelf
from tests.worker.test_diffusion_gemma import (
    CANVAS,
    DECODINGS,
    EOS,
    PAGE,
    PROMPTS,
    TOKENS,
    Greedy,
    generate,
    make_oracle,
)
from tests.worker.test_families import quiet
from tests.worker.texts import NoText
from worker.adapters.sides import Sides, of_text
from worker.adapters.stack import AdapterStack
from worker.adapters.targets import find_targets
from worker.adapters.variant import with_adapter
from worker.adapters.weights import load_adapter
from worker.canvas_runner import CanvasRunner
from worker.engine.engine import Engine
from worker.engine.plan import Plan
from worker.engine.ports import Decision
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel, ModelError, load_model

TOLERANCE = 1e-4
FOLDERS = [folder for folder in find_folders() if folder.family == "diffusion_gemma"]
LINEARS = r".*(language_model|decoder)\.layers\.\d+\.(self_attn|mlp)\.\w+_proj|.*self_conditioning\.\w+_proj"
SHORT = Renoise(bound=1.0, max_denoising_steps=3, stability_threshold=3)
ADAPTERS: Mapping[str, tuple[int, str]] = {
    "all": (3, LINEARS),
    "text": (6, r".*language_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"),
    "canvas": (2, r".*decoder\.layers\.\d+\.self_attn\.\w+_proj"),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """Transformers' model with all adapters in it, none of them active, and ours beside their folders."""

    reference: Any
    wrapped: Any
    model: LoadedModel
    store: Path
    shelf: Shelf

    def use(self, name: str, scale: float = 1.0) -> LoraUse:
        return LoraUse(name=name, scale=scale, path=name, digest=digest_of(self.store / name))

    def activate(self, uses: Sequence[LoraUse]) -> None:
        from peft.tuners.lora import LoraLayer

        self.wrapped.base_model.set_adapter([use.name for use in uses])
        for module in self.wrapped.modules():
            if isinstance(module, LoraLayer):
                for use in uses:
                    module.set_scale(use.name, use.scale)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    from peft import LoraConfig, PeftModel, get_peft_model

    base, store = tmp_path_factory.mktemp("gemma"), tmp_path_factory.mktemp("store")
    reference = make_oracle(base)
    wrapped: PeftModel | None = None
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (rank, targets) in ADAPTERS.items():
            config = LoraConfig(r=rank, lora_alpha=4, target_modules=targets, bias="none")
            if wrapped is None:
                wrapped = get_peft_model(reference, config, adapter_name=name)  # type: ignore[assignment]
            else:
                wrapped.add_adapter(name, config)
        assert wrapped is not None
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) / 4
        for name in ADAPTERS:
            wrapped.save_pretrained(str(store), selected_adapters=[name])
    model = load_model(base)
    targets = find_targets(model)
    loaded = {
        digest_of(store / name): load_adapter(store / name, targets, model.device, model.dtype) for name in ADAPTERS
    }
    return Bench(reference, wrapped.eval(), model, store, Shelf(loaded))


def ask(
    name: str,
    uses: Sequence[LoraUse],
    prompt: Sequence[int] = PROMPTS["long"],
    decoding: Renoise = SHORT,
    max_tokens: int = 2 * CANVAS,
) -> Generate:
    limits = Limits(max_tokens=max_tokens, stop_token_ids=(EOS,))
    return Generate(id=name, model="m", prompt=tuple(prompt), limits=limits, decoding=decoding, lora=tuple(uses))


def make_engine(bench: Bench, start: int | None = None, seen: list[Plan] | None = None) -> tuple[Engine, CanvasRunner]:
    """With `start`, the position of the first canvas, noise is what transformers' loop is given."""
    noise = None if start is None else Greedy(start)
    runner = CanvasRunner(bench.model, 96, PAGE, noise=noise, adapters=bench.shelf)

    def forward(plan: Plan) -> Decision:
        if seen is not None:
            seen.append(plan)
        return runner(plan)

    cache, limits = CacheShape(PAGE, 96), BatchLimits(16, 256)
    return Engine(bench.model.spec, cache, limits, forward, lambda request, resume: NoText()), runner


MIXES = {
    "all": (("all", 1.0),),
    "half": (("all", 0.5),),
    "text": (("text", 1.0),),
    "canvas": (("canvas", -1.5),),
    "summed": (("all", 0.7), ("canvas", 1.0)),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("prompt", ["short", "long"])
def test_greedy_canvases_under_adapters_are_those_of_transformers_loop_under_peft(
    bench: Bench, mix: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses, tokens = [bench.use(*each) for each in MIXES[mix]], PROMPTS[prompt]
    decoding = DECODINGS["until-it-stands-still"]
    bench.activate(uses)
    expected = generate(bench.reference, tokens, decoding, monkeypatch)
    engine, _ = make_engine(bench, start=len(tokens))

    assert run(engine, [[ask("r", uses, tokens, decoding, TOKENS)]])["r"] == expected
    with bench.wrapped.disable_adapter():
        assert generate(bench.reference, tokens, decoding, monkeypatch) != expected, "an adapter that changes nothing"


def test_rows_with_other_adapters_and_scales_get_what_they_get_alone(bench: Bench) -> None:
    asked = {"base": [], **{name: [bench.use(*each) for each in mix] for name, mix in MIXES.items()}}
    requests = [ask(name, uses) for name, uses in asked.items()]
    alone = {each.id: run(make_engine(bench)[0], [[each]])[each.id] for each in requests}

    engine, _ = make_engine(bench)
    assert run(engine, [requests]) == alone
    # What one has read is nothing that the next may go on from.
    again = [each.model_copy(update={"id": f"{each.id}-again"}) for each in requests]
    assert run(engine, [[each] for each in again]) == {f"{name}-again": found for name, found in alone.items()}
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == len(asked)


def test_one_forward_over_rows_with_other_adapters_gives_each_its_own(bench: Bench) -> None:
    asked = [[], *([bench.use(*each) for each in mix] for mix in MIXES.values())]
    seen = list[Plan]()
    engine, runner = make_engine(bench, seen=seen)
    prompts = [PROMPTS["long"][number:] for number in range(len(asked))]
    run(engine, [[ask(f"r{number}", uses, prompts[number]) for number, uses in enumerate(asked)]])
    plan = next(plan for plan in seen if all(row.canvas is not None and row.canvas.step == 0 for row in plan.rows))
    assert len(plan.rows) == len(asked)

    together = runner._forward(plan.rows)  # a CPU's steps run them one by one

    apart = torch.cat([runner._forward([row]) for row in plan.rows])
    assert (together - apart).abs().max() < TOLERANCE


@pytest.mark.parametrize("rslora", [False, True], ids=["plain", "rank-stabilised"])
@pytest.mark.parametrize("golden", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_an_adapter_beside_the_weights_is_what_peft_merges_into_them(
    golden: GoldenFolder, tmp_path: Path, rslora: bool
) -> None:
    arrays, name = golden.arrays(), golden.forward[0]["name"]
    prompt, canvas, believed = (arrays[f"{name}.{key}"] for key in ("input_ids", "canvas_ids", "selfcond_logits"))
    merged = write_adapter_and_merge(golden.path, tmp_path, rslora)
    with quiet():
        wanted = merged(input_ids=prompt, decoder_input_ids=canvas, self_conditioning_logits=believed).logits[0]
    model = golden.model()
    adapter = load_adapter(tmp_path, find_targets(model), model.device, model.dtype)
    uses = (("x", 1.0),)
    stack = AdapterStack(Sides(Shelf({"x": adapter})), model.device)

    found = run_canvas(
        model, prompt[0], canvas[0], believed[0], stack.of([of_text(uses), uses], [prompt.shape[1], canvas.shape[1]])
    )

    assert (found - wanted).abs().max() < TOLERANCE * max(1.0, float(wanted.abs().max()))
    assert (run_canvas(model, prompt[0], canvas[0], believed[0]) - wanted).abs().max() > 0.1


@torch.inference_mode()
def write_adapter_and_merge(base: Path, folder: Path, rslora: bool) -> Any:
    """Write an adapter of all linears of text and canvas; return transformers' model with it merged.

    Each of the two has its own copy of the weights: in one that they share peft would merge the factors of both.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        model = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(base, dtype=torch.float32).eval()
        for module in model.model.decoder.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.clone())
        config = LoraConfig(r=4, lora_alpha=8, use_rslora=rslora, target_modules=LINEARS, bias="none")
        adapted = get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter) / 4
        adapted.save_pretrained(str(folder))
        return adapted.merge_and_unload()


def test_an_adapter_cannot_be_part_of_a_model_whose_text_and_canvas_share_weights(bench: Bench) -> None:
    with pytest.raises(
        ModelError, match="^adapter: in a model of family diffusion_gemma text and canvas share weights"
    ):
        with_adapter(bench.model, bench.store / "all")


def test_adapters_of_experts_are_refused(bench: Bench, tmp_path: Path) -> None:
    name = "base_model.model.model.decoder.layers.0.experts.gate_up_proj"
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, 32), f"{name}.lora_B.weight": torch.zeros(48, 2)}
    save_file(tensors, tmp_path / WEIGHTS)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["gate_up_proj"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(InvalidAdapter, match="target_modules: .* adapters of experts are not served"):
        load_adapter(tmp_path, find_targets(bench.model), bench.model.device, bench.model.dtype)
