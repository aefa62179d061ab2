"""The kernels that a card chooses, over the shapes of every golden checkpoint: odd heads, small pages, float32.

They run in Triton's interpreter, slowly, so that each family has a few tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.dispatch import Op
from tests.goldens import test_diffusion_gemma as gemma
from tests.goldens.conditioning import spread
from tests.goldens.folder import DEVICE, GoldenFolder, find_folders
from tests.goldens.passes import Pass, run_canvas, run_pass, to_passes
from tests.goldens.test_goldens import FAMILIES, LOGIT_TOLERANCE, PASSES
from tests.kernels.gpu_cases import ON_GPU
from tests.worker import test_families as families
from worker.models import load_model

pytestmark = [
    pytest.mark.skipif(ON_GPU or DEVICE != "cpu", reason="the device chooses them itself"),
    # A tile's rows behind the last query divide nothing by nothing; they are not stored.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TOKENS = 9
"""More than a page has."""
FOLDERS = [pytest.param(folder, id=folder.name) for folder in find_folders() if folder.family in FAMILIES]
CANVASES = [pytest.param(folder, id=folder.name) for folder in gemma.FOLDERS]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Choose twins from now on, as a card does."""
    pytest.importorskip("triton")

    def call(self: Op[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (self.fused or self.reference)(*args, **kwargs)

    return lambda: monkeypatch.setattr(Op, "__call__", call)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_forward_through_the_twins_is_as_exact_as_float32_allows(
    folder: GoldenFolder, fused: Callable[[], None]
) -> None:
    whole = PASSES.get(folder.family, to_passes)(folder, folder.forward[0])[-1]
    ends = tuple(min(end, TOKENS) for end in whole.visible_end[:TOKENS])
    few = Pass(whole.token_ids[:TOKENS], whole.positions[:TOKENS], ends, torch.empty(len(ends)))
    exact = run_pass(folder.model(torch.float64), few)
    limit = max(LOGIT_TOLERANCE, 2 * spread(folder, few))

    fused()

    assert (run_pass(folder.model(), few) - exact).abs().max() < limit


@pytest.mark.parametrize("folder", CANVASES)
def test_a_canvas_through_the_twins_has_the_references_logits(folder: GoldenFolder, fused: Callable[[], None]) -> None:
    arrays, name = folder.arrays(), folder.forward[0]["name"]
    prompt, canvas = arrays[f"{name}.input_ids"][0], arrays[f"{name}.canvas_ids"][0]

    fused()

    found = run_canvas(folder.model(), prompt, canvas, arrays[f"{name}.selfcond_logits"][0])
    assert (found - arrays[f"{name}.logits_selfcond"][0]).abs().max() < LOGIT_TOLERANCE


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_a_masked_language_model_has_the_same_logits_through_the_twins(
    tmp_path: Path, name: str, fused: Callable[[], None]
) -> None:
    families.write_masked(tmp_path, name)
    model = load_model(tmp_path)
    wanted = families.masked_logits(model)

    fused()

    assert (families.masked_logits(model) - wanted).abs().max() < LOGIT_TOLERANCE
