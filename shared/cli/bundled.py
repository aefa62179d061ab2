"""The models that ship with the worker package, found as files: the worker itself may not be installed."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

_OBJECT = TypeAdapter(dict[str, object])


@dataclass(frozen=True, slots=True)
class BundledModel:
    name: str
    folder: Path

    @property
    def size_mb(self) -> float:
        """Size of all files in units of 10^6 bytes."""
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file()) / 1e6

    def config(self) -> Mapping[str, object]:
        return _read_object(self.folder / "config.json")

    def evaluation(self) -> Mapping[str, object] | None:
        """Return eval.json, None if this model has none."""
        path = self.folder / "eval.json"
        return _read_object(path) if path.is_file() else None


def bundled_models(root: Path | None = None) -> dict[str, BundledModel]:
    """Return the bundled models by name; empty where the worker package is not installed."""
    root = root or _models_folder()
    if root is None or not root.is_dir():
        return {}
    return {
        folder.name: BundledModel(folder.name, folder)
        for folder in sorted(root.iterdir())
        if (folder / "config.json").is_file()
    }


def _models_folder() -> Path | None:
    spec = importlib.util.find_spec("worker")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "demo" / "models"


def _read_object(path: Path) -> Mapping[str, object]:
    return _OBJECT.validate_json(path.read_bytes())
