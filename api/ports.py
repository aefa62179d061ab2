"""What the front needs of the fleet; `shared.client.FleetClient` is the one that talks to Redis."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from shared.card import ModelCard
from shared.commands import Generate
from shared.events import Event
from shared.text import Tokenizer


class Fleet(Protocol):
    """Every method raises `shared.client.FleetUnavailable` if Redis cannot be reached."""

    def run(self, command: Generate, *, queue_limit: int = ...) -> AsyncGenerator[Event]:
        """Submit, and follow to the terminal event. Raises `QueueFull` and `UnknownModel` on iteration."""
        ...

    async def abort(self, request_id: str, reason: str = ...) -> object: ...

    async def models(self) -> Sequence[str]: ...

    async def card(self, name: str) -> ModelCard:
        """Raises `shared.client.UnknownModel`, `shared.card.InvalidCard`."""
        ...

    async def tokenizer(self, card: ModelCard) -> Tokenizer:
        """Raises `shared.text.InvalidTokenizer`."""
        ...

    async def workers(self, model: str) -> Sequence[object]:
        """Return the live ones."""
        ...

    async def ping(self) -> None: ...
