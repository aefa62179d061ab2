"""Adapters of models whose text and canvas are read by modules of their own over the same weights (DiffusionGemma)."""

from dataclasses import replace

from worker.adapters.stack import Residents, Uses
from worker.adapters.weights import Adapter

_TEXT = "text:"


class Sides:
    """Implements `Residents`: by an adapter's digest what a canvas is read under, by another key what text is."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents

    def get(self, digest: str) -> Adapter | None:
        adapter = self._residents.get(digest.removeprefix(_TEXT))
        if adapter is None or not digest.startswith(_TEXT):
            return adapter
        return replace(adapter, factors=adapter.of_text)

    def held(self) -> set[str]:
        held = self._residents.held()
        return held | {_TEXT + digest for digest in held}


def of_text(uses: Uses) -> Uses:
    """Return the keys in `Sides` of what a row's text is read under."""
    return tuple((_TEXT + digest, scale) for digest, scale in uses)
