"""Models that ship with the worker."""

from pathlib import Path

_MODELS = Path(__file__).parent / "demo" / "models"

BUNDLED: tuple[str, ...] = ("demo", "demo-nano")


def bundled_folder(name: str) -> Path:
    """Return the folder of a bundled model; raises KeyError for a name that is not in `BUNDLED`."""
    if name not in BUNDLED:
        raise KeyError(name)
    return _MODELS / name
