"""D2F: an adapter under which a bidirectional model decides block after block, against recomputing everything."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.commands import Generate, Limits
from shared.decoding import Threshold
from tests.goldens.folder import GoldenFolder, find_folders
from tests.goldens.passes import Pass, run_pass
from tests.worker.adapter_folders import read_weights, write_adapter, write_merged
from tests.worker.test_families import run
from worker.adapters.targets import find_targets, shapes_of
from worker.adapters.variant import as_block_causal, with_adapter
from worker.engine.plan import visible_ends
from worker.engine.window import cuts_windows
from worker.models import LoadedModel, ModelError, load_checkpoint
from worker.models.checkpoint import read_checkpoint
from worker.models.spec import Attention, Commit

BLOCK = 4
THRESHOLD = 0.05
GOLDENS = {folder.name: folder for folder in find_folders()}


def fresh(folder: Path, golden: GoldenFolder) -> LoadedModel:
    checkpoint = read_checkpoint(folder)
    mask = golden.model().spec.mask_token_id
    return load_checkpoint(replace(checkpoint, config={"mask_token_id": mask, **checkpoint.config}))


def decode_by_hand(model: LoadedModel, prompt: list[int], max_tokens: int, shift: int) -> list[int]:
    """Recompute the whole text in each step, under the mask of D2F.

    With shifted logits the first token of a block is taken at once: its row stands before the block.
    """
    spec = model.spec
    origin, tokens = len(prompt), list(prompt)
    while len(tokens) < origin + max_tokens:
        start, end = len(tokens), len(tokens) + BLOCK
        tokens += [spec.mask_token_id] * BLOCK
        masked = set(range(start, min(end, origin + max_tokens)))
        first = shift > 0
        while masked:
            ends = visible_ends(Attention.BLOCK_CAUSAL, 0, end, BLOCK, end, origin)
            blank = torch.zeros(end, spec.vocab_size)
            logits = run_pass(model, Pass(torch.tensor(tokens), torch.arange(end), tuple(ends), blank)).clone()
            logits[:, spec.text_vocab_size :] = -torch.inf
            logits[:, spec.mask_token_id] = -torch.inf
            best = logits.softmax(-1).max(-1)
            found = {place: (float(best[0][place - shift]), int(best[1][place - shift])) for place in masked}
            chosen = {place for place, (confidence, _) in found.items() if confidence >= THRESHOLD}
            chosen = {start} if first else chosen | {max(masked, key=lambda place: found[place][0])}
            first = False
            for place in chosen:
                tokens[place] = found[place][1]
            masked -= chosen
    return tokens[origin : origin + max_tokens]


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_a_d2f_adapter_makes_a_bidirectional_model_decide_block_after_block(tmp_path: Path, name: str) -> None:
    golden = GOLDENS[name]
    plain = golden.model()
    merged = write_adapter(tmp_path / "d2f", read_weights(golden.path), shapes_of(find_targets(plain)), rank=2)
    known = fresh(write_merged(tmp_path / "merged", golden.path, merged), golden)
    copy = write_merged(tmp_path / "copy", golden.path, read_weights(golden.path))

    model = with_adapter(fresh(copy, golden), tmp_path / "d2f", BLOCK)

    assert (model.spec.family, model.spec.block_length) == (f"{name}_d2f", BLOCK)
    assert not cuts_windows(model.spec)
    prompts = [[3, 9, 27, 81, 5, 15, 45], [7, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]]
    requests = [
        Generate(
            id=f"r{number}",
            model="m",
            prompt=tuple(prompt),
            limits=Limits(max_tokens=10, ignore_eos=True),
            decoding=Threshold(threshold=THRESHOLD, filler_rules=False),
        )
        for number, prompt in enumerate(prompts)
    ]

    # Together in one budget, which the longest prompt alone exceeds: it cannot be cut, for it sees its own end.
    found = run(model, requests, token_budget=16)

    for request, prompt in zip(requests, prompts, strict=True):
        assert found[request.id][0] == decode_by_hand(known, prompt, 10, plain.spec.logit_shift)


def test_only_a_bidirectional_model_can_be_made_block_causal(tmp_path: Path) -> None:
    for name in ("sdar", "wedlm", "fastdllm_v2"):
        with pytest.raises(ModelError, match=r"^adapter_block_length: "):
            as_block_causal(GOLDENS[name].model().spec, 4)
    spec = as_block_causal(GOLDENS["dream"].model().spec, 32)
    assert (spec.commit, spec.logit_shift, spec.block_length) == (Commit.SEEDED, 1, 32)


def test_an_adapter_of_another_shape_is_refused_at_the_start(tmp_path: Path) -> None:
    golden = GOLDENS["llada"]
    shapes = shapes_of(find_targets(golden.model()))
    write_adapter(tmp_path / "other", read_weights(golden.path), shapes, leaves=["q_proj"])
    config = tmp_path / "other" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 4', '"r": 5'))
    copy = write_merged(tmp_path / "copy", golden.path, read_weights(golden.path))
    with pytest.raises(ModelError, match="r: is 5, but the tensors"):
        with_adapter(fresh(copy, golden), tmp_path / "other", BLOCK)
