"""A tiny model, and one live fleet that serves it for all tests that only ask."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.fleet_process import Up
from tests.fleet.models import write_tiny_model
from tests.worker.adapter_folders import read_weights, write_adapter
from worker.adapters.targets import find_targets, shapes_of
from worker.models import load_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket beside the data."""
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def live_fleet(tiny_model: Path) -> Iterator[Up]:
    """A fleet that calls its model `demo`, as the examples do, with an adapter in its store."""
    folder = Path(tempfile.mkdtemp(prefix="df-"))
    shapes = shapes_of(find_targets(load_model(tiny_model)))
    write_adapter(folder / "store" / "fox", read_weights(tiny_model), shapes)
    store = str(folder / "store")
    up = Up(folder, tiny_model, "--model-name", "demo", "--prompt", "", "--model-store", store)
    try:
        yield up.wait_serving()
        assert up.stop() == 0
    finally:
        up.put_down()
        shutil.rmtree(folder, ignore_errors=True)
