"""Embeddings of the golden checkpoints, against what each family's own reference has recorded.

The head of each checkpoint has more rows than a hidden state has numbers, so the recorded logits of a text determine
its final hidden states. Nemotron's records have logits of generated blocks only: its layers are those of Ministral 3,
which transformers has.
"""

import json
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Ministral3Config, Ministral3Model

from tests.goldens.folder import Entry, GoldenFolder, find_folders
from tests.worker.test_embeddings import TOLERANCE, decode, request, run
from worker.models import LoadedModel

FOLDERS = {folder.name: folder for folder in find_folders()}


def reads_as_a_text(folder: GoldenFolder, entry: Entry) -> bool:
    """Tell whether the record is of a text as an embedding reads it: whole, in order, in the model's own blocks."""
    arrays, name = folder.arrays(), entry["name"]
    if f"{name}.logits" not in arrays or f"{name}.attention_mask" in arrays:
        return False
    positions = arrays.get(f"{name}.position_ids", torch.arange(2)[None])
    block = entry.get("block_length")
    return bool((positions.diff() == 1).all()) and block in (None, folder.model(torch.float32).spec.block_length)


TEXTS = [
    (folder, entry)
    for folder in FOLDERS.values()
    if folder.family != "diffusion_gemma"
    for entry in folder.forward
    if reads_as_a_text(folder, entry)
]


def mean(hidden: Tensor) -> Tensor:
    return torch.nn.functional.normalize(hidden.mean(0), dim=0).float()


def hidden_of(logits: Tensor, model: LoadedModel) -> Tensor:
    """Return the hidden states [tokens, width] that a model's head makes these logits [tokens, vocab] of."""
    weight = model.module.logits(torch.eye(model.spec.hidden_size, device=model.device)).cpu().double()
    solved = torch.linalg.lstsq(weight.T, logits.double().T)
    assert (weight.T @ solved.solution - logits.double().T).abs().max() < 1e-3, "no hidden states give these logits"
    return solved.solution.T


@pytest.mark.parametrize(("folder", "entry"), TEXTS, ids=[f"{f.name}-{e['name']}" for f, e in TEXTS])
@torch.inference_mode()
def test_embeddings_are_the_mean_of_the_hidden_states_behind_the_recorded_logits(
    folder: GoldenFolder, entry: Entry
) -> None:
    model, arrays = folder.model(torch.float32), folder.arrays()
    wanted = mean(hidden_of(arrays[f"{entry['name']}.logits"][0], model))
    tokens = arrays[f"{entry['name']}.input_ids"][0].tolist()
    assert (decode(run(model, [request("r", tokens)])["r"][-1]) - wanted).abs().max() < TOLERANCE


def test_every_family_with_records_is_among_them() -> None:
    recorded = {folder.family for folder in FOLDERS.values()} - {"diffusion_gemma", "nemotron_labs_diffusion"}
    assert {folder.family for folder, _ in TEXTS} >= recorded - {"wedlm"}


@torch.inference_mode()
def test_nemotrons_embeddings_are_those_of_transformers_ministral() -> None:
    folder = FOLDERS["nemotron_labs_diffusion"]
    settings = json.loads((folder.path / "config.json").read_bytes())
    known = cast(dict[str, object], Ministral3Config().to_dict())
    oracle = Ministral3Model(Ministral3Config(**{key: settings[key] for key in settings if key in known}))
    weights = load_file(folder.path / "model.safetensors")
    named = {name.removeprefix("encoder."): weight for name, weight in weights.items() if name.startswith("encoder.")}
    oracle.load_state_dict(named)
    oracle.eval()
    model = folder.model(torch.float32)
    for length in (1, 9, 33, 70):
        tokens = [(7 * place) % 90 + 5 for place in range(length)]
        wanted = mean(oracle(torch.tensor([tokens])).last_hidden_state[0])
        assert (decode(run(model, [request("r", tokens)])["r"][-1]) - wanted).abs().max() < TOLERANCE
