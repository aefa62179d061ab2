"""DiffusionGemma against transformers' own model and loop on a tiny random checkpoint: greedy tokens and forwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.commands import Generate, Limits
from shared.decoding import Renoise
from tests.goldens.test_goldens import run
from tests.worker.test_families import quiet
from tests.worker.texts import NoText
from worker.canvas_runner import CanvasRunner
from worker.engine.engine import Engine
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models import LoadedModel, load_model

CANVAS, EOS, PAGE = 8, 62, 8
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "per_layer_config": {"2": {"head_dim": 16, "num_key_value_heads": 1}},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    # Narrower than the longest text: keys leave the window.
    "sliding_window": 8,
    "num_experts": 4,
    "top_k_experts": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 60,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PROMPTS = {"short": (5, 17, 33), "a-canvas": tuple(range(1, 9)), "long": tuple(7 * i % 59 for i in range(21))}
TOKENS = 3 * CANVAS
# Few steps: each prediction conditions the next, so that a difference in the last bit grows from step to step.
DECODINGS = {
    "every-step": Renoise(bound=1.0, max_denoising_steps=6, t_min=0.2, t_max=0.8, stability_threshold=6),
    "until-it-stands-still": Renoise(
        bound=3.0, max_denoising_steps=6, t_min=0.1, t_max=0.4, stability_threshold=1, confidence_threshold=0.5
    ),
    "nothing-but-the-surest": Renoise(bound=1e-9, max_denoising_steps=5, confidence_threshold=10.0),
}


def make_oracle(folder: Path) -> Any:
    """Write a checkpoint of random weights; return transformers' model."""
    with quiet():
        import transformers

        torch.manual_seed(11)
        config = transformers.DiffusionGemmaConfig(
            text_config=TEXT,
            vision_config=VISION,
            canvas_length=CANVAS,
            # Beyond the vocabulary's text, where nothing is proposed by chance.
            image_token_id=61,
            boi_token_id=61,
            eoi_token_id=61,
        )
        model = transformers.DiffusionGemmaForBlockDiffusion(config).float().eval()
        for name, parameter in model.named_parameters():
            if "norm" in name or "scal" in name:
                parameter.data = 1 + torch.randn_like(parameter) / 8
            elif "embed_tokens" in name:
                parameter.data = torch.randn_like(parameter) / 4
            else:
                parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
        model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    folder = tmp_path_factory.mktemp("gemma")
    return make_oracle(folder), load_model(folder)


class Greedy:
    """Noise that both loops can ask for: the best token of each position, and ids by canvas and step."""

    def __init__(self, start: int) -> None:
        """`start` is the position of the first canvas."""
        self._start = start

    def ids(self, seed: int, positions: Tensor, step: int, vocab_size: int) -> Tensor:
        return noise_of((int(positions[0]) - self._start) // CANVAS, step)

    def sample(
        self, logits: Tensor, barred: Tensor, temperature: Tensor, seed: int, positions: Tensor, step: int
    ) -> Tensor:
        return logits.masked_fill(barred, float("-inf")).argmax(-1)


def noise_of(canvas: int, step: int) -> Tensor:
    return torch.randint(60, (CANVAS,), generator=torch.Generator().manual_seed(100 * canvas + step + 1))


@torch.inference_mode()
def generate(
    oracle: Any, prompt: tuple[int, ...], decoding: Renoise, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], int]:
    """Run transformers' loop; return its tokens before eos and its passes over a canvas."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSampler as Sampler
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    canvas, step, passes = -1, -1, 0
    renoise = Sampler.renoise_canvas

    def initialize_canvas(self: Sampler, batch_size: int, device: torch.device) -> Tensor:
        nonlocal canvas
        canvas += step < 0
        return noise_of(canvas, step)[None]

    def renoise_canvas(self: Sampler, accepted_canvas: Any, cur_step: Any) -> Tensor:
        nonlocal step, passes
        step, passes = decoding.max_denoising_steps - int(cur_step), passes + 1
        noisy = renoise(self, accepted_canvas, cur_step)
        step = -1
        return noisy

    monkeypatch.setattr(Sampler, "initialize_canvas", initialize_canvas)
    monkeypatch.setattr(Sampler, "renoise_canvas", renoise_canvas)
    monkeypatch.setattr(torch, "multinomial", lambda probabilities, num_samples: probabilities.argmax(-1, keepdim=True))
    with quiet():
        found = oracle.generate(
            torch.tensor([prompt]),
            max_new_tokens=TOKENS,
            max_denoising_steps=decoding.max_denoising_steps,
            t_min=decoding.t_min,
            t_max=decoding.t_max,
            stability_threshold=decoding.stability_threshold,
            confidence_threshold=decoding.confidence_threshold,
            sampler_config=EntropyBoundSamplerConfig(entropy_bound=decoding.bound),
            eos_token_id=EOS,
            pad_token_id=0,
        )
    tokens = found.sequences[0, len(prompt) :].tolist()
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens, passes


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("decoding", DECODINGS.values(), ids=DECODINGS)
def test_greedy_canvases_are_those_of_transformers_loop(
    oracle: tuple[Any, LoadedModel], name: str, decoding: Renoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, model = oracle
    prompt = PROMPTS[name]
    expected = generate(reference, prompt, decoding, monkeypatch)
    runner = CanvasRunner(model, 64, PAGE, noise=Greedy(len(prompt)))
    engine = Engine(model.spec, CacheShape(PAGE, 64), BatchLimits(4, 64), runner, lambda request, resume: NoText())
    request = Generate(
        id="r", model="m", prompt=prompt, limits=Limits(max_tokens=TOKENS, stop_token_ids=(EOS,)), decoding=decoding
    )

    assert run(engine, [[request]])["r"] == expected
    assert len(set(expected[0])) > 5, "canvases that are all alike prove nothing"
