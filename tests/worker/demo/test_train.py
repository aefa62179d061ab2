"""The training script runs on a CPU in seconds and learns."""

import json
import re
from pathlib import Path

import pytest
import torch

from worker.demo.export import load_model
from worker.demo.model import SHAPES, DemoModel
from worker.demo.optimizer import Muon, build_optimizers, orthogonalise
from worker.demo.train import main, set_rate


def test_a_short_run_lowers_the_loss_and_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo-nano"
    common = ["--size", "nano", "--rows", "2", "--row-len", "256", "--data-workers", "0", "--evaluate-items", "0"]
    main([*common, "--minutes", "0.12", "--probe-s", "0", "--out", str(out)])
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert losses[0] < 8.4  # the logarithm of the vocabulary is 8.32
    card = (out / "README.md").read_text()
    final = float(re.search(r"final loss \| (\S+) \|", card)[1])  # type: ignore[index]
    assert final < losses[0] or len(losses) == 1
    assert final < 7.8
    model, _ = load_model(out)
    assert model.shape == SHAPES["nano"]
    assert json.loads((out / "config.json").read_text())["model_type"] == "sdar"


def test_orthogonalised_matrices_have_even_singular_values() -> None:
    generator = torch.Generator().manual_seed(2)
    for shape in ((3, 64, 32), (2, 32, 64)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=generator)).float())
        assert values.min() > 0.3
        assert values.max() < 1.4


def test_each_parameter_has_one_optimizer_and_matrices_have_muon() -> None:
    model = DemoModel(SHAPES["nano"])
    muon, adam = build_optimizers(model, lr=1e-3)
    assert isinstance(muon, Muon)
    owned = [p for o in (muon, adam) for group in o.param_groups for p in group["params"]]
    assert len(owned) == len(set(map(id, owned))) == len(list(model.parameters()))
    assert model.model.embed_tokens.weight is not muon.param_groups[0]["params"][0]
    assert all(p.dim() == 2 for p in muon.param_groups[0]["params"])


def test_the_rate_warms_up_and_ends_annealed_by_the_clock() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)

    def rate(fraction: float, step: int) -> float:
        set_rate([optimizer], 1.0, fraction, step)
        return float(optimizer.param_groups[0]["lr"])

    assert rate(0.0, 0) == pytest.approx(0.01)
    assert rate(0.3, 5000) > rate(0.6, 9000) > rate(0.9, 9999)
    assert rate(1.0, 10) == pytest.approx(0.01)
