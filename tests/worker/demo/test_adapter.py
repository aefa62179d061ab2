"""The made-up adapter that one can try adapters with."""

from pathlib import Path

import pytest
import torch

from shared.adapters import check_adapter
from tests.fleet.models import write_tiny_model
from worker.adapters.targets import find_targets, shapes_of
from worker.adapters.weights import load_adapter
from worker.demo.adapter import main
from worker.models import load_model


def test_it_is_one_that_a_fleet_takes_for_every_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    targets = find_targets(load_model(model))
    main([str(tmp_path / "store" / "fox"), "--model", str(model), "--rank", "2", "--strength", "0.5"])
    facts = check_adapter(tmp_path / "store" / "fox", shapes_of(targets))
    assert set(facts.modules) == set(targets) and facts.rank == 2
    assert f"{len(targets)} layers" in capsys.readouterr().out
    loaded = load_adapter(tmp_path / "store" / "fox", targets, torch.device("cpu"), torch.float32)
    assert any(up.abs().sum() > 0 for _, up in loaded.factors.values())


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "fox"), "--model", str(tmp_path / "nowhere")])
    assert ended.value.code == 2 and "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "fox").exists()
